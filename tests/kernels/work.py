"""What a rank does in tests of kernels: a case of tests/ep by the kernels, over shared memory."""

from __future__ import annotations

from typing import Any

import torch

from ep.cases import Case, expert_output, inputs
from expertwire.ep.kernels import notify, words
from expertwire.ep.plan import combine_extent, dispatch_extent
from harness import Rank
from kernels.interpreted import DATA_BYTES, exchange_of, over


def plain(value: torch.Tensor | None) -> Any:
    if value is None:
        return None
    bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
    return value.contiguous().view(bits).numpy().copy()


def received(data: Any, offset: int, rows: int, x: torch.Tensor, scales: Any, ids: Any, weights: Any) -> tuple[torch.Tensor, ...]:
    """x, scales, source, ids, weights as they lie behind an offer."""
    topk, wide = (0, 8) if ids is None else (ids.shape[1], ids.element_size())
    width = 0 if scales is None else scales.shape[1]
    at = dispatch_extent(rows, x.shape[1] * x.element_size(), topk, wide, weights is not None, 4 * width)
    return (
        over(data, offset + at.rows, x.dtype, (rows, x.shape[1])),
        None if scales is None else over(data, offset + at.scales, scales.dtype, (rows, width)),
        over(data, offset + at.src_idx, torch.int32, (rows, 1)).view(-1),
        None if ids is None else over(data, offset + at.topk_idx, ids.dtype, (rows, topk)),
        None if weights is None else over(data, offset + at.topk_weights, torch.float32, (rows, topk)),
    )


def run_case(rank: Rank, case: Case, worst: int = 0, chosen: dict[str, Any] | None = None) -> dict[str, Any]:
    """The case; what came out, by the names of tests/ep's oracle."""
    exchange, data = exchange_of(rank, **(chosen or {}))
    given = inputs(case, rank.rank)
    contiguous = given.x.contiguous()
    ids = given.topk_idx.contiguous()
    weights = None if given.topk_weights is None else given.topk_weights.contiguous()
    per_rank, per_expert, in_rank = exchange.layout(ids, case.experts)
    out: dict[str, Any] = {"per_rank": plain(per_rank), "per_expert": plain(per_expert), "in_rank": plain(in_rank)}
    half = DATA_BYTES // 2
    offset = 4096 * (1 + rank.rank)  # another place on each rank
    data_bytes = over(data, 0, torch.uint8, (1, DATA_BYTES))
    data_bytes.fill_(0)
    route, mailbox = exchange.dispatch(contiguous, given.scales, in_rank, per_expert, ids, weights, (offset, half - offset), worst, 8)
    if mailbox is not None:
        box = mailbox.tolist()
        assert box[notify.MAILBOX_STATUS] == 0, box[:8]
        rows = box[notify.MAILBOX_TOTAL]
        local = case.experts // rank.size + (rank.rank < case.experts % rank.size)
        out["real_counts"] = box[notify.MAILBOX : notify.MAILBOX + local]
    else:
        rows = worst
        out["counts"], out["real_counts"] = route.counted(False).tolist(), route.counted(True).tolist()
        out["total"] = int(route.owner[words.R_TOTAL.value])
    x, scales, source, got_ids, got_weights = received(data, offset, rows, contiguous, given.scales, ids, weights)
    out |= {
        "x": plain(x),
        "scales": plain(scales),
        "src_idx": plain(source),
        "topk_idx": plain(got_ids),
        "topk_weights": plain(got_weights),
    }
    if worst:
        rows = out["total"]
        x, got_weights = x[:rows], None if got_weights is None else got_weights[:rows]
    y = expert_output(x, rank.rank)
    at = combine_extent(rows, 2 * case.hidden, case.topk, got_weights is not None)
    put(data, half + at.rows, y)
    put(data, half + at.topk_weights, got_weights)
    tokens = contiguous.shape[0]
    summed = torch.full((tokens, case.hidden), -7).bfloat16()
    summed_weights = None if weights is None else torch.full((tokens, case.topk), -7.0)
    biases = tuple(bias.contiguous() for bias in given.biases)
    exchange.combine(half + at.rows, half + at.topk_weights, case.topk if weights is not None else 0, route, biases, summed, summed_weights)
    out |= {"combined": plain(summed), "combined_weights": plain(summed_weights)}
    again = given.sent(again=True)
    again_x, again_scales = again if isinstance(again, tuple) else (again, None)
    exchange.dispatch_again(again_x.contiguous(), again_scales, route, (offset, half - offset), worst, wait=False)
    x, scales, *_ = received(data, offset, worst if worst else rows, contiguous, given.scales, None, None)
    out |= {"again": plain(x[:rows]), "again_scales": plain(None if scales is None else scales[:rows])}
    assert exchange.record.tolist()[:20] == [0] * 20, exchange.record.tolist()
    return out


def put(data: Any, offset: int, value: torch.Tensor | None) -> None:
    import ctypes

    if value is not None and value.numel():
        ctypes.memmove(data.address + offset, value.contiguous().data_ptr(), value.numel() * value.element_size())


def left_alone(rank: Rank) -> list[int]:
    """A dispatch that the last rank does not come to: the record of each of the others. Rank 0 is the first to lose patience."""
    exchange, _ = exchange_of(rank, timeout_ms=300 if rank.rank == 0 else 60_000)
    if rank.rank < rank.size - 1:
        case = Case((0,) * rank.size, (4,) * rank.size)
        given = inputs(case, rank.rank)
        _, per_expert, in_rank = exchange.layout(given.topk_idx, case.experts)
        exchange.dispatch(given.x, None, in_rank, per_expert, given.topk_idx, None, (4096, 1 << 20), 0, 1)
    return exchange.record.tolist()
