"""A whole Buffer on CUDA tensors in Triton's interpreter: both modes, and how it goes on after kernels have failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ep.test_exchange_matrix import expected
from harness import World
from kernels import buffer_work as work
from kernels.test_dispatch_combine import compare

pytest.importorskip("triton", reason="the extra expertwire[cuda] is not installed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.mark.parametrize("worst", [0, 13])
def test_dispatch_and_combine_as_the_oracle_says(ranks: World, worst: int) -> None:
    case = work.Case((0, 0), (5, 5), seed=85)
    for rank, (want, got) in enumerate(zip(expected(case), ranks.run(2, work.run_case, case, worst), strict=True)):
        compare(want, got, f"of rank {rank}")


def test_low_latency_as_the_oracle_says(ranks: World) -> None:
    ranks.run(2, work.low_latency, work.LOW)


def test_the_hint_is_enough(ranks: World) -> None:
    ranks.run(2, work.hint)


@pytest.mark.parametrize("mode", ["high throughput", "low latency"])
def test_after_a_deadline_a_reset_brings_all_back(ranks: World, mode: str) -> None:
    first, second = ranks.run(2, work.failed, mode)
    what, told = (
        ("begin call", "begin a call") if mode == "high throughput" else ("send its part of low-latency", "send its part of a low-latency")
    )
    assert f"DeadlineError: rank 0: a kernel waited until its deadline for rank 1 to {what}" in "".join(first)
    assert "StateError: rank 0: check on a Buffer that failed before" in first[1] or not first[0]
    assert f"DeadlineError: rank 1: rank 0 waited until its deadline for rank 1 to {told}" in second[0]
    assert "failed before" in second[1]
    ranks.run(2, work.low_latency, work.LOW)


def test_what_did_not_come_has_no_ids_and_no_counts(ranks: World) -> None:
    blank, counts, line = ranks.run(2, work.fixed_size_alone)[0]
    assert blank
    assert set(counts) == {0}
    assert "DeadlineError" in line


def test_two_operations_at_once_are_refused(ranks: World) -> None:
    for rank, (at_once, later) in enumerate(ranks.run(2, work.two_at_once)):
        assert f"StateError: rank {rank}: two operations of this Buffer ran at the same time on rank 0" in at_once
        assert "at the same time" in later
    ranks.run(2, work.low_latency, work.LOW)


def test_a_reset_that_a_rank_does_not_come_to_can_be_called_again(ranks: World) -> None:
    line, _ = ranks.run(2, work.reset_alone)
    assert "DeadlineError" in line
    ranks.run(2, work.low_latency, work.LOW)


def test_a_dispatch_that_had_no_room_leaves_a_handle_that_is_refused(ranks: World) -> None:
    for dispatch, combine, later in ranks.run(2, work.too_small):
        assert "CapacityError: an earlier call: rank 0 needs" in dispatch
        assert "CapacityError: combine" in combine
        assert "InvalidArgumentError" in later
        assert "which moved no rows" in later


def test_rows_left_out_are_told_by_destroy_at_the_latest(ranks: World) -> None:
    for line in ranks.run(2, work.overflow):
        assert "WorstTokensError" in line
        assert "num_worst_tokens is 3" in line
