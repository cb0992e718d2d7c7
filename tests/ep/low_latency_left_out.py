"""What ranks do in tests of who is left out of low-latency calls, wakes up, and comes back; and of what a deadline says of each peer."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep.low_latency_odd import PLAIN, check, inputs, open_buffer, send
from ep.low_latency_work import Case, run_case
from ep.work import Described, caught, described
from expertwire.ep import Buffer
from expertwire.errors import ExcludedError, StateError
from harness import Rank

WIDE = Case(experts=16, tokens_max=32, hidden=4096)  # its send takes long enough to be stopped in
WAIT = 1  # a stage of a call: sent, and its hook is uncalled or waits


def word(call: int, rows: int) -> int:
    """That all rows of a call are handed over, as exchange::LowLatencyWord packs it."""
    return call << 32 | rows


def pids(rank: Rank) -> list[int]:
    found: list[int] = [0] * rank.size
    dist.all_gather_object(found, os.getpid(), rank.group)
    return found


def idle_until(buffer: Any, there: Any, seconds: float) -> bool:
    context, until = buffer.runtime._context, time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            return False
        context.doorbell_wait(context.doorbell_seen(), 20)
    return True


def three_that_do_not_come(rank: Rank, node_of: Sequence[int], provider: str) -> tuple[Described | None, list[str]]:
    """Rank 0 waits for three: 1 is not in the call, 2 has sent what does not arrive, 3 was stopped. Its error and what it logged."""
    buffer = open_buffer(rank, node_of, timeout_ms=3500, provider=provider)
    run_case(rank, buffer, PLAIN)
    others = pids(rank)
    error = None
    reports = logging.handlers.BufferingHandler(100)
    logging.getLogger("expertwire.ep").addHandler(reports)
    if rank.rank == 0:
        error = caught(lambda: send(buffer, rank, PLAIN)[4]())
        os.kill(others[3], signal.SIGCONT)
    elif rank.rank == 2:  # as the core says behind a send; no transport here loses rows
        buffer.runtime._context.publish_low_latency(3 << 8 | WAIT, [word(3, 17)] * rank.size)
    elif rank.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank.rank > 0:
        idle_until(buffer, lambda: buffer.runtime._context.pulse(0)[4], 20)
    logging.getLogger("expertwire.ep").removeHandler(reports)
    buffer.destroy()
    return error, [record.getMessage() for record in reports.buffer]


def what_is_said(rank: Rank, node_of: Sequence[int], provider: str) -> int:
    """How many rows a rank says that it has sent is how many it has."""
    buffer = open_buffer(rank, node_of, provider=provider)
    run_case(rank, buffer, PLAIN)
    send(buffer, rank, PLAIN)[4]()
    source = (rank.rank + 1) % rank.size
    _, ids, _ = inputs(PLAIN, source)
    each = PLAIN.experts // rank.size
    rows = int((ids // each == rank.rank).sum())
    assert idle_until(buffer, lambda: buffer.runtime._context.low_latency_told(source) == word(3, rows), 5)
    dist.barrier(rank.group)
    buffer.destroy()
    return rows


def masked_with_rows_on_their_way(rank: Rank, timeout_ms: int) -> Described | None:
    """Rank 2, alone on its node, stops before its hook; rows of rank 0 to it are more than a socket takes. The others leave it out in the
    call after the next, whose blocks at rank 0 lie over those rows. Rank 2 wakes and has what was sent, or says that it is out."""
    hidden, few, many = 4096, 512, 1024
    size = Buffer.get_low_latency_rdma_size_hint(many, hidden, 3, 3)
    buffer = open_buffer(rank, (0, 0, 1), enable_shrink=True, timeout_ms=timeout_ms, provider="tcp", num_rdma_bytes=size)
    others = pids(rank)

    def sent(source: int, tokens: int, expert: int, most: int) -> tuple[Any, ...]:
        count = tokens if rank.rank == source else 0
        x, ids = torch.full((count, hidden), source + tokens / 1024, dtype=torch.bfloat16), torch.full((count, 1), expert)
        result: tuple[Any, ...] = buffer.low_latency_dispatch(x, ids, most, 3, use_fp8=False, return_recv_hook=True)
        return result

    def got(result: tuple[Any, ...], source: int, tokens: int) -> None:
        assert result[1].tolist() == [tokens]
        assert bool((result[0][0, :tokens] == source + tokens / 1024).all())

    error = None
    if rank.rank == 2:
        result = sent(0, few, 2, few)
        assert idle_until(buffer, lambda: buffer.runtime._context.statistics()["requests_live"] == 0, 5)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            result[4]()
            got(result, 0, few)
        except ExcludedError as excluded:
            error = described(excluded)
    else:
        while "T" not in Path(f"/proc/{others[2]}/stat").read_text().rpartition(")")[2].split()[0]:
            os.sched_yield()
        sent(0, few, 2, few)[4]()
        empty, full = sent(1, 0, 0, many), sent(1, many, 0, many)
        empty[4]()
        full[4]()
        if rank.rank == 0:
            got(full, 1, many)
            os.kill(others[2], signal.SIGCONT)
    dist.barrier(rank.group)
    buffer.destroy()
    return error


def stopped_and_woken(
    rank: Rank, node_of: Sequence[int], provider: str, victim: int, moment: str, flag: str, timeout_ms: int
) -> dict[str, Any]:
    """One rank is stopped in the middle of a dispatch, the others leave it out and go on; it wakes up, hears of it, and comes back."""
    patience_s = 7 * timeout_ms / 1000
    os.environ["EXPERTWIRE_HARD_TIMEOUT_MS"] = "200000"
    try:
        buffer = open_buffer(rank, node_of, (PLAIN, WIDE), enable_shrink=True, timeout_ms=timeout_ms, provider=provider)
    finally:
        del os.environ["EXPERTWIRE_HARD_TIMEOUT_MS"]
    run_case(rank, buffer, WIDE)
    others = pids(rank)
    if rank.rank == victim:
        out = be_stopped(rank, buffer, moment)
        Path(flag).touch()
    else:
        out = go_on_without(rank, buffer, victim, others[victim])
        assert idle_until(buffer, Path(flag).exists, patience_s), "the victim has not heard that it is out"
        buffer.low_latency_update_mask_buffer(victim, False)
        out["moved at once"] = caught(lambda: send(buffer, rank, PLAIN))
    until = time.monotonic() + patience_s
    while True:
        try:
            run_case(rank, buffer, replace(WIDE, seed=90))
            break
        except ExcludedError:  # not everybody has taken it in
            if rank.rank != victim or time.monotonic() > until:
                raise
    for seed in (91, 92):
        run_case(rank, buffer, replace(WIDE, seed=seed))
    run_case(rank, buffer, PLAIN)
    buffer.destroy()
    return out


def be_stopped(rank: Rank, buffer: Any, moment: str) -> dict[str, Any]:
    if moment == "in a send":
        threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    out: dict[str, Any] = {}
    try:
        result = send(buffer, rank, WIDE)
        if moment == "before its hook":
            os.kill(os.getpid(), signal.SIGSTOP)
        result[4]()
        check(rank, WIDE, result)  # everybody had sent to it, and that is what it has
    except ExcludedError as error:
        out["first"] = described(error)
    out["second"] = caught(lambda: send(buffer, rank, WIDE)[4]())
    return out


def go_on_without(rank: Rank, buffer: Any, victim: int, pid: int) -> dict[str, Any]:
    masked = [[victim] if at != victim else [other for other in range(rank.size) if other != victim] for at in range(rank.size)]
    status = torch.zeros(rank.size, dtype=torch.int32)
    for _ in range(2):
        send(buffer, rank, WIDE)[4]()  # in the first the victim's rows may have come, in the second they have not
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(at == victim) for at in range(rank.size)]
    out = {"moved": caught(lambda: send(buffer, rank, PLAIN))}
    for seed in (1, 2):
        run_case(rank, buffer, replace(WIDE, seed=seed), masked)
    os.kill(pid, signal.SIGCONT)
    for seed in range(3, 12):  # it wakes up among these, and its rows come
        run_case(rank, buffer, replace(WIDE, seed=seed), masked)
    return out


def ended_and_moved(rank: Rank, node_of: Sequence[int], provider: str, victim: int) -> dict[str, Any]:
    """One rank is killed; the other one goes on without it, and wants another shape at each call: what it is told, and for how long."""
    buffer = open_buffer(rank, node_of, (PLAIN, WIDE), enable_shrink=True, timeout_ms=20_000, provider=provider)
    run_case(rank, buffer, WIDE)
    dist.barrier(rank.group)
    if rank.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    status = torch.zeros(rank.size, dtype=torch.int32)
    while not status[victim]:
        send(buffer, rank, WIDE)[4]()
        buffer.low_latency_query_mask_buffer(status)
    begin = time.monotonic()
    told: list[Described] = []
    while time.monotonic() < begin + 30:
        try:
            send(buffer, rank, PLAIN)[4]()
            break
        except StateError as error:
            told.append(described(error))
            send(buffer, rank, WIDE)[4]()
    kept_s = time.monotonic() - begin
    buffer.destroy()
    return {"told": told, "kept_s": kept_s}
