"""The GPU kernels of dispatch and combine in Triton's interpreter, between real processes, bit for bit as the oracle says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ep.cases import Case
from ep.test_exchange_matrix import expected, some
from harness import World
from kernels.work import left_alone, run_case

pytest.importorskip("triton", reason="the extra expertwire[cuda] is not installed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def cases(count: int) -> list[Case]:
    plain = Case((0,) * count, (5,) * count)
    return [
        plain,
        replace(plain, tokens=some(count, 10), experts=4 * count + 3, biases=1, ids="sparse", seed=2),
        replace(plain, tokens=(0,) * count, seed=8),
        replace(plain, ids="none", biases=2, hidden=40, seed=10),
        replace(plain, ids="same", topk=3, index="int32", hidden=1, weights=False, seed=11),
        replace(plain, scales="float32", hidden=1037, tokens=some(count, 9), seed=15),
        replace(plain, scales="int32", hidden=2048, topk=3, index="int32", weights=False, seed=16),
    ]


def compare(want: dict[str, Any], got: dict[str, Any], where: str) -> None:
    for name in got.keys() & want.keys():
        if isinstance(want[name], np.ndarray):
            assert got[name].dtype == want[name].dtype, f"{name} {where}"
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name} {where}")
        else:
            assert got[name] == want[name], f"{name} {where}"


@pytest.mark.parametrize("count", [2, 4])
def test_every_shape_as_the_oracle_says(ranks: World, count: int) -> None:
    for case in cases(count)[:: count // 2]:
        for rank, (want, got) in enumerate(zip(expected(case), ranks.run(count, run_case, case), strict=True)):
            assert got.keys() - want.keys() == set()
            compare(want, got, f"of rank {rank} in {case}")


def test_who_gives_up_says_so_and_the_others_are_told(ranks: World) -> None:
    gave_up, told, away = ranks.run(3, left_alone)
    from expertwire.ep.cuda.failures import failure

    assert "rank 0: a kernel waited until its deadline for rank 2 to begin call 1" in str(failure(gave_up, 0))
    assert "rank 1: rank 0 waited until its deadline for rank 2 to begin a call, and gave up" in str(failure(told, 1))
    assert away[0] == 0
