"""What ranks do in tests of odd calls: from signal handlers, with odd tensors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ep.work import EXPERTS, caught, described, dispatch, dispatch_rows, round_trip, rows_of
from expertwire.ep import Buffer
from expertwire.errors import ExpertwireError
from harness import Rank


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
