"""`expertwire simulate`: the source's figures come out of the real exchange in virtual time, and corruption does where nothing is gated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertwire.cli.main import main
from expertwire.errors import InvalidArgumentError
from expertwire.testing.networks import SLINGSHOT, simulate

POINTS = 0.05  # of async over sync, against the source


def rows_of(path: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["name"] == name]


def test_async_over_sync_is_within_five_points_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main(["simulate", "--nic", "slingshot", "--ranks", "8", "--tokens", "4096", "--json", str(path)]) == 0
    published = {("dispatch", "fp8"): 1.19, ("dispatch", "bf16"): 1.16, ("combine", "bf16"): 1.06}
    ratios = {(row["phase"], row["dtype"]): row["value"] for row in rows_of(path, "async_over_sync")}
    assert set(ratios) == set(published)
    assert {key: abs(ratios[key] - value) <= POINTS for key, value in published.items()} == dict.fromkeys(published, True), ratios
    absolute = [row for row in rows_of(path, "error") if row["figure"] != "async_over_sync"]
    assert len(absolute) == 6
    assert max(row["value"] for row in absolute) < 0.08
    assert all(row["fitted"] for row in absolute)
    for name in ("dispatch_us", "combine_us", "dispatch_GBps", "combine_GBps", "published"):
        assert {"nic", "ranks", "dtype", "gate", "fitted"} <= set(rows_of(path, name)[0])


def test_other_tokens_are_predictions_without_a_published_figure(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert main(["simulate", "--tokens", "256", "--json", str(path)]) == 0
    assert rows_of(path, "published") == []
    assert not any(row["fitted"] for row in rows_of(path, "dispatch_us"))


def test_without_the_gate_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["simulate", "--tokens", "256", "--no-gate", "--json", str(path)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert rows_of(path, "dispatch_us")[0]["status"] == "failed"


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="ranks is 6"):
        simulate(SLINGSHOT, "dispatch", "bf16", 6, 128, "async")
    with pytest.raises(InvalidArgumentError, match="tokens is 0"):
        simulate(SLINGSHOT, "dispatch", "bf16", 8, 0, "async")
    with pytest.raises(InvalidArgumentError, match="dtype is 'f64'"):
        simulate(SLINGSHOT, "dispatch", "f64", 8, 128, "async")
    assert main(["simulate", "--ranks", "6"]) == 2
