"""What a rank does with a Buffer's low-latency mode on CUDA tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ep.low_latency_work import Case, check_received, expert_output, inputs, same
from expertwire.ep import Buffer
from expertwire.ep.low_latency_reference import (
    LowLatencyReceived,
    dequantise,
    quantise,
    reference_low_latency_combine,
    reference_low_latency_dispatch,
)
from gpu.work import gpu
from harness import Rank


def buffer_of(rank: Rank, case: Case, timeout_ms: int = 30_000) -> Any:
    """Made once for each number of ranks, large enough for all cases here."""
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    key = ("buffer", "low latency", rank.size)
    if key not in rank.kept:
        local = -(-case.experts // rank.size)
        hint = Buffer.get_low_latency_rdma_size_hint(64, 2048, rank.size, local * rank.size)
        rank.kept[key] = Buffer(rank.group, 0, hint, low_latency_mode=True, device="cuda", timeout_ms=timeout_ms)
    return rank.kept[key]


def sums(rank: Rank, case: Case, wants: list[LowLatencyReceived]) -> torch.Tensor:
    """What this rank's combine must give."""
    given = [inputs(case, one) for one in range(rank.size)]
    seen = [dequantise(*quantise(x, case.fp8 != "exact")).bfloat16() if case.fp8 else x for x, _, _ in given]
    ys = []
    for owner, want in enumerate(wants):
        rows = [[seen[source][token] for source, token, _ in of] for of in want.rows]
        ys.append([expert_output(torch.stack(of) if of else seen[0][:0], owner, expert) for expert, of in enumerate(rows)])
    return reference_low_latency_combine(ys, wants, [one[2] for one in given], case.hidden)[rank.rank]


def run_cases(rank: Rank, cases: list[Case]) -> None:
    """Each dispatched and combined, every bit as the oracle says."""
    for case in cases:
        run_case(rank, buffer_of(rank, cases[0]), case)


def run_case(rank: Rank, buffer: Any, case: Case) -> None:
    ids = [inputs(case, source)[1] for source in range(rank.size)]
    wants = reference_low_latency_dispatch(ids, case.experts)
    x, mine, weights = (gpu(one) for one in inputs(case, rank.rank))
    stats = torch.zeros(len(wants[rank.rank].rows), dtype=torch.int32, device="cuda")
    received, counts, handle, _, hook = buffer.low_latency_dispatch(
        x,
        mine,
        case.tokens_max,
        case.experts,
        stats,
        use_fp8=bool(case.fp8),
        round_scale=case.fp8 in ("round", "ue8m0"),
        use_ue8m0=case.fp8 == "ue8m0",
        return_recv_hook=case.hook,
    )
    if hook is not None:
        hook()
    torch.cuda.synchronize()
    buffer.check()
    on_host = tuple(one.cpu() for one in received) if case.fp8 else received.cpu()
    src_info, layout_range, *numbers = handle
    plain = (src_info.cpu(), layout_range.cpu(), *numbers)
    rows = check_received(case, rank, wants[rank.rank], (on_host, counts.cpu(), plain, stats.cpu()))
    y = torch.zeros((len(rows), rank.size * case.tokens_max, case.hidden), dtype=torch.bfloat16, device="cuda")
    target = buffer.get_next_low_latency_combine_buffer(handle) if case.zero_copy else y
    for expert, part in enumerate(rows):
        target[expert, : len(part)] = gpu(expert_output(part, rank.rank, expert))
    combined, _, hook = buffer.low_latency_combine(y, mine, weights, handle, zero_copy=case.zero_copy, return_recv_hook=case.hook)
    if hook is not None:
        hook()
    torch.cuda.synchronize()
    buffer.check()
    assert same(combined.cpu(), sums(rank, case, wants)), f"sums of {case} on rank {rank.rank}"


def replays(rank: Rank, case: Case, steps: int) -> None:
    """A captured dispatch and combine of what came, replayed with other rows, ids and weights; eager calls of another shape between."""
    buffer = buffer_of(rank, case)
    x, ids, weights = (gpu(one) for one in inputs(case, rank.rank))
    made: dict[str, Any] = {}

    def layer() -> None:
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, case.tokens_max, case.experts, use_fp8=False, return_recv_hook=case.hook
        )
        if hook is not None:
            hook()
        combined, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=case.hook)
        if hook is not None:
            hook()
        made.update(combined=combined, counts=counts)

    other = replace(case, hidden=256, tokens_max=5, seed=9, fp8="exact")
    run_case(rank, buffer, other)
    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for step in range(steps):
        now = replace(case, seed=100 + step, ids=("random", "sparse", "none")[step % 3])
        for to, value in zip((x, ids, weights), inputs(now, rank.rank), strict=True):
            to.copy_(value)
        graph.replay()
        if step % 5 == 4:
            run_case(rank, buffer, other)
        torch.cuda.synchronize()
        buffer.check()
        total = torch.zeros(x.shape, device="cuda")
        for slot in range(case.topk):
            total += torch.where(ids[:, slot, None] >= 0, weights[:, slot, None] * x.float(), 0.0)
        assert torch.equal(made["combined"], total.bfloat16()), f"sums of replay {step} on rank {rank.rank}"
    del graph
