"""A slow oracle for dispatch and combine, in plain torch, from the contract alone.

It takes all ranks' tensors in one process (lists, one entry per rank) and gives what each rank must get, bit for bit: the same order of
rows, the same order of sums, the same rounding. No exchange code is used. R ranks, T_r tokens of rank r, N_r rows received, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertwire.ep.plan import expert_first

QUIET_NAN = 0x7FC0


@dataclass(frozen=True)
class ReferenceLayout:
    """i32[R], i32[RR] (None on one node), i32[E], bool[T, R]."""

    per_rank: torch.Tensor
    per_node: torch.Tensor | None
    per_expert: torch.Tensor
    in_rank: torch.Tensor


@dataclass(frozen=True)
class ReferenceReceived:
    """What one rank receives: x [N, …], src_rank and src_idx i32[N], topk_idx [N, K] (local ids), topk_weights f32[N, K], raw counts,
    scales [N, S]."""

    x: torch.Tensor
    src_rank: torch.Tensor
    src_idx: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_counts: list[int]
    scales: torch.Tensor | None = None


def round_bf16(value: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16: round to nearest even; every NaN becomes 0x7FC0 (torch's own choice differs between its vector and scalar code)."""
    rounded = value.to(torch.bfloat16)
    rounded.view(torch.int16)[value.isnan()] = QUIET_NAN
    return rounded


def reference_layout(topk_idx: torch.Tensor, num_experts: int, node_of: Sequence[int]) -> ReferenceLayout:
    """Counts one token at a time. ValueError for an id that is neither -1 nor in [0, E)."""
    ranks, nodes = len(node_of), max(node_of) + 1
    first = expert_first(num_experts, ranks)
    owner = [rank for rank in range(ranks) for _ in range(first[rank], first[rank + 1])]
    per_rank, per_node, per_expert = [0] * ranks, [0] * nodes, [0] * num_experts
    in_rank = torch.zeros(topk_idx.shape[0], ranks, dtype=torch.bool)
    for token, ids in enumerate(topk_idx.tolist()):
        for slot, expert in enumerate(ids):
            if expert != -1 and not 0 <= expert < num_experts:
                raise ValueError(f"topk_idx[{token}, {slot}] is {expert}, must be -1 (no expert) or in [0, {num_experts})")
        experts = [expert for expert in ids if expert != -1]
        for expert in experts:
            per_expert[expert] += 1
        to = {owner[expert] for expert in experts}
        for rank in to:
            per_rank[rank] += 1
            in_rank[token, rank] = True
        for node in {node_of[rank] for rank in to}:
            per_node[node] += 1
    return ReferenceLayout(
        torch.tensor(per_rank, dtype=torch.int32),
        torch.tensor(per_node, dtype=torch.int32) if nodes > 1 else None,
        torch.tensor(per_expert, dtype=torch.int32),
        in_rank,
    )


def reference_keep(in_ranks: Sequence[torch.Tensor], num_worst_tokens: int) -> list[torch.Tensor]:
    """What of bool[T_r, R] is kept where each rank keeps its first `num_worst_tokens` rows, in order of source rank and token."""
    kept = [in_rank.clone() for in_rank in in_ranks]
    for to in range(len(in_ranks)):
        row = 0
        for in_rank in kept:
            for token in in_rank[:, to].nonzero().flatten().tolist():
                in_rank[token, to] = row < num_worst_tokens
                row += 1
    return kept


def reference_dispatch(
    xs: Sequence[torch.Tensor],
    in_ranks: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor] | None = None,
    topk_weights: Sequence[torch.Tensor] | None = None,
    num_experts: int = 0,
    scales: Sequence[torch.Tensor] | None = None,
) -> list[ReferenceReceived]:
    """What every rank receives. xs[r]: [T_r, …]; in_ranks[r]: bool[T_r, R]; topk_idx[r]: int [T_r, K]; topk_weights[r]: f32[T_r, K];
    scales[r]: [T_r, S]."""
    ranks = len(xs)
    first = expert_first(num_experts, ranks)
    received = []
    for to in range(ranks):
        picks = [in_ranks[source][:, to].nonzero().flatten() for source in range(ranks)]
        ids = weights = None
        if topk_idx is not None:
            ids = torch.cat([topk_idx[source][pick] for source, pick in enumerate(picks)])
            mine = (ids >= first[to]) & (ids < first[to + 1])
            ids = torch.where(mine, ids - first[to], torch.full_like(ids, -1))
            if topk_weights is not None:
                weights = torch.cat([topk_weights[source][pick] for source, pick in enumerate(picks)])
                weights = torch.where(mine, weights, torch.zeros_like(weights))
        counts = [] if ids is None else [int((ids == expert).sum()) for expert in range(first[to + 1] - first[to])]
        received.append(
            ReferenceReceived(
                x=torch.cat([xs[source][pick] for source, pick in enumerate(picks)]),
                src_rank=torch.cat([torch.full((len(pick),), source, dtype=torch.int32) for source, pick in enumerate(picks)]),
                src_idx=torch.cat(picks).to(torch.int32),
                topk_idx=ids,
                topk_weights=weights,
                expert_counts=counts,
                scales=None if scales is None else torch.cat([scales[source][pick] for source, pick in enumerate(picks)]),
            )
        )
    return received


def reference_combine(
    ys: Sequence[torch.Tensor],
    in_ranks: Sequence[torch.Tensor],
    node_of: Sequence[int],
    weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[Sequence[torch.Tensor]] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """The sums that every home gets: (bf16[T_r, H], f32[T_r, K] or None).

    ys[r]: bf16[N_r, H], rows as dispatch delivered them; weights[r]: f32[N_r, K]; biases[r]: zero to two of bf16[T_r, H]. Order of sums:
    acc = 0 + bias0 + bias1 in fp32; for nodes ascending: p = fp32 sum of that node's present ranks, ascending, rounded to bf16 where the
    node is another; acc += p. The result is bf16(acc). Weights are summed the same way and never rounded.
    """
    ranks, nodes = len(ys), max(node_of) + 1
    results = []
    for home in range(ranks):
        tokens = in_ranks[home].shape[0]
        acc = torch.zeros(tokens, ys[home].shape[1], dtype=torch.float32)
        for bias in biases[home] if biases is not None else ():
            acc += bias.float()
        weight_acc = None if weights is None else torch.zeros(tokens, weights[home].shape[1])
        for node in range(nodes):
            p = torch.zeros_like(acc)
            weight_p = None if weight_acc is None else torch.zeros_like(weight_acc)
            for rank in (rank for rank in range(ranks) if node_of[rank] == node):
                pick = in_ranks[home][:, rank].nonzero().flatten()
                begin = sum(int(in_ranks[source][:, rank].sum()) for source in range(home))
                p[pick] += ys[rank][begin : begin + len(pick)].float()
                if weights is not None and weight_p is not None:
                    weight_p[pick] += weights[rank][begin : begin + len(pick)]
            acc += round_bf16(p).float() if node != node_of[home] else p
            if weight_acc is not None and weight_p is not None:
                weight_acc += weight_p
        results.append((round_bf16(acc), weight_acc))
    return results
