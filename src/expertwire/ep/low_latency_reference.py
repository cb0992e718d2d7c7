"""A slow oracle for the low-latency mode, in plain torch, from the contract alone.

It takes all ranks' tensors in one process (lists, one entry per rank) and gives what each rank must get, bit for bit. No exchange code is
used. R ranks, T_r tokens of rank r, M the most of them, K top-k, E_l local experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertwire.ep.plan import expert_first
from expertwire.ep.reference import round_bf16

SCALE_COLUMNS = 128
FP8_NAN = 0x7F


def quantise(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [T, H] as (e4m3fn [T, H], scales f32 [T, ceil(H / 128)]): every NaN of the rows is 0x7F, of the scales 0x7FC00000."""
    tokens, hidden = x.shape
    blocks = -(-hidden // SCALE_COLUMNS)
    padded = torch.zeros(tokens, blocks * SCALE_COLUMNS, dtype=torch.float32)
    padded[:, :hidden] = x.float()
    padded = padded.view(tokens, blocks, SCALE_COLUMNS)
    amax = padded.abs().amax(dim=2).clamp(min=1e-4)
    scales = amax * torch.tensor(1.0 / 448.0, dtype=torch.float32)
    factor = torch.tensor(448.0) / amax
    if round_scale:
        bits = scales.view(torch.int32)
        finite = scales.isfinite()
        scales = torch.where(finite, ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32), scales)
        factor = 1.0 / scales
    scales[scales.isnan()] = torch.nan
    rows = (padded * factor.unsqueeze(2)).to(torch.float8_e4m3fn).view(tokens, blocks * SCALE_COLUMNS)[:, :hidden].contiguous()
    raw = rows.view(torch.uint8)
    raw[raw & 0x7F == FP8_NAN] = FP8_NAN
    return rows, scales


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two f32 [..., S] as int32 [..., ceil(S / 4)]: four exponents each, the first in the lowest byte; what is lacking is 0."""
    blocks = scales.shape[-1]
    exponents = torch.zeros(*scales.shape[:-1], -(-blocks // 4) * 4, dtype=torch.uint8)
    exponents[..., :blocks] = (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    return exponents.view(torch.int32)


def dequantise(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3fn [N, H] with scales f32 [N, ceil(H / 128)], or their UE8M0 words, as f32 [N, H]."""
    if scales.dtype == torch.int32:
        exponents = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., : -(-rows.shape[1] // SCALE_COLUMNS)]
        scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    wide = scales.repeat_interleave(SCALE_COLUMNS, dim=1)[:, : rows.shape[1]]
    return rows.float() * wide


@dataclass(frozen=True)
class LowLatencyReceived:
    """What one rank receives, of each local expert: the source rank, the source token and the top-k slot of each row, in order."""

    rows: list[list[tuple[int, int, int]]]

    @property
    def counts(self) -> list[int]:
        """Rows of each local expert."""
        return [len(rows) for rows in self.rows]

    def layout_range(self, ranks: int) -> torch.Tensor:
        """i64 [E_l, R]: begin << 32 | count of each source's rows."""
        table = torch.zeros(len(self.rows), ranks, dtype=torch.int64)
        for expert, rows in enumerate(self.rows):
            begin = 0
            for source in range(ranks):
                count = sum(row[0] == source for row in rows)
                table[expert, source] = begin << 32 | count
                begin += count
        return table


def reference_low_latency_dispatch(
    topk_idx: Sequence[torch.Tensor], num_experts: int, masked: Sequence[Sequence[int]] | None = None
) -> list[LowLatencyReceived]:
    """Which rows every rank receives. topk_idx[r]: int [T_r, K]. masked[r]: ranks that r leaves out; a pair moves nothing where either
    leaves out the other."""
    ranks = len(topk_idx)
    first = expert_first(num_experts, ranks)
    out_of = [set(masked[rank]) if masked is not None else set() for rank in range(ranks)]
    received = []
    for to in range(ranks):
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(first[to + 1] - first[to])]
        for source in range(ranks):
            if source in out_of[to] or to in out_of[source]:
                continue
            for token, ids in enumerate(topk_idx[source].tolist()):
                for slot, expert in enumerate(ids):
                    if first[to] <= expert < first[to + 1]:
                        rows[expert - first[to]].append((source, token, slot))
        received.append(LowLatencyReceived(rows))
    return received


def reference_low_latency_combine(
    ys: Sequence[Sequence[torch.Tensor]],
    received: Sequence[LowLatencyReceived],
    topk_weights: Sequence[torch.Tensor],
    hidden: int,
    masked: Sequence[Sequence[int]] | None = None,
) -> list[torch.Tensor]:
    """The sums bf16 [T_r, H] that every home gets. ys[r][e]: bf16 [count, H], rows as the dispatch delivered them. Each product is rounded
    to fp32, then added in top-k order."""
    ranks = len(ys)
    results = []
    for home in range(ranks):
        tokens, topk = topk_weights[home].shape
        found: dict[tuple[int, int], torch.Tensor] = {}
        for rank in range(ranks):
            if masked is not None and (rank in masked[home] or home in masked[rank]):
                continue
            for expert, rows in enumerate(received[rank].rows):
                for place, (source, token, slot) in enumerate(rows):
                    if source == home:
                        found[token, slot] = ys[rank][expert][place]
        acc = torch.zeros(tokens, hidden)
        for token in range(tokens):
            for slot in range(topk):
                if (token, slot) in found:
                    acc[token] += topk_weights[home][token, slot] * found[token, slot].float()
        results.append(round_bf16(acc))
    return results
