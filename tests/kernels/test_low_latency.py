"""The GPU kernels of the low-latency mode in Triton's interpreter, between real processes, bit for bit as the oracle says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ep.low_latency_work import Case
from harness import World
from kernels import low_latency_work as work

pytest.importorskip("triton", reason="the extra expertwire[cuda] is not installed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def cases(count: int) -> list[Case]:
    plain = Case(tokens_max=2, hidden=64, experts=2 * count, topk=2)  # an operation of the interpreter takes as long as a whole kernel
    most = [
        replace(plain, fp8="exact", hidden=200, strange=True, hook=False, seed=1),
        replace(plain, fp8="ue8m0", hidden=648, ids="sparse", seed=3),
        replace(plain, experts=2 * count + 1, hidden=9, tokens="some", strided=True, seed=8),
    ]
    if count > 2:
        return most[1:]
    return [
        *most,
        replace(plain, fp8="round", hidden=136, index="int32", seed=2),
        replace(plain, zero_copy=True, seed=4),
        replace(plain, tokens="none", seed=5),
        replace(plain, ids="none", fp8="exact", hook=False, seed=6),
        replace(plain, ids="twice", seed=7),
        replace(plain, experts=1, seed=9),  # a rank owns none
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_every_shape_as_the_oracle_says(ranks: World, count: int) -> None:
    for record in ranks.run(count, work.run_cases, cases(count)):
        assert record == [0] * len(record)


def test_two_calls_live_and_their_hooks_come_in_any_order(ranks: World) -> None:
    for refused in ranks.run(2, work.run_overlapped, 2):
        assert "low_latency_dispatch (call" in refused
        assert "at most two results live at a time" in refused


def test_a_masked_rank_is_left_out_and_taken_in_again(ranks: World) -> None:
    ranks.run(3, work.run_masked)


def test_a_rank_that_does_not_come_is_masked_where_that_is_wished(ranks: World) -> None:
    ranks.run(2, work.run_absent, True)


def test_a_rank_that_does_not_come_ends_the_buffer_in_words(ranks: World) -> None:
    said = ranks.run(2, work.run_absent, False)[0]
    assert "rank 0: a kernel waited until its deadline for rank 1 to send its part of low-latency call 1" in said


def test_what_was_wrong_with_a_call_is_said_by_the_next(ranks: World) -> None:
    for said in ranks.run(2, work.run_wrong):
        disagree, bad, many = said
        assert "MismatchError" in disagree
        assert "ranks disagree on num_max_dispatch_tokens_per_rank: 2 elsewhere, rank 1 has 3" in disagree
        assert "neither -1 nor in" in bad
        assert "twice in a row" in many
