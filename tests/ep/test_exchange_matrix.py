"""Dispatch and combine between real processes, bit for bit as the oracle says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ep.cases import Case, expert_output, inputs, run_case
from expertwire.ep.reference import reference_combine, reference_dispatch, reference_layout
from harness import World

# Node tables: 1, 2, 3, 4, 5, 8 and 12 ranks; nodes of 1, 2, 3 and 4; uneven ones, and ranks of a node that are not neighbours.
TABLES: dict[str, tuple[int, ...]] = {
    "1": (0,),
    "2": (0, 0),
    "2 by 1": (0, 1),
    "3": (0, 0, 0),
    "3 uneven": (0, 1, 1),
    "4 by 2": (0, 0, 1, 1),
    "4 by 1": (0, 1, 2, 3),
    "5 uneven": (0, 0, 0, 1, 1),
    "5 mixed": (1, 0, 1, 2, 0),
    "8 by 4": (0, 0, 0, 0, 1, 1, 1, 1),
    "8 by 2": (0, 0, 1, 1, 2, 2, 3, 3),
    "12 by 3": (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3),
    "12 by 4": (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2),
    "12": (0,) * 12,
}


TWELVES = [table for table, node_of in TABLES.items() if len(node_of) == 12]


def some(ranks: int, most: int) -> tuple[int, ...]:
    """Another number of tokens on each rank, none on some."""
    return tuple((7 * rank + 3) * most // 11 % (most + 1) if rank % 3 != 1 else 0 for rank in range(ranks))


def cases(node_of: tuple[int, ...]) -> list[Case]:
    """Shapes looped inside one group."""
    ranks = len(node_of)
    plain = Case(node_of, (9,) * ranks)
    return [
        plain,
        replace(plain, hidden=8, topk=1, experts=ranks, seed=1),
        replace(plain, hidden=2880, topk=8, experts=4 * ranks + 3, biases=1, seed=2),  # E not divisible by R
        replace(plain, hidden=8192, tokens=(5,) * ranks, topk=6, experts=32, biases=2, seed=3),
        replace(plain, topk=16, experts=64, index="int32", seed=4),
        replace(plain, topk=22, experts=40, ids="sparse", seed=5),
        replace(plain, topk=2, experts=max(1, ranks - 1), seed=6),  # E < R: some ranks own none
        replace(plain, tokens=some(ranks, 40), topk=5, ids="skewed", seed=7),
        replace(plain, tokens=(0,) * ranks, seed=8),
        replace(plain, tokens=(*(0,) * (ranks - 1), 13), seed=9),
        replace(plain, ids="none", biases=1, seed=10),
        replace(plain, ids="same", topk=3, seed=11),
        replace(plain, strided=True, biases=2, hidden=24, seed=12),
        replace(plain, weights=False, index="int32", hidden=1, seed=13),
        replace(plain, topk=9, experts=257, seed=14),
        replace(plain, scales="float32", hidden=1037, tokens=some(ranks, 9), seed=15),
        replace(plain, scales="int32", hidden=2048, strided=True, topk=3, index="int32", weights=False, seed=16),
    ]


def plain(value: torch.Tensor | None) -> Any:
    if value is None:
        return None
    bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
    return value.contiguous().view(bits).numpy()


def rows_and_scales(sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (sent, torch.empty(len(sent), 0)) if isinstance(sent, torch.Tensor) else sent


def handle_of(case: Case, rank: int, in_ranks: list[torch.Tensor], src_idx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """DeepEP's tuple for one channel of all tokens, counted token by token; None for what has no counterpart."""
    nodes, mine = range(max(case.node_of) + 1), case.node_of[rank]
    members = [[other for other, node in enumerate(case.node_of) if node == at] for at in nodes]
    in_rank = in_ranks[rank]
    in_node = torch.stack([in_rank[:, ranks].any(1) for ranks in members], dim=1)

    def heads(chosen: torch.Tensor) -> torch.Tensor:
        seen, rows = [0] * chosen.shape[1], torch.full(chosen.shape, -1, dtype=torch.int32)
        for token, to in chosen.nonzero().tolist():
            rows[token, to], seen[to] = seen[to], seen[to] + 1
        return rows

    def channel(chosen: torch.Tensor) -> torch.Tensor:
        return chosen.sum(0, keepdim=True).t().int()

    by_rank = torch.stack([one.sum(0) for one in in_ranks]).cumsum(0).int()
    if len(nodes) == 1:
        return by_rank, channel(in_rank), torch.zeros(case.ranks, 1).int(), src_idx, in_rank, heads(in_rank)
    entering = []
    for node in nodes:
        through = [other for place, other in enumerate(members[node]) if members[mine][place % len(members[mine])] == rank]
        through = [rank] if node == mine else through
        entering.append(sum(int(in_ranks[other][:, members[mine]].any(1).sum()) for other in through))
    by_node = torch.tensor(entering).cumsum(0).int()
    return in_rank, channel(in_node), channel(in_rank), None, by_node, None, by_rank[:, rank], None, heads(in_node), None


def expected(case: Case) -> list[dict[str, Any]]:
    """What run_case must give, by rank."""
    given = [inputs(case, rank) for rank in range(case.ranks)]
    ids = [one.topk_idx for one in given]
    weights = [one.topk_weights for one in given] if case.weights else None
    layouts = [reference_layout(one, case.experts, case.node_of) for one in ids]
    in_ranks = [layout.in_rank for layout in layouts]
    sent, sent_again = ([rows_and_scales(one.sent(again)) for one in given] for again in (False, True))
    received = reference_dispatch([x for x, _ in sent], in_ranks, ids, weights, case.experts, [scales for _, scales in sent])
    again = reference_dispatch([x for x, _ in sent_again], in_ranks, scales=[scales for _, scales in sent_again])
    ys = [expert_output(one.x, rank) for rank, one in enumerate(received)]
    received_weights = [one.topk_weights for one in received] if case.weights else None
    combined = reference_combine(ys, in_ranks, case.node_of, received_weights, [one.biases for one in given])
    again_combined = reference_combine([one.x.bfloat16() for one in again], in_ranks, case.node_of)
    prefix = torch.stack([layout.per_rank for layout in layouts]).cumsum(0, dtype=torch.int32)
    return [
        {
            "per_rank": plain(layouts[rank].per_rank),
            "per_node": plain(layouts[rank].per_node),
            "per_expert": plain(layouts[rank].per_expert),
            "in_rank": plain(layouts[rank].in_rank),
            "x": plain(received[rank].x),
            "scales": plain(received[rank].scales) if case.scales else None,
            "again_scales": plain(again[rank].scales) if case.scales else None,
            "topk_idx": plain(received[rank].topk_idx),
            "topk_weights": plain(received[rank].topk_weights),
            "real_counts": received[rank].expert_counts,
            "counts": [-(-count // 8) * 8 for count in received[rank].expert_counts],
            "src_idx": plain(received[rank].src_idx),
            "prefix": plain(prefix),
            "handle": [plain(entry) for entry in handle_of(case, rank, in_ranks, received[rank].src_idx)],
            "combined": plain(combined[rank][0]),
            "combined_weights": plain(combined[rank][1]),
            "again": plain(again[rank].x),
            "again_combined": plain(again_combined[rank][0]),
        }
        for rank in range(case.ranks)
    ]


def check(world: World, case: Case) -> None:
    for rank, (want, got) in enumerate(zip(expected(case), world.run(case.ranks, run_case, case), strict=True)):
        assert want.keys() == got.keys()
        for name, value in want.items():
            where = f"{name} of rank {rank} in {case}"
            if name == "handle":
                assert len(value) == len(got[name]), where
                for place, (entry, found) in enumerate(zip(value, got[name], strict=True)):
                    assert (entry is None) == (found is None), f"entry {place} of {where}"
                    np.testing.assert_array_equal(found, entry, err_msg=f"entry {place} of {where}")
            elif isinstance(value, np.ndarray):
                assert got[name].dtype == value.dtype, where
                np.testing.assert_array_equal(got[name], value, err_msg=where)
            else:
                assert got[name] == value, where


@pytest.mark.parametrize("table", TABLES)
def test_every_shape_as_the_oracle_says(world: World, table: str, request: pytest.FixtureRequest) -> None:
    """By default each table of twelve ranks has a third of the shapes."""
    first, step = (TWELVES.index(table), len(TWELVES)) if table in TWELVES and not request.config.getoption("--long") else (0, 1)
    for case in cases(TABLES[table])[first::step]:
        check(world, case)


@pytest.mark.parametrize("node_of", [(0,) * 9, (0,) * 9 + (1, 1)], ids=str)
def test_nodes_of_more_than_eight(world: World, node_of: tuple[int, ...]) -> None:
    check(world, Case(node_of, some(len(node_of), 30), topk=11, experts=50, biases=1, seed=31))


def test_nodes_of_sixteen() -> None:
    """Sixteen ranks, in one node, in two of which one has nine (no mask of eight anywhere), and in four of four, also without a token."""
    own = World(16)
    try:
        for node_of in ((0,) * 16, (0,) * 7 + (1,) * 9):
            check(own, Case(node_of, some(16, 30), topk=13, experts=70, biases=2, seed=32))
        fours = tuple(rank // 4 for rank in range(16))  # more ranks than nodes: what is counted by rank does not fit what is by node
        check(own, Case(fours, (0,) * 16, topk=4, experts=64, seed=33))
        check(own, Case(fours, some(16, 30), topk=6, experts=64, provider="tcp", seed=34))
        own.forget()
    finally:
        own.close()


@pytest.mark.parametrize(
    ("table", "provider"),
    [("4 by 2", "local"), ("4 by 2", "tcp"), ("5 uneven", "tcp"), ("8 by 4", "tcp")],
    ids=str,
)
def test_rings_that_turn_round(world: World, table: str, provider: str) -> None:
    """Slots of 64 KiB, two of them: many chunks wait for credit."""
    node_of = TABLES[table]
    case = Case(node_of, some(len(node_of), 200), hidden=4096, experts=24, topk=6, staging=1 << 20, provider=provider, seed=21)
    check(world, case)
    check(world, replace(case, ids="skewed", biases=1, seed=22))
    check(world, replace(case, scales="float32", seed=23))
