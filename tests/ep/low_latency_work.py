"""What ranks do in tests of the low-latency mode, and what they must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.ep import Buffer
from expertwire.ep.low_latency_reference import (
    LowLatencyReceived,
    dequantise,
    pack_ue8m0,
    quantise,
    reference_low_latency_combine,
    reference_low_latency_dispatch,
)
from harness import Rank

GUARD = 8


@dataclass(frozen=True)
class Case:
    """One dispatch and its combine."""

    tokens_max: int = 8
    hidden: int = 64
    experts: int = 16
    topk: int = 4
    ids: str = "random"  # random, none (all −1), sparse (half −1), twice (one id in two places), skewed
    index: str = "int64"
    tokens: str = "full"  # full, some (another number on each rank, none on some), none
    fp8: str = ""  # "", "exact", "round", "ue8m0"
    hook: bool = True
    zero_copy: bool = False
    strided: bool = False
    strange: bool = False  # NaN and infinity among the rows
    seed: int = 0


def inputs(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of a rank."""
    random = torch.Generator().manual_seed(case.seed * 1009 + rank)
    tokens = {"full": case.tokens_max, "some": (5 * rank + 3) % (case.tokens_max + 1) if rank % 3 != 1 else 0, "none": 0}[case.tokens]
    x = torch.randn((tokens, case.hidden), generator=random).bfloat16()
    if case.strange and tokens:
        x[0, 0], x[-1, -1] = torch.nan, torch.inf
    ids = torch.rand((tokens, max(case.experts, case.topk)), generator=random).argsort(1)[:, : case.topk]
    ids = torch.where(ids < case.experts, ids, -1)
    if case.ids == "none":
        ids = torch.full_like(ids, -1)
    elif case.ids == "sparse":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.5, -1)
    elif case.ids == "twice":  # every other token, so that an expert has room for it
        ids[::2, 1] = ids[::2, 0]
        ids[1::2] = -1
    elif case.ids == "skewed":
        ids = torch.where(ids < max(case.experts // 4, 1), ids, -1)
    weights = torch.rand((tokens, case.topk), generator=random)
    return x, ids.to(getattr(torch, case.index)), weights


def expert_output(rows: torch.Tensor, rank: int, expert: int) -> torch.Tensor:
    """Another value on each rank and expert."""
    return (rows.float() * (1 + rank / 8) + expert / 4).bfloat16()


def strided(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((values.shape[0], values.shape[1] * 2 + 1), 7, dtype=values.dtype)
    wide[:, 1::2] = values
    return wide[:, 1::2]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


def check_received(case: Case, rank: Rank, want: LowLatencyReceived, got: tuple[Any, ...]) -> list[torch.Tensor]:
    """That everything that a dispatch gave is what it must be. Returns bf16 rows by expert, for the experts."""
    received, counts, handle, stats = got
    xs = [inputs(case, source)[0] for source in range(rank.size)]
    packed = [quantise(x, case.fp8 != "exact") for x in xs] if case.fp8 else []
    assert counts.tolist() == want.counts == stats.tolist(), "counts"
    src_info, layout_range, tokens_max, hidden, experts = handle
    assert (tokens_max, hidden, experts) == (case.tokens_max, case.hidden, case.experts)
    assert same(layout_range, want.layout_range(rank.size)), "layout_range"
    rows, scales = received if case.fp8 else (received, None)
    assert rows.shape == (len(want.rows), rank.size * case.tokens_max, case.hidden)
    out = []
    for expert, expected in enumerate(want.rows):
        count = len(expected)
        assert src_info[expert, :count].tolist() == [token for _, token, _ in expected], "src_info"
        if not case.fp8:
            wanted = torch.stack([xs[source][token] for source, token, _ in expected]) if count else rows[expert, :0]
            assert same(rows[expert, :count], wanted), "rows"
            out.append(rows[expert, :count])
            continue
        wanted = torch.stack([packed[source][0][token] for source, token, _ in expected]) if count else rows[expert, :0]
        assert same(rows[expert, :count], wanted), "fp8 rows"
        blocks = -(-case.hidden // 128)
        assert scales is not None
        assert scales.shape == (len(want.rows), rows.shape[1], -(-blocks // 4) if case.fp8 == "ue8m0" else blocks)
        assert scales.stride(1) == 1
        if count:
            factors = torch.stack([packed[source][1][token] for source, token, _ in expected])
            assert same(scales[expert, :count], pack_ue8m0(factors) if case.fp8 == "ue8m0" else factors), "scales"
        out.append(dequantise(rows[expert, :count], scales[expert, :count]).bfloat16())
    return out


def run_case(rank: Rank, buffer: Any, case: Case, masked: Sequence[Sequence[int]] | None = None) -> None:
    """A dispatch and its combine, every bit as the oracle says."""
    given = [inputs(case, source) for source in range(rank.size)]
    x, ids, weights = given[rank.rank]
    wants = reference_low_latency_dispatch([one[1] for one in given], case.experts, masked)
    stats = torch.zeros(len(wants[rank.rank].rows), dtype=torch.int32)
    waits = torch.zeros((2, rank.size), dtype=torch.int64)
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        strided(x) if case.strided else x.clone(),
        strided(ids) if case.strided else ids,
        case.tokens_max,
        case.experts,
        stats,
        waits[0],
        use_fp8=bool(case.fp8),
        round_scale=case.fp8 in ("round", "ue8m0"),
        use_ue8m0=case.fp8 == "ue8m0",
        return_recv_hook=case.hook,
    )
    assert event.event is None
    assert (hook is not None) == case.hook
    if hook is not None:
        hook()
    rows = check_received(case, rank, wants[rank.rank], (received, counts, handle, stats))
    y = torch.zeros((len(rows), rank.size * case.tokens_max, case.hidden), dtype=torch.bfloat16)
    target = buffer.get_next_low_latency_combine_buffer(handle) if case.zero_copy else y
    for expert, part in enumerate(rows):
        target[expert, : len(part)] = expert_output(part, rank.rank, expert)
    around = torch.full((len(x) + 2 * GUARD, case.hidden), -1, dtype=torch.bfloat16)
    out = around[GUARD : len(x) + GUARD] if case.seed % 2 else None
    combined, event, hook = buffer.low_latency_combine(
        y,
        ids,
        weights,
        handle,
        zero_copy=case.zero_copy,
        use_logfmt=case.seed % 3 == 0,
        return_recv_hook=case.hook,
        out=out,
        combine_wait_recv_cost_stats=waits[1],
    )
    if hook is not None:
        y.fill_(torch.nan)  # rows on their way are elsewhere
        hook()
    ys = []
    for source, want in enumerate(wants):
        parts = []
        for expert, expected in enumerate(want.rows):
            stacked = [source_row(case, given[of][0], token) for of, token, _ in expected]
            part = torch.stack(stacked) if stacked else torch.empty((0, case.hidden), dtype=torch.bfloat16)
            parts.append(expert_output(part, source, expert))
        ys.append(parts)
    expected_sums = reference_low_latency_combine(ys, wants, [one[2] for one in given], case.hidden, masked)[rank.rank]
    assert same(combined, expected_sums), "sums"
    assert out is None or combined.data_ptr() == out.data_ptr()
    assert bool((around[:GUARD] == -1).all() and (around[len(x) + GUARD :] == -1).all()), "written around out"
    assert bool((waits >= 0).all())


def source_row(case: Case, x: torch.Tensor, token: int) -> torch.Tensor:
    """What a rank's experts see of a row: bf16, after its way through FP8 if that was asked for."""
    if not case.fp8:
        return x[token]
    rows, scales = quantise(x[token : token + 1], case.fp8 != "exact")
    return dequantise(rows, scales).bfloat16()[0]


def hint(rank: Rank, cases: Sequence[Case]) -> int:
    """What a caller allocates for these."""
    return max(Buffer.get_low_latency_rdma_size_hint(case.tokens_max, case.hidden, rank.size, case.experts) for case in cases)


def run_cases(rank: Rank, node_of: Sequence[int], cases: Sequence[Case], **options: Any) -> None:
    buffer = rank.buffer(node_of, low_latency_mode=True, num_nvl_bytes=1 << 20, num_rdma_bytes=hint(rank, cases), **options)
    for case in cases:
        try:
            run_case(rank, buffer, case)
        except AssertionError as error:
            raise AssertionError(f"{error} of {case}") from error
