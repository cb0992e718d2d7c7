"""What a rank does with a whole Buffer on CUDA tensors, in Triton's interpreter: everything but streams, events, graphs and IPC."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep.cases import Case, expert_output, inputs
from ep.low_latency_work import Case as LowCase
from ep.low_latency_work import inputs as low_inputs
from ep.low_latency_work import run_case as run_low
from expertwire.ep import Buffer
from expertwire.ep.kernels import words
from expertwire.errors import ExpertwireError
from harness import Rank
from kernels.interpreted import buffer_of
from kernels.work import plain

LOW = LowCase(tokens_max=2, hidden=64, experts=4, topk=2, fp8="exact", seed=80)
LOW_BYTES = 1 << 20


def case_of(rank: Rank, seed: int = 0) -> Case:
    return Case((0,) * rank.size, (5,) * rank.size, seed=seed)


def dispatched(rank: Rank, buffer: Buffer, case: Case, worst: int = 0) -> tuple[Any, ...]:
    given = inputs(case, rank.rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, case.experts)
    options: dict[str, Any] = {"num_worst_tokens": worst} if worst else {}
    return buffer.dispatch(
        given.x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        expert_alignment=8,
        **options,
    )


def run_case(rank: Rank, case: Case, worst: int = 0, **options: Any) -> dict[str, Any]:
    """The case; what came out, by the names of the oracle; rows that count."""
    buffer = buffer_of(rank, **options)
    received, ids, weights, counts, handle, event = dispatched(rank, buffer, case, worst)
    assert event.event is None
    rows = int(handle.num_tokens_matrix[:, rank.rank].sum())
    out = {"x": plain(received[:rows]), "topk_idx": plain(ids[:rows]), "topk_weights": plain(weights[:rows])}
    out |= {"counts": list(map(int, counts)), "real_counts": list(map(int, handle.real_counts))}
    out |= {"src_idx": plain(handle.recv_src_idx[:rows])}
    combined, combined_weights, _ = buffer.combine(expert_output(received, rank.rank), handle, topk_weights=weights)
    again, *_ = buffer.dispatch(-inputs(case, rank.rank).x, handle=handle)
    buffer.check()
    return out | {"combined": plain(combined), "combined_weights": plain(combined_weights), "again": plain(again[:rows])}


def low_latency(rank: Rank, case: LowCase) -> None:
    run_low(rank, buffer_of(rank, low_latency_mode=True, num_rdma_bytes=LOW_BYTES), case)


def hint(rank: Rank) -> None:
    """As many bytes as the hint says are enough, where few experts make every row go everywhere, for the zero-copy buffer too."""
    tokens, hidden, experts = 4, 24, rank.size
    bytes_of_hint = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, rank.size, experts)
    run_low(
        rank,
        buffer_of(rank, low_latency_mode=True, num_rdma_bytes=bytes_of_hint),
        LowCase(tokens_max=tokens, hidden=hidden, experts=experts, topk=2, zero_copy=True, seed=81),
    )


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def patience(buffer: Buffer, milliseconds: int) -> None:
    """How long this rank's kernels wait from now on."""
    for exchange in (buffer.runtime._exchange, buffer.runtime.low_latency.exchange):
        exchange.state[words.STATE_DEADLINE.value] = milliseconds * 1_000_000


def failed(rank: Rank, mode: str) -> list[str]:
    """Rank 0 is alone in an operation; the last comes when it has given up. What each is told, then a reset, and the same again, whole."""
    buffer = buffer_of(rank, low_latency_mode=True, num_rdma_bytes=LOW_BYTES)
    case = case_of(rank, 82)
    *_, handle, _ = dispatched(rank, buffer, case)
    x, ids, _ = low_inputs(LOW, rank.rank)

    def low(hook: bool = False) -> Any:
        return buffer.low_latency_dispatch(x, ids, LOW.tokens_max, LOW.experts, return_recv_hook=hook)

    hook = low(True)[4]
    call = (lambda: dispatched(rank, buffer, case)) if mode == "high throughput" else low
    lines = []
    meet(rank)
    if rank.rank == 0:
        patience(buffer, 200)
        lines.append(said(call))
        lines.append(said(buffer.check))
        patience(buffer, 20_000)
    meet(rank)
    if rank.rank:
        lines.append(said(call) or said(buffer.check))
        lines.append(said(buffer.check))
    buffer.reset()
    assert "before a reset" in said(hook)
    assert "before reset" in said(lambda: buffer.combine(inputs(case, rank.rank).x[:0].new_empty((handle.num_rows, case.hidden)), handle))
    assert not said(buffer.check)
    return lines


def fixed_size_alone(rank: Rank) -> tuple[bool, list[int], str]:
    """A dispatch of a fixed size that the last rank does not come to: ids, counts and what is said then; and a reset."""
    buffer = buffer_of(rank, low_latency_mode=True, num_rdma_bytes=LOW_BYTES)
    dispatched(rank, buffer, case_of(rank, 87), 13)
    meet(rank)
    if rank.rank:
        buffer.reset()
        return True, [], ""
    patience(buffer, 200)
    over = buffer.runtime._exchange._owners[1]
    ctypes.memset(over.address, 0x11, over.length)
    received, ids, _, counts, handle, _ = dispatched(rank, buffer, case_of(rank, 87), 13)
    buffer_counts = [*counts.tolist(), *handle.real_counts.tolist()]
    patience(buffer, 20_000)
    line = said(lambda: buffer.combine(received, handle))
    buffer.reset()
    return bool((ids == -1).all()), buffer_counts, line


def meet(rank: Rank) -> None:
    dist.barrier(group=rank.group)


def two_at_once(rank: Rank) -> list[str]:
    """An operation that finds another one begun and not ended, as where graphs are replayed on two streams."""
    buffer = buffer_of(rank, low_latency_mode=True, num_rdma_bytes=LOW_BYTES)
    words_of = buffer.runtime._exchange._owners[0].address
    if rank.rank == 0:
        ctypes.c_int64.from_address(words_of + 8 * words.EPOCH.value).value += 1
    lines = [said(lambda: dispatched(rank, buffer, case_of(rank, 83))), said(buffer.check)]
    buffer.reset()
    return lines


def reset_alone(rank: Rank) -> str:
    """A reset that another rank does not come to, and then one that all come to."""
    buffer = buffer_of(rank, low_latency_mode=True, num_rdma_bytes=LOW_BYTES)
    line = ""
    if rank.rank == 0:
        line = said(lambda: buffer.reset(timeout_ms=200))
        assert "failed before" in said(buffer.check)
    meet(rank)
    buffer.reset()
    return line


def too_small(rank: Rank) -> list[str]:
    """A dispatch that W rows are too many for, told by the next call; its handle then; and the Buffer works on."""
    buffer = buffer_of(rank, num_nvl_bytes=1 << 20)
    case = case_of(rank, 86)
    *_, handle, _ = dispatched(rank, buffer, case, 1 << 15)
    lines = [said(buffer.check)]
    y = torch.zeros((handle.num_rows, case.hidden), dtype=torch.bfloat16)
    lines.append(said(lambda: buffer.combine(y, handle)))
    buffer.combine(y[:, :1], handle)
    lines.append(said(buffer.check))
    dispatched(rank, buffer, case)
    return lines


def overflow(rank: Rank) -> str:
    """What is said of rows that were left out, at the end."""
    buffer = buffer_of(rank, num_nvl_bytes=1 << 20)
    *_, handle, _ = dispatched(rank, buffer, case_of(rank, 84), 3)
    assert int(handle.num_tokens_matrix[:, rank.rank].sum()) == 3
    rank.kept.clear()
    line = said(buffer.destroy)
    assert not said(buffer.destroy)
    return line
