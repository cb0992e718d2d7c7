"""What ranks do in tests of odd calls: from signal handlers, with odd tensors."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ep.work import EXPERTS, Described, caught, described, dispatch, dispatch_rows, round_trip, rows_of
from expertwire.ep import Buffer
from expertwire.errors import ExpertwireError
from harness import Rank

LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")


def called_within(rank: Rank, node_of: Sequence[int], action: str) -> dict[str, Any]:
    """Rank 0 waits alone in a dispatch when a signal handler there calls its Buffer: `action` of it, then raises SystemExit."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=20_000)
    round_trip(buffer, rank.rank)
    if rank.rank > 0:
        rank.kept["called within"] = buffer
        return {}
    out: dict[str, Any] = {}

    def handler(_signal: int, _frame: object) -> None:
        begin = time.monotonic()
        try:
            getattr(buffer, action)()
        except ExpertwireError as error:
            out["error"] = described(error)
        out["took_s"] = time.monotonic() - begin
        raise SystemExit

    def send() -> None:
        while buffer._within != "dispatch":
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=send)
    thread.start()
    begin = time.monotonic()
    try:
        dispatch(buffer, rank.rank)
    except SystemExit:
        out["left_s"] = time.monotonic() - begin
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    out["later"] = caught(lambda: dispatch(buffer, rank.rank))
    out["closed"] = not buffer.runtime._finalizer.alive
    buffer.destroy()
    return out


def end_of_called_within(rank: Rank) -> None:
    buffer = rank.kept.pop("called within", None)
    if buffer is not None:
        buffer.destroy()


def negated_weights(rank: Rank) -> list[float]:
    """Weights as a lazily negated view, whose memory has the other sign: one weight is contiguous as it is."""
    buffer = rank.buffer([0] * rank.size)
    weights = torch.complex(torch.zeros(1, 1), torch.full((1, 1), 2.0)).conj().imag
    assert weights.is_neg()
    assert weights.is_contiguous()
    ids = torch.full((1, 1), rank.rank * EXPERTS // rank.size)
    received = dispatch_rows(buffer, rows_of(rank.rank, tokens=1)[0], ids, weights)[2]
    return [float(weight) for weight in received.flatten()]


def other_hidden(rank: Rank, node_of: Sequence[int]) -> bool:
    """Rows that come home wider, and narrower, than they went out."""
    buffer = Buffer(rank.group, num_nvl_bytes=4 << 20, node_of=node_of)
    x, ids, weights = rows_of(rank.rank)
    received, _, _, _, handle, _ = dispatch_rows(buffer, x, ids, weights)
    in_rank = buffer.get_dispatch_layout(ids, EXPERTS)[3]
    right = True
    for wide in (torch.cat([received, received, received], dim=1), received[:, :5]):
        combined = buffer.combine(wide, handle)[0]
        want = (x.float() * in_rank.sum(1, keepdim=True)).bfloat16()
        right &= torch.equal(combined, torch.cat([want] * 3, dim=1) if wide.shape[1] > x.shape[1] else want[:, :5])
    buffer.destroy()
    return right


def default_device(rank: Rank, node_of: Sequence[int]) -> bool:
    """Both modes where torch makes tensors on another device than was asked for, as while a model is loaded: the same as ever."""
    x, ids, weights = rows_of(rank.rank, hidden=128)
    fp8 = x.to(torch.float8_e4m3fn), torch.ones((len(x), 1))
    size = Buffer.get_low_latency_rdma_size_hint(len(x), x.shape[1], rank.size, EXPERTS)
    mask = torch.ones(rank.size, dtype=torch.int32)

    def results() -> list[Any]:
        buffer = Buffer(rank.group, 4 << 20, size, low_latency_mode=True, enable_shrink=True, node_of=node_of)
        layout = dict(zip(LAYOUT, buffer.get_dispatch_layout(ids, EXPERTS), strict=False))
        received, local, got, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=ids, topk_weights=weights)
        found = [*layout.values(), received, local, got, *handle, *buffer.combine(received, handle, got)[:2]]
        rows, *_, counts, worst, _ = buffer.dispatch(fp8, **layout, topk_idx=ids, num_worst_tokens=64)
        found += [*(part[: worst.num_recv_tokens] for part in rows), counts, worst.real_counts, *worst]
        _, counts, again, _, _ = buffer.low_latency_dispatch(x, ids, len(x), EXPERTS, use_fp8=True, round_scale=True, use_ue8m0=True)
        sent, *_ = buffer.low_latency_dispatch(x, ids, len(x), EXPERTS, use_fp8=False)
        sums = buffer.low_latency_combine(sent, ids, weights, again)[0]
        buffer.low_latency_query_mask_buffer(mask)
        buffer.destroy()
        return [*found, counts, again[1], sums, mask.clone()]

    there = results()
    torch.set_default_device("meta")
    try:
        elsewhere = results()
    finally:
        torch.set_default_device(None)
    return all((one is other is None) or torch.equal(one, other) for one, other in zip(there, elsewhere, strict=True))


def rows_in_the_region(rank: Rank, node_of: Sequence[int]) -> list[str]:
    """What is sent lies in the data region, anywhere, also where this call's own rows land. What came out wrong."""
    tokens, hidden, step = 24, 1024, 48 << 10
    buffer = Buffer(rank.group, 1 << 20, node_of=node_of)
    x, ids, weights = rows_of(rank.rank, tokens, hidden)
    layout = dict(zip(LAYOUT, buffer.get_dispatch_layout(ids, EXPERTS), strict=False))

    def there(values: torch.Tensor, offset: int) -> torch.Tensor:
        found: torch.Tensor = buffer.get_local_buffer_tensor(values.dtype, values.shape, offset)
        return found.copy_(values)

    first = buffer.dispatch(x, **layout, topk_idx=ids, topk_weights=weights)
    handle, rows, sent = first[4], first[0].clone(), first[2].clone()
    del first
    sums, sums_of_weights, _ = buffer.combine(rows, handle, sent, bias=x)
    wrong = []
    for offset in range(0, (1 << 20) - 4 * step, step):
        given = there(x, offset), there(weights, offset + x.nbytes)
        again = buffer.dispatch(given[0], **layout, topk_idx=ids, topk_weights=given[1])
        if not torch.equal(again[0], rows) or not torch.equal(again[2], sent):
            wrong.append(f"dispatch from {offset}")
        del again
        given = there(rows, offset), there(sent, offset + rows.nbytes)
        combined, combined_weights, _ = buffer.combine(given[0], handle, given[1], bias=x)
        if not torch.equal(combined, sums) or not torch.equal(combined_weights, sums_of_weights):
            wrong.append(f"combine from {offset}")
    buffer.destroy()
    return wrong


def few_files(rank: Rank) -> tuple[list[Described], tuple[int, ...]]:
    """Rank 0 may open a few more files at each try, at last many: what each failed one said, and the nodes of the first that did not."""
    Buffer(rank.group, 1 << 20).destroy()  # what is imported, and found out, once
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: list[Described] = []
    nodes: tuple[int, ...] = ()
    opened = len(os.listdir("/proc/self/fd")) - 1
    for more in (0, 3, 6, 200):
        if rank.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened + more, most[1]))
        try:
            buffer = Buffer(rank.group, 1 << 20, timeout_ms=10_000)
        except ExpertwireError as error:
            found.append(described(error))
        else:
            round_trip(buffer, rank.rank)
            nodes = buffer.node_of
            buffer.destroy()
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
    return found, nodes


def a_call_that_does_not_end(rank: Rank) -> tuple[Described, float]:
    """Another thread has the Buffer and does not give it back: what `destroy` says, and when. Then it works."""
    buffer = Buffer(rank.group, 1 << 20, timeout_ms=200)
    taken, done = threading.Event(), threading.Event()

    def stay() -> None:
        with buffer._holding("a call"):
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    taken.wait(30)
    begin = time.monotonic()
    said = caught(buffer.destroy)
    took_s = time.monotonic() - begin
    done.set()
    thread.join()
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return said, took_s
