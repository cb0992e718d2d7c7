"""The low-latency kernels compiled, on a GPU, eager and in replayed graphs: ranks in processes that share the card under MPS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton", reason="the extra expertwire[cuda] is not installed")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none here")
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_format_eager_and_in_a_replayed_graph(tmp_path: Path, ranks: int) -> None:
    rows = tmp_path / "rows.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu_low_latency.py"),
        f"--ranks={ranks}",
        "--tokens=32",
        "--variants=check",
        f"--out={rows}",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    checked = [row["shape"]["row_format"] for row in json.loads(rows.read_text()) if row["what"] == "checked"]
    assert checked == [0, 1, 2, 3]
