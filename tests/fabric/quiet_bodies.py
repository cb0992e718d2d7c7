"""What the ranks of test_quiet and test_shutdown run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from expertwire.errors import DeadlineError, ExpertwireError, TransferError
from expertwire.fabric import Chunk, Endpoint, Request, Scope, Signal, Status
from expertwire.testing.oracle import check_payload, payload, payload_seed
from fabric.bodies import counter, data, in_threads

LANES = 2
PART_BYTES = 8192
PARTS = 20  # writes between two ranks before each barrier
THREADS = 4


def outbox(endpoint: Endpoint, peer: int, part: int) -> int:
    return (peer * PARTS + part) * PART_BYTES


def inbox(endpoint: Endpoint, source: int, part: int) -> int:
    return data(endpoint).bytes // 2 + (source * PARTS + part) * PART_BYTES


def submit_mixed(endpoint: Endpoint, peer: int, count: int) -> list[Request]:
    """Writes with signals of every scope on every lane, reads, bare signals and notifications: more than there are slots."""
    region, requests = data(endpoint), []
    for number in range(count):
        at, lane = (number % 8) * PART_BYTES, number % LANES
        signal = Signal(1, 0, scope=Scope(number % 3), lane=lane)
        requests.append(endpoint.write(peer, region, "data", PART_BYTES, offset=at, remote_offset=at, lane=lane, signal=signal))
        if number % 4 == 0:
            requests.append(endpoint.read(peer, region, "data", PART_BYTES, offset=region.bytes // 2 + at, remote_offset=at, lane=lane))
            requests.append(endpoint.signal(peer, 1, 8, scope=Scope.PEER))
            requests.append(endpoint.notify(peer, b"note"))
    return requests


def quiet_covers_all_kinds(endpoint: Endpoint, peer: int, count: int) -> tuple[set[str], int, int]:
    """Statuses right after quiet; how many had ended and how many were queued when it was called."""
    requests = submit_mixed(endpoint, peer, count)
    before, queued = sum(request.done for request in requests), endpoint.statistics().operations_queued
    endpoint.quiet()
    return {request.status().name for request in requests}, before, queued


def quiet_beside_a_stream(endpoint: Endpoint, peer: int, rounds: int) -> int:
    """A thread submits without a pause and never lets its queue run dry; quiet returns all the same. How much it had submitted since."""
    region, failures, submitted, going = data(endpoint), [], [0], threading.Event()
    running: list[Request] = []

    def stream() -> None:
        try:
            while not going.is_set():
                running.append(endpoint.write(peer, region, "data", PART_BYTES, signal=Signal(1, 16), lane=1))
                submitted[0] += 1
                if len(running) > 200:
                    running.pop(0).wait()
        except ExpertwireError as error:
            failures.append(error)

    worker = threading.Thread(target=stream)
    worker.start()
    later = 0
    try:
        for _ in range(rounds):
            mine = [endpoint.write(peer, region, "data", PART_BYTES, signal=Signal(1, 24)) for _ in range(5)]
            before = submitted[0]
            endpoint.quiet(10_000)
            assert all(request.status() is Status.OK for request in mine)
            later += submitted[0] - before
    finally:
        going.set()
        worker.join()
    assert not failures, failures
    endpoint.quiet()
    return later


def quiet_in_every_thread(endpoint: Endpoint, peer: int, rounds: int) -> list[str]:
    """Several threads submit and wait for quiet, each for its own; what any of them had submitted before its call has ended after it."""
    region, problems = data(endpoint), []

    def one(index: int) -> None:
        try:
            for number in range(rounds):
                at = (index * 8 + number % 8) * 1024
                mine = [
                    endpoint.write(
                        peer, region, "data", 1024, offset=at, remote_offset=at, lane=index % LANES, signal=Signal(1, 32 + 8 * index)
                    )
                    for _ in range(3)
                ]
                endpoint.quiet()
                problems.extend(f"thread {index}, round {number}: {r!r}" for r in mine if r.status() is not Status.OK)
        except ExpertwireError as error:
            problems.append(f"thread {index}: {type(error).__name__}: {error}")

    in_threads(one, THREADS)
    return problems


def quiet_of_a_stopped_peer(endpoint: Endpoint, peer: int) -> tuple[str, bool]:
    """(what quiet says when its deadline passes, whether anything is held back)"""
    region = data(endpoint)
    held = [endpoint.write(peer, region, "data", 1 << 18, signal=Signal(1, 8 * 20)) for _ in range(40)]
    endpoint.held = held  # type: ignore[attr-defined]
    try:
        endpoint.quiet(300)
    except DeadlineError as error:
        return str(error), endpoint.statistics().gates_closed > 0
    return "", False


def quiet_after_all(endpoint: Endpoint) -> set[str]:
    endpoint.quiet()
    return {request.status().name for request in endpoint.held}  # type: ignore[attr-defined]


def quiet_with_a_failed_request(endpoint: Endpoint, peer: int) -> tuple[str, str]:
    """(the request's status after quiet, what quiet raised: nothing if it had failed before). The peer has closed that region."""
    request = endpoint.submit("write", peer, [Chunk(data(endpoint), "gone", 64)])
    try:
        endpoint.quiet()
    except TransferError as error:
        return request.status().name, str(error)
    return request.status().name, ""


def make_gone(endpoint: Endpoint) -> bytes:
    endpoint.gone = endpoint.region("gone", 4096)  # type: ignore[attr-defined]
    return endpoint.blob()


def know(endpoint: Endpoint, peer: int, blob: bytes) -> None:
    endpoint.add_peer(peer, blob)


def close_gone(endpoint: Endpoint) -> None:
    endpoint.gone.close()  # type: ignore[attr-defined]


def barriers_behind_data(endpoint: Endpoint, rounds: int, threads: int) -> list[str]:
    """Every rank writes to all others without waiting for anything, from so many threads, then comes to the barrier: all of it is there."""
    region, problems = data(endpoint), []
    peers = [peer for peer in range(endpoint.size) if peer != endpoint.rank]
    for number in range(rounds):
        for peer in peers:
            seed = payload_seed(endpoint.rank * 100 + peer, number)
            at = outbox(endpoint, peer, 0)
            region.numpy("uint8", (PARTS * PART_BYTES,), at)[:] = payload(seed, 0, PARTS * PART_BYTES)

        def write_some(index: int) -> None:
            for part in range(index, PARTS, threads):
                for peer in peers:
                    endpoint.write(
                        peer, region, "data", PART_BYTES,
                        offset=outbox(endpoint, peer, part), remote_offset=inbox(endpoint, endpoint.rank, part), lane=part % LANES,
                    )  # fmt: skip

        in_threads(write_some, threads)
        endpoint.barrier()
        for peer in peers:
            seed = payload_seed(peer * 100 + endpoint.rank, number)
            wrong = check_payload(region.numpy("uint8", (PARTS * PART_BYTES,), inbox(endpoint, peer, 0)), seed)
            if wrong is not None:
                problems.append(f"rank {endpoint.rank}, round {number}, from rank {peer}: {wrong}")
        endpoint.barrier()  # looked at everywhere: the next round may be written
    return problems


def close_with_work(endpoint: Endpoint, peer: int, count: int, timeout_ms: int) -> tuple[list[str], float]:
    """Statuses after a close that nothing was waited for before, and how long it took."""
    requests = submit_mixed(endpoint, peer, count)
    start = time.monotonic()
    endpoint.close(timeout_ms)
    return [request.status().name for request in requests], time.monotonic() - start


def counters_when_closed(endpoint: Endpoint, peer: int) -> tuple[int, int]:
    """Once the peer has told that it leaves: what its signals add up to."""
    deadline = time.monotonic() + 20
    while not endpoint.native.pulse(peer)[4]:
        assert time.monotonic() < deadline, "no farewell"
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)
    return counter(endpoint, 0), counter(endpoint, 1)


def close_under_waits(endpoint: Endpoint, peer: int) -> dict[str, str]:
    """One thread each in every kind of wait, on a peer that is stopped; then close. What each of them raised."""
    region = data(endpoint)
    stuck = [endpoint.write(peer, region, "data", 1 << 18) for _ in range(40)]
    raised: dict[str, str] = {}
    inside = threading.Barrier(8)

    def wait_in(name: str, call: Callable[[], object]) -> None:
        inside.wait()
        try:
            call()
            raised[name] = "returned"
        except ExpertwireError as error:
            raised[name] = type(error).__name__

    def submit_without_end() -> None:
        while True:
            endpoint.write(peer, region, "data", 1 << 18)

    def look_at_doorbell() -> None:
        while True:
            endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 10_000)

    calls: dict[str, Callable[[], object]] = {
        "request": lambda: stuck[-1].wait(30_000),
        "quiet": lambda: endpoint.quiet(30_000),
        "barrier": lambda: endpoint.barrier(30_000),
        "counter": lambda: endpoint.wait_counter(60, 1 << 40, 30_000),
        "submission": submit_without_end,
        "deregistration": lambda: region.close(30_000),
        "doorbell": look_at_doorbell,
    }
    workers = [threading.Thread(target=wait_in, args=item, name=item[0], daemon=True) for item in calls.items()]
    for worker in workers:
        worker.start()
    inside.wait()
    before = endpoint.statistics().requests_submitted
    deadline = time.monotonic() + 20
    while endpoint.statistics().requests_submitted < before + 20:  # the submitter is at work, so the others have begun as well
        assert time.monotonic() < deadline, f"{endpoint.statistics().requests_submitted - before} submissions, and no more come"
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 5)
    endpoint.close(200)
    for worker in workers:
        worker.join(10)
        if worker.is_alive():
            raised[worker.name] = "still waits"
    return raised
