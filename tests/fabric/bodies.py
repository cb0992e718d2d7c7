"""What the ranks of test_endpoint, test_runtime, test_waits, test_fork and test_liveness run."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from expertwire.errors import DeadlineError, ExpertwireError, InvalidArgumentError, StateError
from expertwire.fabric import Chunk, Endpoint, Region, Scope, Signal
from fabric.ranks import DATA_BYTES


def data(endpoint: Endpoint) -> Region:
    native = endpoint.native
    return Region(endpoint, native.region("data"), "data", shared=True)


def pattern(seed: int, length: int) -> numpy.ndarray[Any, Any]:
    return numpy.random.default_rng(seed).integers(0, 256, length, dtype=numpy.uint8)


def place(endpoint: Endpoint, seed: int, length: int, offset: int = 0) -> None:
    data(endpoint).numpy("uint8", (length,), offset)[:] = pattern(seed, length)


def holds(endpoint: Endpoint, seed: int, length: int, offset: int = 0) -> bool:
    return bool((data(endpoint).numpy("uint8", (length,), offset) == pattern(seed, length)).all())


def counter(endpoint: Endpoint, index: int) -> int:
    return int(endpoint.counters().numpy("uint64")[index])


def in_threads(work: Callable[[int], None], threads: int) -> None:
    """`work(index)` in so many threads at once, until all have ended."""
    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def write_signalled(endpoint: Endpoint, peer: int, length: int, count: int, sync: bool = False) -> None:
    """`count` writes of `length` bytes to consecutive places, each with one count on counter 0; all in flight at once."""
    region = data(endpoint)
    requests = [
        endpoint.write(peer, region, "data", length, offset=i * length, remote_offset=i * length, signal=Signal(1)) for i in range(count)
    ]
    for request in requests:
        request.wait()
    assert all(request.done for request in requests)


def check_each_arrival(endpoint: Endpoint, seed: int, length: int, rounds: int) -> int:
    """The target of `write_rounds`: at every signal the whole payload is there, never the round before."""
    torn = 0
    words = data(endpoint).numpy("uint64", (length // 8,))
    for number in range(1, rounds + 1):
        assert endpoint.wait_counter(0, number, 10_000), f"signal {number} did not come"
        torn += int((words != seed * 1_000_000 + number).any())
        endpoint.signal(0, 1, 8).wait()
    return torn


def write_rounds(endpoint: Endpoint, seed: int, length: int, rounds: int) -> None:
    region = data(endpoint)
    words = region.numpy("uint64", (length // 8,))
    for number in range(1, rounds + 1):
        words[:] = seed * 1_000_000 + number
        endpoint.write(1, region, "data", length, signal=Signal(1)).wait()
        assert endpoint.wait_counter(1, number, 10_000), f"answer {number} did not come"


def read_back(endpoint: Endpoint, peer: int, length: int, seed: int) -> bool:
    region = data(endpoint)
    endpoint.read(peer, region, "data", length, offset=DATA_BYTES // 2, notification=b"read it").wait()
    return holds(endpoint, seed, length, DATA_BYTES // 2)


def write_batch(endpoint: Endpoint, peer: int, count: int, nbytes: int) -> int:
    """Writes of `nbytes` in one call, the last place first; how many operations the provider was given."""
    before = endpoint.statistics().provider_posted
    offsets = numpy.arange(count - 1, -1, -1, dtype=numpy.uint64) * numpy.uint64(nbytes)
    endpoint.write_many(peer, data(endpoint), "data", nbytes, offsets, offsets).wait()
    return endpoint.statistics().provider_posted - before


def refused_batches(endpoint: Endpoint, peer: int) -> list[str]:
    """What is said of batches that cannot be meant; nothing of them is sent."""
    one, beyond, none = (numpy.array(values, dtype=numpy.uint64) for values in ([0], [0, DATA_BYTES - 8], []))
    said = []
    for local, remote in ((one, beyond), (beyond, numpy.zeros(2, numpy.uint64)), (numpy.zeros(2, numpy.uint64), beyond)):
        try:
            endpoint.write_many(peer, data(endpoint), "data", 16, local, remote)
        except InvalidArgumentError as error:
            said.append(str(error))
    assert endpoint.write_many(peer, data(endpoint), "data", 16, none, none).done
    return said


def write_many_chunks(endpoint: Endpoint, peer: int, chunks: int, length: int) -> None:
    region = data(endpoint)
    parts = [Chunk(region, "data", length, i * length, i * length) for i in range(chunks)]
    endpoint.submit("write", peer, parts, [Signal(7, 16)], b"all of it").wait()


def wait_counter(endpoint: Endpoint, index: int, at_least: int) -> bool:
    return endpoint.wait_counter(index, at_least)


def take_notifications(endpoint: Endpoint, count: int) -> list[tuple[int, bytes]]:
    taken: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + 10
    while len(taken) < count and time.monotonic() < deadline:
        seen = endpoint.native.doorbell_seen()
        taken += endpoint.notifications()
        if len(taken) < count:
            endpoint.native.doorbell_wait(seen, 20)
    return taken


def awaited(endpoint: Endpoint, peer: int, count: int) -> int:
    async def one(index: int) -> int:
        await endpoint.write(peer, data(endpoint), "data", 4096, remote_offset=4096 * index, signal=Signal(1, 24))
        return index

    async def every() -> list[int]:
        return await asyncio.gather(*(one(index) for index in range(count)))

    return sum(asyncio.run(every()))


def barrier_in_order(endpoint: Endpoint, rounds: int) -> list[int]:
    """Each rank counts at every other before its barrier; after the barrier every count is here."""
    seen = []
    for _ in range(rounds):
        for peer in range(endpoint.size):
            if peer != endpoint.rank:
                endpoint.signal(peer, 1, 32, scope=Scope.PEER)
        endpoint.barrier()
        seen.append(counter(endpoint, 4))
        endpoint.barrier()
    return seen


def quiet_covers(endpoint: Endpoint, peer: int, count: int) -> int:
    region = data(endpoint)
    requests = [endpoint.write(peer, region, "data", 65536, signal=Signal(1, 40)) for _ in range(count)]
    endpoint.quiet()
    return sum(request.done for request in requests)


def stuck_write(endpoint: Endpoint, peer: int, length: int, timeout_ms: int) -> tuple[bool, bool, str]:
    """A write to a stopped peer: (deadline raised, still owned, the refusal to let its region go)."""
    region = data(endpoint)
    requests = [endpoint.write(peer, region, "data", length, signal=Signal(1, 48)) for _ in range(64)]
    try:
        requests[-1].wait(timeout_ms)
    except DeadlineError:
        late = True
    else:
        late = False
    try:
        region.close(50)
    except StateError as error:
        refusal = str(error)
    else:
        refusal = ""
    endpoint.stuck = requests  # type: ignore[attr-defined]
    return late, requests[-1].stalled and not requests[-1].done, refusal


def finish_stuck(endpoint: Endpoint) -> int:
    requests = endpoint.stuck  # type: ignore[attr-defined]
    for request in requests:
        request.wait()
    return sum(request.done for request in requests)


def interrupted_wait(endpoint: Endpoint, how: str, index: int) -> float:
    """Seconds from SIGINT to KeyboardInterrupt during a wait."""
    sent = [0.0]

    def interrupt() -> None:
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        if how == "counter":
            endpoint.wait_counter(index, 1 << 40, 10_000)
        elif how == "barrier":
            endpoint.barrier(10_000)
        else:  # others ring it too, now and then
            while time.monotonic() < (sent[0] or time.monotonic()) + 10:
                endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 10_000)
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        timer.join()
    raise AssertionError("the wait was not interrupted")


def idle_cpu(endpoint: Endpoint, seconds: float) -> float:
    """Share of a core that this process uses while nobody asks anything of it."""
    pause = threading.Event()
    before, start = time.process_time(), time.monotonic()
    pause.wait(seconds)
    return (time.process_time() - before) / (time.monotonic() - start)


def child_refuses(endpoint: Endpoint) -> tuple[str, int]:
    """What a call raises in a forked child, and how the child exits after dropping the endpoint."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            endpoint.barrier(100)
        except StateError as error:
            os.write(into, str(error).encode())
            code = 0
        finally:
            endpoint.close()
            os._exit(code)
    os.close(into)
    _, status = os.waitpid(pid, 0)
    with open(out, "rb") as pipe:
        return pipe.read().decode(), os.waitstatus_to_exitcode(status)


def hammer(endpoint: Endpoint, peer: int, threads: int, writes: int) -> tuple[int, list[str]]:
    """Many threads on one endpoint: writes, status, statistics, waits."""
    region, failures = data(endpoint), []

    def one(index: int) -> None:
        try:
            for number in range(writes):
                request = endpoint.write(
                    peer, region, "data", 512, offset=512 * index, remote_offset=512 * index, signal=Signal(1, 56 + 8 * index)
                )
                request.status()
                if number % 7 == 0:
                    endpoint.statistics()
                if number % 3:
                    request.wait()
        except ExpertwireError as error:
            failures.append(f"{type(error).__name__}: {error}")

    in_threads(one, threads)
    endpoint.quiet()
    return threads * writes, failures


def counters(endpoint: Endpoint, first: int, count: int) -> list[int]:
    return [counter(endpoint, first + index) for index in range(count)]


def statistics(endpoint: Endpoint) -> Any:
    return endpoint.statistics()


def await_fault(endpoint: Endpoint, timeout_ms: int) -> tuple[int, int, str] | None:
    """What the endpoint says of the first dead peer, once it says it."""
    deadline = time.monotonic() + timeout_ms / 1000
    while time.monotonic() < deadline:
        seen = endpoint.native.doorbell_seen()
        fault = endpoint.native.fault()
        if fault is not None:
            return fault
        endpoint.native.doorbell_wait(seen, 50)
    return None


def await_silence(endpoint: Endpoint, rank: int, age_ms: int) -> None:
    """Until nothing was heard of that rank for so long."""
    deadline = time.monotonic() + 30
    while endpoint.native.pulse(rank)[3] < age_ms * 1_000_000:
        assert time.monotonic() < deadline, f"rank {rank} is not silent: heard {endpoint.native.pulse(rank)[3]} ns ago"
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)


def close_twice(endpoint: Endpoint) -> bool:
    endpoint.close()
    endpoint.close()
    return endpoint.native.closed


def register_and_write(endpoint: Endpoint, peer: int) -> bytes:
    memory = bytearray(b"registered" * 100)
    with endpoint.register(memory) as region:
        endpoint.write(peer, region, "data", len(memory)).wait()
    return bytes(memory)


def first_bytes(endpoint: Endpoint, length: int) -> bytes:
    return ctypes.string_at(data(endpoint).address, length)


def touch_peer(endpoint: Endpoint, peer: int, value: int) -> None:
    """Store into a mapped peer's memory and ring it."""
    ctypes.c_uint64.from_address(endpoint.native.peer_address(peer, "data")).value = value
    endpoint.native.ring(peer)


def wait_stored(endpoint: Endpoint, value: int) -> bool:
    return endpoint.native.wait_word(data(endpoint).number, 0, value, 10_000)


def ping_pong(endpoint: Endpoint, first: int, second: int, rounds: int) -> float:
    """Microseconds per hand-over between two mapped ranks, through flag and doorbell only."""
    native, mine = endpoint.native, data(endpoint).number
    other = second if endpoint.rank == first else first
    flag = ctypes.c_uint64.from_address(native.peer_address(other, "data"))
    start = time.perf_counter_ns()
    for number in range(1, rounds + 1):
        if endpoint.rank == first:
            flag.value = number
            native.ring(other)
        assert native.wait_word(mine, 0, number, 10_000)
        if endpoint.rank == second:
            flag.value = number
            native.ring(other)
    return (time.perf_counter_ns() - start) / rounds / 2 / 1000


def statistics_after_close(endpoint: Endpoint) -> None:
    endpoint.close()
    endpoint.barrier(100)


def wait_counter_briefly(endpoint: Endpoint, index: int, at_least: int, timeout_ms: int) -> bool:
    return endpoint.wait_counter(index, at_least, timeout_ms)


def barrier_briefly(endpoint: Endpoint, timeout_ms: int) -> None:
    endpoint.barrier(timeout_ms)


def publish_verdict(endpoint: Endpoint, rank: int) -> None:
    endpoint.native.publish_verdict(rank)


def remove_and_add(endpoint: Endpoint, peer: int) -> None:
    endpoint.remove_peer(peer)
    with pytest.raises(StateError, match=f"rank {peer} is not a peer"):
        endpoint.signal(peer, 1)
    endpoint.add_peer(peer, endpoint.blobs[peer])  # type: ignore[attr-defined]


def zero_word(endpoint: Endpoint) -> None:
    """Before the next ping_pong; nobody writes it then."""
    ctypes.c_uint64.from_address(data(endpoint).address).value = 0
