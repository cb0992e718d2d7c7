"""What ranks do in tests of the low-latency mode's order of calls, its disagreements, masks and deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ep.low_latency_work import Case, check_received, hint, inputs, reference_low_latency_dispatch, run_case
from ep.work import Described, caught, described, round_trip
from expertwire.ep import Buffer
from expertwire.errors import ExpertwireError
from harness import Rank

PLAIN = Case(experts=16, tokens_max=6)


def open_buffer(rank: Rank, node_of: Sequence[int], cases: Sequence[Case] = (PLAIN,), **options: Any) -> Any:
    """A Buffer of its own for a test that ends it, without as good as any memory for the other mode."""
    given: dict[str, Any] = {"num_rdma_bytes": hint(rank, cases), "timeout_ms": 30_000, **options}
    return Buffer(rank.group, low_latency_mode=True, node_of=list(node_of), **given)


def send(buffer: Any, rank: Rank, case: Case) -> tuple[Any, ...]:
    x, ids, _ = inputs(case, rank.rank)
    result: tuple[Any, ...] = buffer.low_latency_dispatch(x, ids, case.tokens_max, case.experts, use_fp8=False, return_recv_hook=True)
    return result


def four_in_flight(rank: Rank, node_of: Sequence[int]) -> tuple[int, int]:
    """Both modes turn about where a rank may have four writes under way. Its window, and the times that a submission found no room."""
    os.environ["EXPERTWIRE_MAX_OUTSTANDING"] = "4"
    try:
        buffer = open_buffer(rank, node_of, num_nvl_bytes=1 << 20, provider="tcp")
    finally:
        del os.environ["EXPERTWIRE_MAX_OUTSTANDING"]
    for seed in range(6):
        run_case(rank, buffer, replace(PLAIN, seed=seed, zero_copy=seed % 2 == 1))
        round_trip(buffer, rank.rank)
    found = buffer.statistics()
    buffer.destroy()
    return found["window"], found["slots_short"]


def check(rank: Rank, case: Case, result: tuple[Any, ...]) -> None:
    received, counts, handle, _, _ = result
    want = reference_low_latency_dispatch([inputs(case, source)[1] for source in range(rank.size)], case.experts)[rank.rank]
    check_received(case, rank, want, (received, counts, handle, counts))


def order_of_calls(rank: Rank, node_of: Sequence[int]) -> dict[str, Described]:
    """Two results live in every order of hooks; a third is refused by name; what belongs to no call is refused."""
    buffer = rank.buffer(node_of, low_latency_mode=True, num_nvl_bytes=1 << 20, num_rdma_bytes=hint(rank, (PLAIN,)))
    run_case(rank, buffer, PLAIN)
    cases = [Case(experts=16, tokens_max=6, seed=seed) for seed in (21, 22, 23)]
    first, second = send(buffer, rank, cases[0]), send(buffer, rank, cases[1])
    out = {
        "third": caught(lambda: send(buffer, rank, cases[2])),
        "combine early": caught(lambda: combine(buffer, rank, first, cases[0])),
        "buffer early": caught(lambda: buffer.get_next_low_latency_combine_buffer(first[2])),
    }
    if rank.rank % 2:
        second[4]()  # the second one first, on some ranks
    first[4]()
    first[4]()  # again does nothing
    third = send(buffer, rank, cases[2])
    if rank.rank % 2 == 0:
        second[4]()
    third[4]()
    for case, result in zip(cases, (first, second, third), strict=True):
        check(rank, case, result)
    target = buffer.get_next_low_latency_combine_buffer(third[2])
    assert target.shape == third[0].shape
    assert target.data_ptr() == buffer.get_next_low_latency_combine_buffer(third[2]).data_ptr()
    between = send(buffer, rank, cases[0])
    between[4]()
    out["buffer of another call"] = caught(lambda: combine(buffer, rank, third, cases[2], zero_copy=True))
    plain = rank.buffer(node_of)
    x, ids, _ = inputs(PLAIN, rank.rank)
    arguments = (x, ids, 6, 16)
    out["no mode"] = caught(lambda: plain.low_latency_dispatch(*arguments))
    out["no mask"] = caught(lambda: buffer.low_latency_update_mask_buffer(0, True))
    out["hook and event"] = caught(lambda: buffer.low_latency_dispatch(*arguments, async_finish=True, return_recv_hook=True))
    out["ue8m0 alone"] = caught(lambda: buffer.low_latency_dispatch(*arguments, use_ue8m0=True))
    out["too many tokens"] = caught(lambda: buffer.low_latency_dispatch(x, ids, 5, 16))
    out["id beyond"] = caught(lambda: buffer.low_latency_dispatch(x, ids, 6, int(ids.max())))
    out["stats strided"] = caught(lambda: buffer.low_latency_dispatch(*arguments, torch.zeros(16, dtype=torch.int32)[::4]))
    out["handle type"] = caught(lambda: buffer.low_latency_combine(third[0], ids, ids.float(), tuple(third[2])))
    out["other ids"] = caught(lambda: combine(buffer, rank, third, cases[2], change=1))
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() >= buffer.num_rdma_bytes
    buffer.clean_low_latency_buffer(6, 64, 16)
    buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
    dist.barrier(rank.group)  # before anybody's next rows come
    run_case(rank, buffer, PLAIN)
    return out


def combine(buffer: Any, rank: Rank, result: tuple[Any, ...], case: Case, change: int = 0, **options: Any) -> Any:
    _, ids, weights = inputs(case, rank.rank)
    return buffer.low_latency_combine(result[0], (ids + change) % case.experts, weights, result[2], **options)


def disagreements(rank: Rank, node_of: Sequence[int]) -> dict[str, Described]:
    """Each is said on every rank, with both values, and the Buffer goes on."""
    buffer = rank.buffer(node_of, low_latency_mode=True, num_nvl_bytes=1 << 20, num_rdma_bytes=hint(rank, (PLAIN,)))
    x, ids, _ = inputs(PLAIN, rank.rank)
    last = rank.rank == rank.size - 1

    def dispatch(rows: torch.Tensor = x, tokens_max: int = 6, experts: int = 16, fp8: bool = False, picked: torch.Tensor = ids) -> Any:
        result = buffer.low_latency_dispatch(rows, picked, tokens_max, experts, use_fp8=fp8, return_recv_hook=True)
        result[4]()
        return result

    calls: dict[str, Callable[[], object]] = {
        "M": lambda: dispatch(tokens_max=7 if last else 6),
        "M beyond the memory": lambda: dispatch(tokens_max=1000 if last else 6),
        "M beyond any memory": lambda: dispatch(tokens_max=200_000_000 if last else 6),
        "H": lambda: dispatch(x[:, :32] if last else x),
        "E": lambda: dispatch(experts=17 if last else 16),
        "K": lambda: dispatch(picked=ids[:, :2] if last else ids),
        "format": lambda: dispatch(fp8=last),
        "nothing fits": lambda: dispatch(tokens_max=4000),
        "nothing fits anywhere": lambda: dispatch(tokens_max=200_000_000),
        "E beyond": lambda: dispatch(experts=2_000_000_000),
    }
    out = {name: caught(call) for name, call in calls.items()}
    good = dispatch()
    out["operation"] = caught(lambda: dispatch() if last else combine(buffer, rank, good, PLAIN))
    run_case(rank, buffer, PLAIN)
    return out


def masks(rank: Rank, node_of: Sequence[int]) -> None:
    """Two ranks leave each other out for some calls, and take each other in again."""
    buffer = open_buffer(rank, node_of, enable_shrink=True)
    status = torch.full((rank.size,), -1, dtype=torch.int32)
    run_case(rank, buffer, PLAIN)
    pair = (0, rank.size - 1)
    masked = [[pair[1]] if at == pair[0] else [pair[0]] if at == pair[1] else [] for at in range(rank.size)]
    for other in masked[rank.rank]:
        buffer.low_latency_update_mask_buffer(other, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(at in masked[rank.rank]) for at in range(rank.size)]
    for seed in (1, 2, 3):
        run_case(rank, buffer, Case(experts=16, tokens_max=6, seed=seed), masked)
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    for seed in (4, 5, 6):
        run_case(rank, buffer, Case(experts=16, tokens_max=6, seed=seed))
    buffer.destroy()


def microbatches(rank: Rank, node_of: Sequence[int], rounds: int) -> int:
    """Two threads of a Buffer take turns at sending, so that each one's hooks come while the other computes; the other mode goes on in a
    third, over a Buffer of its own."""
    cases = [Case(experts=16, tokens_max=6, seed=seed) for seed in (31, 32)]
    buffer = rank.buffer(node_of, low_latency_mode=True, num_nvl_bytes=1 << 20, num_rdma_bytes=hint(rank, cases))
    other = rank.buffer(node_of)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    done: list[int] = []
    wrong: list[BaseException] = []

    def back(case: Case, sent: Any) -> Any:
        _, ids, weights = inputs(case, rank.rank)
        return buffer.low_latency_combine(sent[0], ids, weights, sent[2], return_recv_hook=True)

    def batch(me: int) -> None:
        case = cases[me]
        try:
            for _ in range(rounds):
                with_turn(me, lambda: results.__setitem__(me, send(buffer, rank, case)))
                results[me][4]()
                check(rank, case, results[me])
                with_turn(me, lambda: results.__setitem__(me, back(case, results[me])))
                results[me][2]()
                done.append(me)
        except BaseException as error:
            wrong.append(error)
            turns[1 - me].release()

    def with_turn(me: int, work: Callable[[], None]) -> None:
        turns[me].acquire()
        if not wrong:
            work()
        turns[1 - me].release()

    def high_throughput() -> None:
        try:
            for _ in range(rounds):
                round_trip(other, rank.rank)
        except BaseException as error:
            wrong.append(error)

    results: dict[int, Any] = {}
    threads = [threading.Thread(target=batch, args=(me,)) for me in range(2)] + [threading.Thread(target=high_throughput)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if wrong:
        raise wrong[0]
    return len(done)


def die(rank: Rank, node_of: Sequence[int], victim: int, shrink: bool) -> dict[str, Any]:
    """One rank is killed between two calls of the others, which either say so, or go on without it."""
    buffer = open_buffer(rank, node_of, enable_shrink=shrink, provider="tcp")
    run_case(rank, buffer, PLAIN)
    if rank.rank == victim:
        send(buffer, rank, PLAIN)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    status = torch.zeros(rank.size, dtype=torch.int32)
    if not shrink:
        try:
            while time.monotonic() - begin < 20:
                send(buffer, rank, PLAIN)[4]()
        except ExpertwireError as error:
            later = caught(lambda: send(buffer, rank, PLAIN))
            buffer.destroy()
            return {"error": described(error), "later": later, "seen_s": time.monotonic() - begin}
        raise AssertionError("nobody missed the victim")
    for _ in range(8):  # the same number on every rank: who leaves first would be missed too
        send(buffer, rank, PLAIN)[4]()
    seen_s = time.monotonic() - begin
    buffer.low_latency_query_mask_buffer(status)
    without = [[victim] if at != victim else [0, 1, 2, 3] for at in range(rank.size)]
    run_case(rank, buffer, PLAIN, without)
    buffer.destroy()
    return {"seen_s": seen_s, "masked": status.tolist()}


def time_out(rank: Rank, node_of: Sequence[int], shrink: bool) -> dict[str, Any]:
    """The last rank does not come to the second call: a deadline by name, or it is left out."""
    buffer = open_buffer(rank, node_of, enable_shrink=shrink, timeout_ms=1500)
    run_case(rank, buffer, PLAIN)
    last = rank.size - 1
    if rank.rank == last:
        dist.barrier(group=rank.group)  # until the others have gone on without it
        buffer.destroy()
        return {}
    if not shrink:
        error = caught(lambda: send(buffer, rank, PLAIN)[4]())
        dist.barrier(group=rank.group)
        buffer.destroy()
        return {"error": error}
    masked = [[last] if at != last else list(range(last)) for at in range(rank.size)]
    status = torch.zeros(rank.size, dtype=torch.int32)
    received, counts, handle, _, hook = send(buffer, rank, PLAIN)
    hook()
    want = reference_low_latency_dispatch([inputs(PLAIN, source)[1] for source in range(rank.size)], PLAIN.experts, masked)[rank.rank]
    check_received(PLAIN, rank, want, (received, counts, handle, counts))
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(at == last) for at in range(rank.size)]
    run_case(rank, buffer, PLAIN, masked)
    dist.barrier(group=rank.group)
    buffer.destroy()
    return {"masked": status.tolist()}
