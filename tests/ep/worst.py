"""What ranks do in tests of `num_worst_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ep.cases import POISON, POISONED_BYTES, Case, expert_output, inputs
from ep.cases import _plain as plain
from ep.cases import _rows as rows_of
from ep.work import EXPERTS, Described, caught, round_trip
from ep.work import rows_of as small_rows
from expertwire.errors import WorstTokensError
from harness import Rank


def run_worst(rank: Rank, case: Case, worst: int) -> dict[str, Any]:
    """Dispatch, combine, dispatch again, all with `worst` rows; then eager calls on the same Buffer."""
    given = inputs(case, rank.rank)
    buffer = rank.buffer(case.node_of, provider=case.provider)
    buffer.get_local_buffer_tensor(torch.uint8)[:POISONED_BYTES].fill_(POISON)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, case.experts)
    out: dict[str, Any] = {"overflow": None}
    try:
        result = buffer.dispatch(
            given.sent(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            expert_alignment=16,
            num_worst_tokens=worst,
        )
    except WorstTokensError as error:
        result, said = error.result, str(error)
        out["overflow"] = (error.rank, error.total, error.num_worst_tokens) if f"call {result[4].native.epoch}" in said else said
    received, ids, weights, counts, handle, event = result
    received, scales = rows_of(received)
    assert event.event is None
    assert {len(received), len(ids), len(received if weights is None else weights), handle.num_rows} == {worst}
    assert counts.dtype == handle.real_counts.dtype == torch.int32
    valid = handle.num_recv_tokens
    out |= {"x": plain(received[:valid]), "scales": None if scales is None else plain(scales[:valid]), "topk_idx": plain(ids)}
    out |= {"counts": counts.tolist(), "real_counts": handle.real_counts.tolist(), "src_idx": plain(handle.recv_src_idx)}
    y = torch.full((worst, case.hidden), float("nan"), dtype=torch.bfloat16)  # nobody may read the tail
    y[:valid] = expert_output(received[:valid], rank.rank)
    if weights is not None:
        out["topk_weights"] = plain(weights[:valid])
        weights[valid:] = float("nan")
    combined, combined_weights, _ = buffer.combine(y, handle, topk_weights=weights)
    out |= {"combined": plain(combined), "combined_weights": plain(combined_weights)}
    again, *rest, _ = buffer.dispatch(given.sent(again=True), handle=handle, num_worst_tokens=worst if case.seed % 2 else 0)
    assert rest == [None] * 4
    again, _ = rows_of(again)
    assert len(again) == worst
    out["again"] = plain(again[:valid])
    round_trip(buffer, rank.rank)
    return out


def differing(rank: Rank, node_of: Sequence[int]) -> Described:
    buffer = rank.buffer(node_of)
    x, ids, _ = small_rows(rank.rank)
    error = caught(lambda: _small(buffer, x, ids, 64 + (rank.rank == 1)))
    round_trip(buffer, rank.rank)
    return error


def too_large(rank: Rank, node_of: Sequence[int]) -> Described:
    """More rows than the Buffer has bytes for are refused, however few come."""
    buffer = rank.buffer(node_of)
    x, ids, _ = small_rows(rank.rank)
    error = caught(lambda: _small(buffer, x, ids, 1 << 20))
    round_trip(buffer, rank.rank)
    return error


def _small(buffer: Any, x: torch.Tensor, ids: torch.Tensor, worst: int) -> Any:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    return buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, ids, num_worst_tokens=worst)


def cases(node_of: tuple[int, ...]) -> list[tuple[Case, int]]:
    """Shapes, and W: ample, exact for the fullest rank, one too few, half, one row."""
    ranks = len(node_of)
    plain_case = Case(node_of, (11,) * ranks, topk=3, experts=3 * ranks)
    most = 11 * ranks
    shapes = [(replace(plain_case, experts=count * ranks, seed=count), 2 * most) for count in (1, 3, 37, 257, 1025)]
    shapes += [(replace(plain_case, seed=40 + worst), worst) for worst in (most, most // 2, 1)]
    return [
        *shapes,
        (replace(plain_case, index="int32", weights=False, ids="sparse", scales="float32", seed=50), most),
        (replace(plain_case, ids="none", seed=51), 7),
        (replace(plain_case, tokens=(0,) * ranks, seed=52), 7),
        (replace(plain_case, ids="same", tokens=(*(0,) * (ranks - 1), 30), seed=53), 20),
        (replace(plain_case, experts=ranks + 1, hidden=2880, ids="skewed", scales="int32", seed=54), most // 3),
    ]
