"""The exchange as users write it with torch.distributed and gloo today: what we are measured against.

One copy of a row per destination rank, packed by `index_select`, moved by `all_to_all_single`; the way back is reduced in fp32 over blocks
of tokens that stay in the cache. The choices (one message for ids and weights, buffers kept between calls, blocks) are the ones that
measured fastest on two cores; see benchmarks/gloo_variants.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

BLOCK_TOKENS = 64  # of the reduction: 64 × 7168 × 4 bytes and the rows added stay in the cache


@dataclass
class GlooPlan:
    """Who gets which of my rows, and how many I get: what dispatch leaves for combine."""

    send_rows: torch.Tensor  # i64 [Σ send_counts]: my token of each sent row, by destination rank, then token
    send_counts: list[int]  # [R]
    receive_counts: list[int]  # [R]


@dataclass
class GlooTimes:
    """Seconds of the last call of each kind; `exchange` is the time that the rows alone take to be moved."""

    dispatch: float = 0.0
    combine: float = 0.0
    dispatch_exchange: float = 0.0
    combine_exchange: float = 0.0


@dataclass
class GlooExchange:
    """Dispatch and combine of bf16 rows [T, H] over a gloo group, with `expert_first` i64 [R + 1] saying who owns which expert."""

    group: dist.ProcessGroup | None
    expert_first: torch.Tensor
    times: GlooTimes = field(default_factory=GlooTimes)
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, GlooPlan]:
        """Send each token to every rank that owns one of its experts.

        x bf16 [T, H], topk_idx i64 [T, K] (−1: none), topk_weights f32 [T, K]. Returns the received rows [N, H], *local* expert ids
        i32 [N, K], weights f32 [N, K], and the plan. Rows are ordered by source rank, then token. They are views of a kept buffer.
        """
        begin = time.perf_counter()
        owner = self._owner(topk_idx)
        plan = self._plan(owner)
        rank = dist.get_rank(self.group)
        topk = topk_idx.shape[1]
        packed = self._buffer("packed", plan.send_rows.numel(), x)
        torch.index_select(x, 0, plan.send_rows, out=packed)
        meta = torch.cat((topk_idx.to(torch.int32), topk_weights.view(torch.int32)), dim=1).index_select(0, plan.send_rows)
        total = sum(plan.receive_counts)
        received = self._buffer("received", total, x)
        received_meta = torch.empty(total, 2 * topk, dtype=torch.int32)
        self._move(received_meta, meta, plan.receive_counts, plan.send_counts)
        exchange = time.perf_counter()
        self._move(received, packed, plan.receive_counts, plan.send_counts)
        self.times.dispatch_exchange = time.perf_counter() - exchange
        first, last = int(self.expert_first[rank]), int(self.expert_first[rank + 1])
        ids = received_meta[:, :topk]
        mine = (ids >= first) & (ids < last)
        local = torch.where(mine, ids - first, -1)
        weights = torch.where(mine, received_meta[:, topk:].view(torch.float32), 0.0)
        self.times.dispatch = time.perf_counter() - begin
        return received, local, weights, plan

    def combine(self, y: torch.Tensor, plan: GlooPlan, tokens: int) -> torch.Tensor:
        """Send the rows y bf16 [N, H] home and sum them per token in fp32, ascending by rank: bf16 [tokens, H]."""
        begin = time.perf_counter()
        returned = self._buffer("packed", plan.send_rows.numel(), y)
        exchange = time.perf_counter()
        self._move(returned, y, plan.send_counts, plan.receive_counts)
        self.times.combine_exchange = time.perf_counter() - exchange
        out = torch.empty(tokens, y.shape[1], dtype=y.dtype)
        segments = list(zip(torch.split(returned, plan.send_counts), torch.split(plan.send_rows, plan.send_counts), strict=True))
        cuts = torch.arange(0, tokens + BLOCK_TOKENS, BLOCK_TOKENS)
        bounds = [torch.searchsorted(rows, cuts).tolist() for _, rows in segments]
        accumulator = torch.empty(BLOCK_TOKENS, y.shape[1], dtype=torch.float32)
        for block, start in enumerate(range(0, tokens, BLOCK_TOKENS)):
            stop = min(start + BLOCK_TOKENS, tokens)
            accumulator.zero_()
            for (rows_back, rows), bound in zip(segments, bounds, strict=True):
                low, high = bound[block], bound[block + 1]
                if low < high:
                    accumulator.index_add_(0, rows[low:high] - start, rows_back[low:high].float())
            out[start:stop].copy_(accumulator[: stop - start])
        self.times.combine = time.perf_counter() - begin
        return out

    def _swap(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """An i64 to and from each rank."""
        dist.all_to_all_single(received, sent, group=self.group)

    def _move(self, received: torch.Tensor, sent: torch.Tensor, receive_counts: list[int], send_counts: list[int]) -> None:
        """So many rows to and from each rank."""
        dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.group)

    def _owner(self, topk_idx: torch.Tensor) -> torch.Tensor:
        owner = torch.bucketize(topk_idx, self.expert_first[1:], right=True)
        return torch.where(topk_idx >= 0, owner, -1)

    def _plan(self, owner: torch.Tensor) -> GlooPlan:
        size = self.expert_first.numel() - 1
        in_rank = torch.zeros(owner.shape[0], size + 1, dtype=torch.bool)
        in_rank.scatter_(1, torch.where(owner >= 0, owner, size), True)
        destination_token = in_rank[:, :size].t().nonzero()
        send_counts = in_rank[:, :size].sum(0)
        receive_counts = torch.empty_like(send_counts)
        self._swap(receive_counts, send_counts)
        return GlooPlan(destination_token[:, 1].contiguous(), send_counts.tolist(), receive_counts.tolist())

    def _buffer(self, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Memory that is kept between calls: fresh pages would cost a fault each."""
        kept = self._buffers.get(name)
        if kept is None or kept.shape[0] < rows or kept.shape[1] != like.shape[1] or kept.dtype != like.dtype:
            kept = torch.empty(rows + rows // 8, like.shape[1], dtype=like.dtype)
            self._buffers[name] = kept
        return kept[:rows]
