"""Traffic that does not fit the buffer goes in rounds (DESIGN "Buffers"): the same bytes, dispatch and combine, however small it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep.cases import Case
from ep.test_exchange_matrix import TABLES, check, expected, some
from harness import World


@pytest.mark.parametrize("table", ["1", "2", "2 by 1", "3 uneven", "4 by 2", "5 mixed", "8 by 4"])
def test_rounds_bring_the_same_bytes(world: World, table: str) -> None:
    node_of = TABLES[table]
    wide = Case(node_of, (23,) * len(node_of), hidden=2880, experts=24, topk=6, data=64 << 10, seed=61)
    assert max(len(one["x"]) for one in expected(wide)) * 5760 > 2 * wide.data
    check(world, wide)
    check(world, replace(wide, tokens=some(len(node_of), 40), ids="skewed", biases=1, strided=True, seed=62))
    check(world, replace(wide, scales="float32", index="int32", weights=False, seed=63))
    # A window of one row, or of two.
    check(world, replace(wide, data=12 << 10, hidden=2304, seed=64))


@pytest.mark.parametrize("table", ["4 by 2", "5 uneven"])
def test_rounds_through_rings_that_turn_round(world: World, table: str) -> None:
    node_of = TABLES[table]
    case = Case(node_of, some(len(node_of), 120), hidden=4096, experts=24, topk=6, staging=1 << 20, provider="tcp", data=128 << 10, seed=65)
    check(world, case)
    check(world, replace(case, ids="same", biases=2, seed=66))
