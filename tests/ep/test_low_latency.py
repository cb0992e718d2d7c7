"""The low-latency mode between real processes, bit for bit as the oracle says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep.low_latency_work import Case, run_cases
from harness import World

TABLES: dict[str, tuple[int, ...]] = {
    "1": (0,),
    "2 by 1": (0, 1),
    "3 uneven": (0, 1, 1),
    "4 by 2": (0, 0, 1, 1),
    "5 mixed": (1, 0, 1, 2, 0),
    "8 by 4": (0, 0, 0, 0, 1, 1, 1, 1),
}


def cases(ranks: int) -> list[Case]:
    """Shapes looped inside one group; each fits what the hint for it says."""
    plain = Case(experts=4 * ranks)
    return [
        plain,
        replace(plain, fp8="exact", hidden=200, seed=1),
        replace(plain, fp8="round", hidden=512, hook=False, seed=2),
        replace(plain, fp8="ue8m0", hidden=2880, tokens_max=3, seed=3),
        replace(plain, zero_copy=True, seed=4),
        replace(plain, topk=9, experts=9 * ranks, index="int32", seed=5),
        replace(plain, topk=16, experts=16 * ranks, tokens="some", strided=True, seed=6),
        replace(plain, topk=22, experts=24 * ranks, tokens_max=2, seed=7),
        replace(plain, tokens="some", ids="sparse", fp8="exact", hidden=1, seed=8),
        replace(plain, tokens="none", seed=9),
        replace(plain, ids="none", fp8="ue8m0", seed=10),
        replace(plain, ids="twice", hook=False, seed=11),
        replace(plain, experts=4 * ranks + 1, seed=12),  # E not divisible by R
        replace(plain, experts=max(1, ranks - 1), topk=2, tokens_max=4, seed=13),  # some ranks own none
        replace(plain, ids="skewed", zero_copy=True, tokens_max=32, seed=14),
        replace(plain, fp8="exact", strange=True, hidden=300, hook=False, seed=15),
    ]


@pytest.mark.parametrize("table", TABLES)
def test_every_shape_as_the_oracle_says(world: World, table: str) -> None:
    node_of = TABLES[table]
    world.run(len(node_of), run_cases, node_of, cases(len(node_of)))
