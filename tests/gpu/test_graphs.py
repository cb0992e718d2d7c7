"""CUDA graphs of a Buffer: what may stand between replays, what they hold, and what is said when one goes wrong."""

from __future__ import annotations

import pytest

from gpu import graphs
from harness import World

COUNTS = pytest.mark.parametrize("count", [1, 2, 4, 8])
SOME = pytest.mark.parametrize("count", [2, 8])


@COUNTS
def test_shapes_and_eager_calls_between_replays(ranks: World, count: int) -> None:
    ranks.run(count, graphs.two_shapes)


@SOME
def test_58_dispatches_in_each_of_three_graphs(ranks: World, count: int) -> None:
    for result, one, three in ranks.run(count, graphs.many_calls):
        assert one <= 4 * (result + 8192), "of 58 results that died within the capture"
        assert three == one, "a later graph uses the same memory"


@SOME
def test_the_largest_batch_that_fits(ranks: World, count: int) -> None:
    for said in ranks.run(count, graphs.largest):
        assert "a graph that is being recorded needs" in said


@SOME
def test_more_rows_than_were_allowed_in_a_replay(ranks: World, count: int) -> None:
    for said in ranks.run(count, graphs.overflow):
        assert len(said) == 3
        assert all(f"num_worst_tokens is {3 * count}" in one for one in said)


@SOME
def test_every_count_is_written(ranks: World, count: int) -> None:
    ranks.run(count, graphs.poisoned_counts)


@SOME
def test_a_replay_that_one_stays_away_from_and_reset(ranks: World, count: int) -> None:
    *others, _ = ranks.run(count, graphs.left_out)
    for said, later in others:
        assert said.startswith("DeadlineError")
        assert f"rank {count - 1} to begin" in said
        assert later.startswith(("StateError", "DeadlineError"))


@SOME
def test_replays_at_the_same_time(ranks: World, count: int) -> None:
    said = ranks.run(count, graphs.at_the_same_time)[0]
    assert not said or said.startswith(("StateError", "DeadlineError"))
