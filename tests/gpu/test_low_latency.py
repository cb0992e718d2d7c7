"""The low-latency mode of a Buffer on CUDA tensors, bit for bit as the oracle says, eagerly and in replayed graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ep.low_latency_work import Case
from gpu import low_latency
from harness import World

PLAIN = Case(tokens_max=16, hidden=1024, experts=32, topk=4)
CASES = [
    PLAIN,
    replace(PLAIN, hook=False, seed=1),
    replace(PLAIN, fp8="exact", hidden=1160, tokens="some", seed=2),
    replace(PLAIN, fp8="round", hook=False, ids="sparse", seed=3),
    replace(PLAIN, fp8="ue8m0", experts=27, index="int32", seed=4),
    replace(PLAIN, zero_copy=True, seed=5),
    replace(PLAIN, tokens="none", seed=6),
    replace(PLAIN, ids="none", hook=False, seed=7),
    replace(PLAIN, ids="twice", topk=2, seed=8),
    replace(PLAIN, tokens_max=64, hidden=2048, topk=8, ids="skewed", tokens="some", seed=10),
]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_shape_as_the_oracle_says(ranks: World, count: int) -> None:
    ranks.run(count, low_latency.run_cases, CASES)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("hook", [False, True], ids=["whole", "hook"])
def test_replays(ranks: World, count: int, hook: bool) -> None:
    ranks.run(count, low_latency.replays, replace(PLAIN, hook=hook), 30)
