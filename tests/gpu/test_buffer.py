"""A Buffer on CUDA tensors among ranks on the GPUs that there are: bit for bit as the oracle says, eagerly and in replays of a graph.

Several ranks on one GPU need MPS and EXPERTWIRE_SHARE_DEVICE=1: `scripts/gpu_check` sees to both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ep.cases import Case
from ep.test_exchange_matrix import cases, expected
from gpu import work
from harness import World


def compare(want: dict[str, Any], got: dict[str, Any], where: str) -> None:
    for name in got.keys() & want.keys():
        if isinstance(want[name], np.ndarray):
            assert got[name].dtype == want[name].dtype, f"{name} {where}"
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name} {where}")
        else:
            assert got[name] == want[name], f"{name} {where}"


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_shape_as_the_oracle_says(ranks: World, count: int) -> None:
    for number, case in enumerate(cases((0,) * count)):
        for rank, (want, got) in enumerate(zip(expected(case), ranks.run(count, work.run_case, case, 0, number % 2 == 1), strict=True)):
            compare(want, got, f"of rank {rank} in {case}")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_results_of_a_fixed_size(ranks: World, count: int) -> None:
    for case in cases((0,) * count):
        worst = sum(case.tokens) + 5
        for rank, (want, got) in enumerate(zip(expected(case), ranks.run(count, work.run_case, case, worst), strict=True)):
            compare(want, got, f"of rank {rank} in {case}")


@pytest.mark.parametrize(
    ("count", "tokens"), [(2, (9, 9)), (8, (7, 0, 16, 1, 3, 0, 12, 5)), (4, (0, 0, 0, 0))], ids=["two", "ragged", "no token"]
)
@pytest.mark.parametrize("ids", ["random", "none"])
def test_replays(ranks: World, count: int, tokens: tuple[int, ...], ids: str) -> None:
    case = Case((0,) * count, tokens, hidden=2048, experts=32, topk=4, ids=ids, seed=100)
    steps = 50 if count == 2 else 10
    results = ranks.run(count, work.replays, case, sum(tokens) + 1, steps)
    for step in range(steps):
        for rank, want in enumerate(expected(replace(case, seed=case.seed + step))):
            compare(want, results[rank][step], f"of rank {rank} in replay {step}")


@pytest.mark.parametrize("count", [2])
def test_more_rows_than_were_allowed(ranks: World, count: int) -> None:
    case = Case((0, 0), (9, 9), seed=3)
    for said, works in ranks.run(count, work.overflow, case, 4):
        assert "num_worst_tokens is 4" in said
        assert works


@pytest.mark.parametrize("count", [2])
def test_a_capture_that_would_wait_is_refused(ranks: World, count: int) -> None:
    assert all("cannot be recorded into a graph" in said for said in ranks.run(count, work.uncaptured))


@pytest.mark.parametrize("count", [4])
def test_who_stays_away_is_named(ranks: World, count: int) -> None:
    answers = ranks.run(count, work.one_stays_away)
    for said, later, total in answers[:3]:
        assert "for rank 3 to begin" in said
        assert "failed before" in later
        assert total == 1024


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
def test_two_microbatches_on_two_streams(ranks: World, count: int, recorded: bool) -> None:
    ranks.run(count, work.microbatches, recorded)


@pytest.mark.parametrize("count", [2])
def test_two_threads_take_turns(ranks: World, count: int) -> None:
    ranks.run(count, work.two_threads)
