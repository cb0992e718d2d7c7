"""What ranks do in tests of overlap (SPEC E16): microbatches and Buffers beside each other in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep.work import EXPERTS, dispatch, dispatch_rows, round_trip, rows_of
from expertwire.ep import Buffer
from harness import Rank


def _beside(*works: Callable[[], object]) -> None:
    """Each in a thread of its own; the first error of any."""
    failures: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def two_buffers(rank: Rank, node_of: Sequence[int]) -> int:
    """Each thread has a Buffer of its own: their calls meet in any order."""
    buffers = [Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=30_000) for _ in range(2)]
    done: list[int] = []

    def work(number: int) -> None:
        for turn in range(8):
            round_trip(buffers[number], rank.rank + number, tokens=3 + 7 * number + turn)
            done.append(number)

    _beside(lambda: work(0), lambda: work(1))
    for buffer in buffers:
        buffer.destroy()
    return len(done)


def waits_beside(rank: Rank, node_of: Sequence[int]) -> bool:
    """Rank 0 waits in a call that the others come to only after calls on another Buffer, which rank 0's other thread has to make
    meanwhile: a wait that held the GIL, or a lock that both Buffers share, would never end."""
    waiting = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=30_000)
    other = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=30_000)
    results: list[Any] = []

    def beside() -> None:
        while rank.rank == 0 and waiting._within != "dispatch":
            os.sched_yield()
        for _ in range(4):
            round_trip(other, rank.rank)
        if rank.rank != 0:
            results.append(dispatch(waiting, rank.rank))

    if rank.rank == 0:
        _beside(lambda: results.append(dispatch(waiting, 0)), beside)
    else:
        beside()
    received, *_, handle, _ = results[0]
    combined = waiting.combine(received, handle)[0]
    x = rows_of(rank.rank)[0]
    right = torch.equal(combined, (x.float() * handle.is_token_in_rank.sum(1, keepdim=True)).bfloat16())
    for buffer in (waiting, other):
        buffer.destroy()
    return right


def mixed_batches(rank: Rank, node_of: Sequence[int]) -> bool:
    """Dispatches of three kinds, all handles live, combined in another order: eager, worst-token, and in rounds."""
    buffer = Buffer(rank.group, 64 << 10, node_of=node_of, timeout_ms=30_000)
    made = []
    for number, (tokens, worst) in enumerate([(5, 0), (7, 40), (90, 0)]):
        x, ids, weights = rows_of(rank.rank + number, tokens=tokens, hidden=512)
        if worst:
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            result = buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, ids, weights, num_worst_tokens=worst)
        else:
            result = dispatch_rows(buffer, x, ids, weights)
        made.append((x, result[0], result[4]))
    right = True
    for x, received, handle in reversed(made):
        combined = buffer.combine(received, handle)[0]
        right &= torch.equal(combined, (x.float() * handle.is_token_in_rank.sum(1, keepdim=True)).bfloat16())
    buffer.destroy()
    return right
