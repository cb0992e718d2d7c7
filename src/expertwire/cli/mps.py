"""NVIDIA's multi-process service, under which ranks that share a GPU run at the same time: in a fresh folder, ended with the block."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expertwire.errors import UnavailableError

CONTROL = "nvidia-cuda-mps-control"
START_S, END_S = 20, 20


@contextmanager
def daemon() -> Iterator[list[str]]:
    """A daemon of its own. What those who share GPUs need in their environment, as `env` takes it: NAME=VALUE.

    Raises `UnavailableError` where there is none, or it does not start.
    """
    program = shutil.which(CONTROL)
    if program is None:
        raise UnavailableError(f"there is no {CONTROL} here (it comes with NVIDIA's driver): ranks that share a GPU need it")
    with tempfile.TemporaryDirectory(prefix="expertwire-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": Path(folder, "pipe"), "CUDA_MPS_LOG_DIRECTORY": Path(folder, "log")}
        for place in places.values():
            place.mkdir()
        variables = [f"{name}={place}" for name, place in places.items()]
        # Not through a pipe of ours: what stays behind would hold it open.
        done = subprocess.run(
            ["env", *variables, program, "-d"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=START_S, check=False
        )
        if done.returncode:
            raise UnavailableError(f"`{CONTROL} -d` ended with status {done.returncode}: ranks that share a GPU need it")
        try:
            yield [*variables, "EXPERTWIRE_SHARE_DEVICE=1"]
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["env", *variables, program], input=b"quit\n", capture_output=True, timeout=END_S, check=False)
