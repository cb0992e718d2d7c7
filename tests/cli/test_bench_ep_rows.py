"""What `bench ep` makes of the ranks' seconds: `copy_utilization`, by arithmetic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from expertwire.cli.bench.ep import Setup, add_rows
from expertwire.cli.bench.paired import Measured, Samples, time_copies
from expertwire.cli.report import Report

SETUP = Setup((0, 1), (4, 4), 64, 8, 2, "uniform", None, (), 3, 0, 5)


def rank_of(received: int, sent: int, copies: list[float], dispatch: list[float], combine: list[float]) -> Measured:
    seconds = {"layout": [0.0] * 3, "dispatch": dispatch, "combine_received": combine, "combine_ordinary": [2 * one for one in combine]}
    return Measured([Samples("expertwire", seconds)], received, sent, 1, copies, "tcp", 1)


def shares(*measured: Measured) -> dict[tuple[str, str], float]:
    report = Report("bench ep", {})
    add_rows(report, list(measured), SETUP)
    rows = [row for row in report.rows if row.name == "copy_utilization"]
    return {(row.labels["phase"], row.labels.get("combine_input", "")): row.value for row in rows}


def test_copy_utilization_is_the_time_of_a_copy_of_the_same_bytes_over_that_of_the_call() -> None:
    """Both by the slowest rank of an iteration, then the median: copies 2, 3, 2; dispatches 5, 4, 8; a combine brings twice the rows."""
    first = rank_of(10, 50, [1.0, 3.0, 2.0], [4.0, 4.0, 8.0], [9.0, 1.0, 8.0])
    second = rank_of(30, 30, [2.0, 1.0, 2.0], [5.0, 3.0, 1.0], [1.0, 7.0, 1.0])
    assert shares(first, second) == {("dispatch", ""): 0.4, ("combine", "received"): 0.5, ("combine", "ordinary"): 0.25}


def test_there_is_none_where_a_rank_receives_nothing_to_copy() -> None:
    """Its copy would take no time, whatever it sends."""
    one = rank_of(10, 10, [1.0] * 3, [4.0] * 3, [4.0] * 3)
    assert shares(one, rank_of(0, 10, [0.0] * 3, [4.0] * 3, [4.0] * 3)) == {}


def test_the_copy_that_it_is_measured_against_copies_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as there are iterations, and each begins on all ranks at once."""
    barriers: list[int] = []
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(1))
    rows = torch.arange(48, dtype=torch.bfloat16).view(6, 8)
    target = torch.zeros_like(rows)
    seconds = time_copies(rows, target, 3)
    assert torch.equal(target, rows)
    assert len(seconds) == len(barriers) == 3
    assert all(one > 0 for one in seconds)
