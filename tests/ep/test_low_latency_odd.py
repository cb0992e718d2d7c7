"""The low-latency mode where things go otherwise: order of calls, disagreements, masks, threads, deaths."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ep import low_latency_odd as odd
from ep.work import Described
from harness import World


def test_at_most_two_live_and_the_third_is_refused_by_name(world: World) -> None:
    expected = {
        "third": ("StateError", r"call \d+, which takes the memory of call"),
        "combine early": ("StateError", "low_latency_combine would be call"),
        "buffer early": ("StateError", "get_next_low_latency_combine_buffer would be call"),
        "buffer of another call": ("StateError", "handed out for call"),
        "no mode": ("StateError", "without the low-latency mode"),
        "no mask": ("StateError", "enable_shrink=True"),
        "hook and event": ("InvalidArgumentError", "exclude each other"),
        "ue8m0 alone": ("InvalidArgumentError", "round_scale=True"),
        "too many tokens": ("InvalidArgumentError", "x has 6 rows, num_max_dispatch_tokens_per_rank is 5"),
        "id beyond": ("InvalidArgumentError", r"must be -1 \(no expert\) or in"),
        "stats strided": ("InvalidArgumentError", "cumulative_local_expert_recv_stats is not contiguous"),
        "handle type": ("InvalidTypeError", "must be what low_latency_dispatch returned, got tuple"),
        "other ids": ("InvalidArgumentError", "sent no row of that token"),
    }
    for out in world.run(4, odd.order_of_calls, (0, 0, 1, 1)):
        check_all(expected, out)
        assert "hook of low_latency_dispatch" in out["third"][2]
        assert " and of low_latency_dispatch" in out["third"][2], "both are named"


def check_all(expected: dict[str, tuple[str, str]], out: dict[str, Described]) -> None:
    assert expected.keys() == out.keys()
    for name, (kind, text) in expected.items():
        assert out[name][0] == kind, f"{name}: {out[name]}"
        with pytest.raises(ValueError, match=text):
            raise ValueError(out[name][2])


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_disagreements_are_named_on_every_rank(world: World, node_of: tuple[int, ...]) -> None:
    expected = {
        "M": ("MismatchError", "num_max_dispatch_tokens_per_rank: rank 0 has 6, rank 2 has 7"),
        "M beyond the memory": ("MismatchError", "num_max_dispatch_tokens_per_rank: rank 0 has 6, rank 2 has 1000"),
        "M beyond any memory": ("MismatchError", "num_max_dispatch_tokens_per_rank: rank 0 has 6, rank 2 has 200000000"),
        "H": ("MismatchError", "hidden: rank 0 has 64, rank 2 has 32"),
        "E": ("MismatchError", "num_experts: rank 0 has 16, rank 2 has 17"),
        "K": ("MismatchError", "num_topk: rank 0 has 4, rank 2 has 2"),
        "format": ("MismatchError", "rank 0 has bf16, rank 2 has fp8"),
        "nothing fits": ("CapacityError", r"need \d+ bytes of low-latency memory on a rank, num_rdma_bytes is \d+"),
        "nothing fits anywhere": ("CapacityError", r"need \d{12,} bytes of low-latency memory on a rank, num_rdma_bytes is \d+"),
        "E beyond": ("InvalidArgumentError", "rank 0 owns 666666667 of num_experts 2000000000, at most 2048 were planned"),
        "operation": ("MismatchError", "rank 0 has low_latency_combine, rank 2 has low_latency_dispatch"),
    }
    for out in world.run(3, odd.disagreements, node_of):
        check_all(expected, out)


@pytest.mark.parametrize("node_of", [(0, 0, 0, 0), (0, 0, 1, 1)], ids=str)
def test_masked_ranks_are_left_out_and_taken_in_again(world: World, node_of: tuple[int, ...]) -> None:
    world.run(4, odd.masks, node_of)


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_two_microbatches_and_the_other_mode_beside_them(world: World, node_of: tuple[int, ...]) -> None:
    assert world.run(2, odd.microbatches, node_of, 10) == [20, 20]


def test_four_writes_in_flight_are_enough(world: World) -> None:
    """SPEC E15: everything meets EAGAIN, in both modes."""
    answers = world.run(4, odd.four_in_flight, (0, 0, 1, 1))
    assert max(window for window, _ in answers) <= 4
    assert sum(short for _, short in answers) > 0


@pytest.fixture
def doomed() -> Iterator[World]:
    """A world of its own, for a test that loses a rank."""
    own = World(4)
    try:
        yield own
    finally:
        own.close()


@pytest.mark.parametrize("shrink", [False, True])
def test_a_killed_rank_is_named_or_masked(doomed: World, shrink: bool) -> None:
    doomed.start(4, odd.die, (0, 0, 1, 1), 2, shrink)
    answers = doomed.finish(60)
    assert answers.pop(2) == (False, "ended with exit code -9")
    for rank, (returned, what) in answers.items():
        assert returned, f"rank {rank}: {what}"
        assert what["seen_s"] < 19
        if shrink:
            assert what["masked"] == [0, 0, 1, 0]
        else:
            assert what["error"][:2] == ("PeerError", 2), f"rank {rank}: {what['error']}"
            assert what["later"][0] == "StateError"


@pytest.mark.parametrize("shrink", [False, True])
def test_who_does_not_come_is_named_or_masked(world: World, shrink: bool) -> None:
    for out in world.run(3, odd.time_out, (0, 1, 1), shrink)[:-1]:
        if shrink:
            assert out["masked"] == [0, 0, 1]
        else:
            kind, _, message = out["error"]
            assert kind == "DeadlineError"
            # It may have gone before its own rows had left, of which it would speak at its next call.
            assert re.search("rank 2: waiting for its rows; the last rows from it were of call 2, and it has consumed call [12]", message)
