"""What ranks do in the tests of what users of the peers asked for."""

from __future__ import annotations

import ctypes
import os
import threading

import torch
import torch.distributed as dist

from ep.work import EXPERTS, HIDDEN, caught, dispatch, round_trip, rows_of
from expertwire.ep import Buffer
from expertwire.ep.cpu.pool import Extent
from harness import Rank

NOBODY = 65534
PR_SET_DUMPABLE = 4


def two_groups(rank: Rank) -> list[int]:
    """A Buffer over all ranks and, on the first two, one over those alone: calls of both mixed, handles of both alive."""
    wide = Buffer(rank.group, 4 << 20, node_of=[0, 0, 1, 1], timeout_ms=20_000)
    buffers = [wide]
    if rank.rank < 2:
        buffers.append(Buffer(rank.groups[2], 4 << 20, node_of=[0, 1], timeout_ms=20_000))
    for step in range(3):
        results = [dispatch(buffer, buffer.rank + 7 * step + place) for place, buffer in enumerate(buffers)]
        for place, (buffer, result) in enumerate(zip(buffers, results, strict=True)):
            x = rows_of(buffer.rank + 7 * step + place)[0]
            times = result[4].is_token_in_rank.sum(1, keepdim=True)
            assert torch.equal(buffer.combine(result[0], result[4])[0], (x.float() * times).bfloat16())
    for narrow in buffers[1:]:
        assert "another Buffer" in caught(lambda narrow=narrow: narrow.combine(results[0][0], results[0][4]))[2]
    for buffer in reversed(buffers):
        buffer.destroy()
    return [buffer.group_size for buffer in buffers]


def two_users(rank: Rank) -> int:
    """Two jobs of two ranks at the same time, equal in all but the user of one of them; the user. These ranks are nobody for good."""
    job, place = divmod(rank.rank, 2)
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][job]
    Buffer(mine, 4 << 20, node_of=[0, 1]).destroy()  # loads what the other user may not read here
    if job == 1:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as the exec at another user's login leaves it
    for node_of in ([0, 0], [0, 1]):
        buffer = Buffer(mine, 4 << 20, node_of=node_of, timeout_ms=20_000)
        for step in range(5):
            round_trip(buffer, 10 * job + place, tokens=5 + job + step)
        buffer.destroy()
    return os.geteuid()


def nobody_holds_the_gil(rank: Rank) -> int:
    """Rank 1 comes to the dispatch only when another thread of rank 0 has run Python while rank 0 waits in it."""
    buffer = rank.buffer((0, 1))
    round_trip(buffer, rank.rank)
    told = torch.zeros(1, dtype=torch.int64)
    if rank.rank == 1:
        dist.recv(told, src=0, group=rank.group)
        dispatch(buffer, rank.rank)
        return int(told)

    def count() -> None:
        while buffer._within != "dispatch":
            os.sched_yield()
        for _ in range(20_000):
            told.add_(1)
        assert buffer._within == "dispatch", "still waiting for rank 1"
        dist.send(told, dst=1, group=rank.group)

    thread = threading.Thread(target=count)
    thread.start()
    dispatch(buffer, rank.rank)
    thread.join()
    return int(told)


def cpuset(rank: Rank) -> list[int]:
    """With the cores that the launcher gave, all of them or one: threads that come have those, and nobody's change. Threads that came."""
    given = os.sched_getaffinity(0)
    came = []
    for cores in (given, {min(given)}):
        os.sched_setaffinity(0, cores)
        try:
            before = cores_of_threads()
            buffer = Buffer(rank.group, 4 << 20, node_of=[0, 1], timeout_ms=20_000)
            round_trip(buffer, rank.rank)
            during = cores_of_threads()
            assert {task: its for task, its in during.items() if task in before} == {
                task: before[task] for task in before if task in during
            }
            new = {task: its for task, its in during.items() if task not in before}
            assert all(its == cores for its in new.values()), new
            buffer.destroy()
            assert os.sched_getaffinity(0) == cores
            came.append(len(new))
        finally:
            os.sched_setaffinity(0, given)
    return came


def cores_of_threads() -> dict[int, set[int]]:
    """Of each thread of this process."""
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


def far_rows(rank: Rank, data_bytes: int, from_bytes: int) -> list[int]:
    """Rows that land, and are combined, beyond an offset: everything before it is taken. Where dispatch and combine were offered room."""
    buffer = Buffer(rank.group, data_bytes, node_of=[0, 1], timeout_ms=60_000)
    pool = buffer.runtime._pool
    taken = Extent(0, from_bytes)
    pool._extents.take(taken)
    offered: list[int] = []
    offer = pool.offer

    def noted() -> Extent:
        offered.append((found := offer()).offset)
        return found

    pool.offer = noted
    x, ids, weights = rows_of(rank.rank, tokens=300, hidden=HIDDEN)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )
    home = buffer.combine(rows, handle)[0]
    assert torch.equal(home, (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    del rows
    pool._extents.give(taken)
    buffer.destroy()
    return offered


def too_much(rank: Rank) -> tuple[str, int, str]:
    return caught(lambda: Buffer(rank.group, 1 << 46, node_of=[0, 1]))
