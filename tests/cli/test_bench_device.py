"""`bench ep --device cuda`: engines and figures, on CPU tensors beside a module shaped like DeepEP; and what it says without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertwire.cli.bench import ep_device, ep_device_rank
from expertwire.cli.bench.ep_device import DeviceSetup
from expertwire.cli.launch import launch
from expertwire.cli.lists import whole_numbers
from expertwire.cli.main import main
from expertwire.cli.report import Exit
from expertwire.errors import InvalidArgumentError

PEER = "cli.shaped_like_deep_ep"
SMALL = DeviceSetup(
    ranks=2, sizes=(24, 5), hidden=256, experts=9, topk=3, dtypes=("bf16", "fp8"), mode="ht", against=(PEER, "no_such_module"),
    iterations=2, seed=1, graph=False, sms=None, also_sms=(4,), budget_s=60.0, gpus=2, device="cpu",
)  # fmt: skip

needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a GPU is here")


def rows_of(setup: DeviceSetup, tmp_path: Path) -> list[dict[str, Any]]:
    setup = replace(setup, journal=str(tmp_path / "journal"))
    by_rank = launch(ep_device_rank.rank_main, (setup,), setup.ranks, timeout_s=90)
    noted = [json.loads(line) for line in Path(setup.journal).read_text().splitlines()]
    assert noted == by_rank[0] == by_rank[1]
    return noted


def named(rows: list[dict[str, Any]], **labels: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def test_both_engines_by_the_same_code(tmp_path: Path) -> None:
    rows = rows_of(SMALL, tmp_path)
    for engine in ("expertwire", PEER):
        assert [row["status"] for row in named(rows, name="verified", engine=engine)] == ["ok", "ok"]
        for tokens in SMALL.sizes:
            here = {"engine": engine, "tokens": tokens, "timing": "back_to_back"}
            dispatches = [row for row in named(rows, name="dispatch_us", **here) if "sms" not in row]
            assert {(row["dtype"], row["routing"]) for row in dispatches} == {
                (dtype, routing) for dtype in ("bf16", "fp8") for routing in ("fresh", "handle")
            }
            assert {row["combine_input"] for row in named(rows, name="combine_us", **here)} == {"received", "elsewhere"}
            assert all(row["value"] > 0 for row in named(rows, unit="µs", **here))
            assert len(named(rows, name="layout_us", **here)) == 1
    assert {row["timing"] for row in named(rows, name="dispatch_us")} == {"back_to_back", "event", "host"}
    over = named(rows, name="over_cli_shaped_like_deep_ep", timing="back_to_back")
    assert len(over) == len(SMALL.sizes) * 7
    assert len(named(rows, sms=4)) == len(SMALL.sizes) * 3
    assert [row["why"] for row in named(rows, name="over_no_such_module")] == ["ModuleNotFoundError: No module named 'no_such_module'"]
    assert not named(rows, status="failed")


def test_low_latency_of_both_engines(tmp_path: Path) -> None:
    rows = rows_of(replace(SMALL, mode="ll", sizes=(16,), against=(PEER,)), tmp_path)
    for engine in ("expertwire", PEER):
        assert [row["status"] for row in named(rows, name="verified", engine=engine)] == ["ok", "ok"]
        dispatches = named(rows, name="dispatch_us", engine=engine, timing="back_to_back")
        assert {(row["dtype"], row["hook"]) for row in dispatches} == {(dtype, hook) for dtype in ("bf16", "fp8") for hook in (False, True)}


def test_a_wrong_sum_is_seen_and_what_is_not_begun_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(replace(SMALL, sizes=(8,), seed=2, against=("cli.wrong_deep_ep",), budget_s=0.0), tmp_path)
    (ours,) = named(rows, name="verified", engine="expertwire")
    (wrong,) = named(rows, name="verified", engine="cli.wrong_deep_ep")
    assert ours["status"] == "ok"
    assert wrong["status"] == "failed"
    assert "sums of rows received differ" in wrong["why"]
    assert {row["why"] for row in named(rows, name="dispatch_us")} == {"the budget was spent"}


@needs_no_gpu
def test_without_a_gpu_it_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert main(["bench", "ep", "--device", "cuda", "--graph", "--against", "deep_ep", "--json", str(out)]) == Exit.SKIPPED
    assert "skipped: torch sees no GPU here" in capsys.readouterr().err
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["value"], row["status"], row["device"]) == ("verified", None, "skipped", "cuda")


def test_a_run_whose_ranks_fail(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A device that torch does not know: each rank fails when it makes its first tensor.
    rows = ep_device.measure(replace(SMALL, device="no such device", budget_s=20.0), tmp_path)
    assert rows[-1]["status"] == "failed"
    assert "no such device" in rows[-1]["why"]
    assert "no such device" in capfd.readouterr().err


def test_what_had_been_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ended(setup: DeviceSetup, _: Path) -> Any:
        Path(setup.journal).write_text(json.dumps({"name": "dispatch_us", "value": 7.0, "unit": "µs", "status": "ok"}) + "\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(ep_device, "gpus", lambda: 2)
    monkeypatch.setattr(ep_device, "measure", ended)
    out = tmp_path / "rows.json"
    assert main(["bench", "ep", "--device", "cuda", "--json", str(out)]) == Exit.INTERRUPTED
    kept, last = json.loads(out.read_text())["rows"]
    assert (kept["name"], kept["value"]) == ("dispatch_us", 7.0)
    assert (last["status"], last["why"]) == ("failed", "it was ended before it was done")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--graph"], "--graph is given with --device cpu"),
        (["--dtype", "both"], "--dtype both is given with --device cpu"),
        (["--device", "cuda", "--loop", "3"], "--loop 3.0 with --device cuda"),
        (["--device", "cuda", "--against", "not a module"], "name of a module"),
        (["--device", "cuda", "--also-sms", "x"], "--also-sms is 'x'; give whole numbers"),
        (["--against", "deep_ep"], "--against deep_ep with --mode ht"),
    ],
)
def test_what_cannot_be_meant(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ep", *words]) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_numbers() -> None:
    assert whole_numbers("--sizes", "4096,512", 1) == (4096, 512)
    for wrong in ("", "0", "a"):
        with pytest.raises(InvalidArgumentError):
            whole_numbers("--sizes", wrong, 1)
