"""What ranks do in tests/ep/test_shrink: die or stop in a dispatch or in a shrink, and go on among those that are left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep.failing import kill_oneself
from ep.low_latency_odd import PLAIN, open_buffer, send
from ep.low_latency_work import inputs, run_case
from ep.work import EXPERTS, Described, caught, described, dispatch, round_trip, rows_of
from expertwire.ep import Buffer
from expertwire.errors import ExpertwireError
from harness import Rank

SHRINK_MS = 30_000  # generous: a silence of 5 s is waited for within it, and the machine may be busy


def until_it_fails(call: Callable[[], object]) -> Described:
    """The error that ends a row of calls."""
    deadline = time.monotonic() + 40  # within what the test waits for an answer
    while time.monotonic() < deadline:
        try:
            call()
        except ExpertwireError as error:
            return described(error)
    raise AssertionError("calls have gone well for 40 s: nobody was missed")


def shrunk(buffer: Any, timeout_ms: int = SHRINK_MS) -> dict[str, Any]:
    """One shrink, and what the Buffer is after it."""
    begin = time.monotonic()
    members = buffer.shrink(timeout_ms)
    took_s = time.monotonic() - begin
    return {
        "members": members,
        "began_as": buffer.members,
        "rank": buffer.rank,
        "size": buffer.group_size,
        "node_of": buffer.node_of,
        "took_s": took_s,
    }


def works(buffer: Any) -> None:
    """Rows go round among the ranks that there are now, with experts that do not divide evenly, and again by a cached handle."""
    round_trip(buffer, buffer.rank, tokens=40)
    received, _, _, _, handle, _ = dispatch(buffer, buffer.rank, tokens=7)
    x = rows_of(buffer.rank, 7)[0]
    again = buffer.dispatch(x, handle)[0]
    assert torch.equal(again, received)
    assert handle.node_of == buffer.node_of
    layout = buffer.get_dispatch_layout(rows_of(buffer.rank)[1], EXPERTS)
    assert layout[0].shape == (buffer.group_size,)


def die_in_dispatch(rank: Rank, node_of: Sequence[int], victims: Sequence[int], provider: str | None, environment: dict[str, str]) -> Any:
    """The victims are killed in the middle of a call; the others shrink, twice: nobody has died the second time."""
    os.environ.update(environment)
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, provider=provider, timeout_ms=20_000)
    received, _, _, _, handle, _ = dispatch(buffer, rank.rank)
    copy = received.clone()
    if rank.rank in victims:
        in_call = threading.Event()
        kill_oneself(in_call)
        in_call.set()
    out: dict[str, Any] = {"error": until_it_fails(lambda: round_trip(buffer, rank.rank, tokens=64))}
    out["first"] = shrunk(buffer)
    out["old handle"] = caught(lambda: buffer.combine(received, handle))
    works(buffer)
    out["second"] = shrunk(buffer)
    works(buffer)
    assert torch.equal(received, copy), "a tensor of before has changed"
    buffer.destroy()
    return out


def stop_in_dispatch(rank: Rank, node_of: Sequence[int], asleep: int, provider: str | None) -> Any:
    """One rank stops in a call, and wakes when the others have gone on."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, provider=provider, timeout_ms=2500)
    received = dispatch(buffer, rank.rank, tokens=64)[0]
    copy = received.clone()
    if rank.rank == asleep:
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGSTOP), daemon=True).start()
        error = until_it_fails(lambda: round_trip(buffer, rank.rank, tokens=64))
        out = {"error": error, "shrink": caught(lambda: buffer.shrink(SHRINK_MS)), "later": caught(lambda: dispatch(buffer, rank.rank))}
        buffer.destroy()
        return out
    out = {"error": until_it_fails(lambda: round_trip(buffer, rank.rank, tokens=64)), "first": shrunk(buffer)}
    works(buffer)
    rank.kept["shrunk"] = (buffer, received, copy)
    return out


def after_it_woke(rank: Rank) -> None:
    """The stopped rank has woken, and whatever it still wrote is here: nothing of it was read."""
    buffer, received, copy = rank.kept.pop("shrunk")
    works(buffer)
    assert torch.equal(received, copy)
    buffer.destroy()


def alone(rank: Rank, node_of: Sequence[int]) -> Any:
    """Rank 0 calls shrink, the others do not; then all of them do."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=10_000)
    out: dict[str, Any] = {}
    if rank.rank == 0:
        begin = time.monotonic()
        out["alone"] = caught(lambda: buffer.shrink(1000))
        out["waited_s"] = time.monotonic() - begin
        out["later"] = caught(lambda: dispatch(buffer, rank.rank))
    rank.kept["alone"] = buffer
    return out


def together(rank: Rank) -> Any:
    """All of them after `alone`, who had called it before; the Buffer shrinks twice and is destroyed."""
    buffer = rank.kept.pop("alone")
    out = [shrunk(buffer), shrunk(buffer)]
    works(buffer)
    buffer.destroy()
    assert caught(lambda: buffer.shrink())[0] == "StateError"
    return out


def one_by_one(rank: Rank, node_of: Sequence[int], provider: str | None) -> Any:
    """The last rank dies, again and again, until one is left."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, provider=provider, timeout_ms=20_000)
    out = []
    while buffer.group_size > 1:
        round_trip(buffer, buffer.rank)
        if buffer.rank == buffer.group_size - 1:
            in_call = threading.Event()
            kill_oneself(in_call)
            in_call.set()
        until_it_fails(lambda: round_trip(buffer, buffer.rank, tokens=64))
        out.append(shrunk(buffer))
    works(buffer)
    buffer.destroy()
    return out


def strike_in_shrink(rank: Rank, node_of: Sequence[int], provider: str | None, victims: dict[int, tuple[str, int]]) -> Any:
    """victims: by rank the moment of its shrink at which it strikes itself, "begin", "make" or milliseconds, and the signal."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, provider=provider, timeout_ms=20_000)
    round_trip(buffer, rank.rank)
    moment, number = victims.get(rank.rank, ("", 0))
    again = buffer.runtime._again

    def strike(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        return again(*arguments, **options)

    if moment == "begin":
        os.kill(os.getpid(), number)
    elif moment == "make":
        buffer.runtime._again = strike
    elif moment:
        timer = threading.Timer(int(moment) / 1000, lambda: os.kill(os.getpid(), number))
        timer.daemon = True
        timer.start()
    try:
        out = shrunk(buffer)
    except ExpertwireError as error:
        buffer.destroy()
        return {"error": described(error)}
    # Who was struck when it had made everything is a member, and the next call names it.
    if out["size"] == rank.size:
        out["late"] = until_it_fails(lambda: round_trip(buffer, buffer.rank))
        out = {**out, **shrunk(buffer)}
    works(buffer)
    buffer.destroy()
    return out


def both_modes(rank: Rank, node_of: Sequence[int]) -> dict[str, Any]:
    """A Buffer of both modes and a mask, of which a low-latency call is under way."""
    buffer = open_buffer(rank, node_of, enable_shrink=True, num_nvl_bytes=1 << 20)
    round_trip(buffer, rank.rank)
    _, _, handle, _, hook = send(buffer, rank, PLAIN)
    dist.barrier(rank.group)  # who has not begun a call that it is left out of hears so as it begins
    buffer.low_latency_update_mask_buffer((rank.rank + 1) % rank.size, True)
    x, ids, weights = inputs(PLAIN, rank.rank)
    out: dict[str, Any] = shrunk(buffer)
    out["hook"] = caught(hook)
    rows = torch.zeros((PLAIN.experts // rank.size, rank.size * PLAIN.tokens_max, x.shape[1]), dtype=torch.bfloat16)
    out["handle"] = caught(lambda: buffer.low_latency_combine(rows, ids, weights, handle))
    mask = torch.full((rank.size,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    out["mask"] = mask.tolist()
    run_case(rank, buffer, PLAIN)
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return out
