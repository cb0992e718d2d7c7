"""What the ranks of test_replacement run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from expertwire.errors import DeadlineError, ExpertwireError, StateError
from expertwire.fabric import Endpoint, Signal
from expertwire.fabric.request import Request, Status
from fabric.bodies import counter, data

PARTS = 8  # writes of one round, all in flight at once
PART_BYTES = 4096
INBOX = PARTS * PART_BYTES  # where a partner's round lands; ours leaves from offset 0
ARRIVED, READ, STREAM = 0, 1, 2  # counters
STUCK_BYTES = 1 << 18
LONG_S = 30.0  # within what the test waits for an answer, of which it then says nothing but that there was none


def wait_until(endpoint: Endpoint, here: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not here():
        seen = endpoint.native.doorbell_seen()
        assert time.monotonic() < deadline, f"rank {endpoint.rank}: {what} has not come within {timeout_s} s"
        if not here():
            endpoint.native.doorbell_wait(seen, 20)


def exchange(endpoint: Endpoint, partner: int, first: int, done: Callable[[int], bool]) -> int:
    """Rounds of PARTS signalled writes both ways; every word is looked at, and every count is exact. Returns the last round."""
    region = data(endpoint)
    words = region.numpy("uint64", (INBOX // 8,))
    inbox = region.numpy("uint64", (INBOX // 8,), INBOX)
    number = first
    while not done(number):
        number += 1
        words[:] = endpoint.rank * 1_000_000 + number
        requests = [
            endpoint.write(
                partner,
                region,
                "data",
                PART_BYTES,
                offset=part * PART_BYTES,
                remote_offset=INBOX + part * PART_BYTES,
                lane=part % endpoint.lanes,
                signal=Signal(1, 8 * ARRIVED),
            )
            for part in range(PARTS)
        ]
        arrived = number * PARTS
        wait_until(endpoint, lambda arrived=arrived: counter(endpoint, ARRIVED) >= arrived, f"round {number}")
        assert counter(endpoint, ARRIVED) == arrived, "a signal came twice, or early"
        assert bool((inbox == partner * 1_000_000 + number).all()), f"round {number} is torn"
        wait_until(endpoint, lambda requests=requests: all(r.done for r in requests), f"the end of the writes of round {number}")
        assert [r.status() for r in requests] == [Status.OK] * PARTS
        endpoint.signal(partner, 1, 8 * READ)
        wait_until(endpoint, lambda number=number: counter(endpoint, READ) >= number, f"the answer to round {number}")
        assert counter(endpoint, READ) == number
    return number


def exchange_rounds(endpoint: Endpoint, partner: int, first: int, last: int) -> int:
    return exchange(endpoint, partner, first, lambda number: number >= last)


def connect(endpoint: Endpoint, peer: int) -> None:
    """What is written to it from now on leaves at once: each endpoint has a connection of its own to it."""
    for lane in range(endpoint.lanes):
        endpoint.write(peer, data(endpoint), "data", 8, lane=lane).wait(20_000)


def post_stuck(endpoint: Endpoint, stopped: int, count: int, lanes: int = 1) -> None:
    """Signalled writes to a stopped peer, over its lanes in turn, from memory registered for them."""
    memory = bytearray(b"\x5a" * STUCK_BYTES)
    region = endpoint.register(memory)
    requests = [
        endpoint.write(stopped, region, "data", STUCK_BYTES, lane=i % lanes, signal=Signal(1, 8 * 63, lane=i % lanes)) for i in range(count)
    ]
    endpoint.stuck = (region, memory, requests)  # type: ignore[attr-defined]


def post_unacknowledged(endpoint: Endpoint, stopped: int, count: int) -> None:
    """Writes so small that the network takes them whoever sleeps."""
    endpoint.small = [endpoint.write(stopped, data(endpoint), "data", 64) for _ in range(count)]  # type: ignore[attr-defined]


def await_quarantine(endpoint: Endpoint, count: int) -> None:
    wait_until(endpoint, lambda: endpoint.statistics().slots_quarantined >= count, f"the hard deadline of {count} writes")
    region, _, requests = endpoint.stuck  # type: ignore[attr-defined]
    assert not any(r.done for r in requests), "memory was given back while the endpoint could still read it"
    with pytest.raises(StateError, match="in use"):
        region.close(0)


def await_replacement(endpoint: Endpoint) -> list[str]:
    """Until the stuck requests have ended: never before the endpoint was closed. Their statuses; their memory is used anew."""
    _, memory, requests = endpoint.stuck  # type: ignore[attr-defined]

    def ended() -> bool:
        some = any(r.done for r in requests)
        assert not some or endpoint.statistics().endpoints_replaced > 0, "a record turned terminal before the close"
        return some

    wait_until(endpoint, ended, "the end of the stuck writes")
    assert all(r.done for r in requests)
    memory[:] = bytes(len(memory))
    return [r.status().name for r in requests]


def close_stuck(endpoint: Endpoint) -> None:
    """Their memory is deregistered. Needs the peer to be removed: it would be asked whether it still writes there."""
    endpoint.stuck[0].close(20_000)  # type: ignore[attr-defined]
    endpoint.stuck = None  # type: ignore[attr-defined]


def remove_while_exchanging(endpoint: Endpoint, partner: int, stopped: int, first: int, last: int) -> tuple[float, list[str]]:
    """`exchange` in a thread of its own, while this one removes the stopped peer. (Seconds of the removal, statuses of its requests.)"""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            exchange_rounds(endpoint, partner, first, last)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    start = time.monotonic()
    remove(endpoint, stopped)
    took = time.monotonic() - start
    statuses = []
    if getattr(endpoint, "stuck", None):
        statuses = await_replacement(endpoint)
        close_stuck(endpoint)
    thread.join()
    if failures:
        raise failures[0]
    return took, statuses


def write_after_waking(endpoint: Endpoint, peer: int) -> str:
    """What became of a write to a rank that has closed the endpoint known here."""
    try:
        request = endpoint.write(peer, data(endpoint), "data", 4096, remote_offset=INBOX, signal=Signal(1, 0), timeout_ms=500)
        request.wait(500)
    except DeadlineError:
        return "pending"
    except ExpertwireError as error:
        return type(error).__name__
    return "ok"


WINDOW = 8  # of a stream, to each peer


def begin_stream(endpoint: Endpoint, peers: tuple[int, ...]) -> None:
    """Signalled writes without pause to each peer, in a thread of their own, until end_stream()."""
    ending = threading.Event()
    written = dict.fromkeys(peers, 0)
    statuses: set[str] = set()

    def write(peer: int) -> tuple[int, Request]:
        return peer, endpoint.write(peer, data(endpoint), "data", 8, remote_offset=2 * INBOX, signal=Signal(1, 8 * STREAM))

    def run() -> None:
        flying = [write(peer) for peer in peers for _ in range(WINDOW)]
        while flying:
            seen = endpoint.native.doorbell_seen()
            for peer, request in [each for each in flying if each[1].done]:
                statuses.add(request.status().name)
                written[peer] += 1
                flying.remove((peer, request))
                if not ending.is_set() and request.status() is Status.OK:
                    flying.append(write(peer))
            endpoint.native.doorbell_wait(seen, 2)

    thread = threading.Thread(target=run)
    thread.start()
    endpoint.stream = (thread, ending, written, statuses)  # type: ignore[attr-defined]


def end_stream(endpoint: Endpoint) -> tuple[list[int], set[str]]:
    """(writes to each peer, how they ended)"""
    thread, ending, written, statuses = endpoint.stream  # type: ignore[attr-defined]
    ending.set()
    thread.join(40)
    assert not thread.is_alive(), f"after {written} writes the rest has not ended; ended: {statuses}"
    return list(written.values()), statuses


def count_of(endpoint: Endpoint, which: int) -> int:
    return counter(endpoint, which)


def descriptors(endpoint: Endpoint) -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def remove(endpoint: Endpoint, peer: int) -> None:
    """As the error says, called again where the deadline passed: for others it is often shorter than what a busy machine needs."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return endpoint.remove_peer(peer)
        except StateError as error:
            if "call again" not in str(error) or time.monotonic() > deadline:
                raise


def fault_of(endpoint: Endpoint) -> tuple[int, str] | None:
    return endpoint.fault()


def counts(endpoint: Endpoint) -> dict[str, int]:
    return dict(endpoint.native.statistics())


def pulses_age_ms(endpoint: Endpoint, peer: int) -> float:
    return float(endpoint.native.pulse(peer)[3]) / 1e6


def await_silence(endpoint: Endpoint, peer: int, ms: float) -> None:
    wait_until(endpoint, lambda: pulses_age_ms(endpoint, peer) > ms, f"{ms} ms without a beat of rank {peer}")


def write_until_refused(endpoint: Endpoint, peer: int) -> str:
    """Writes to a peer until a write fails, then accuses it before all others. The error."""
    region = data(endpoint)
    region.numpy("uint64", (512,))[:] = 0xDEAD
    error = ""
    deadline = time.monotonic() + LONG_S
    while not error:
        assert time.monotonic() < deadline, f"rank {peer} still takes writes after {LONG_S} s"
        try:
            endpoint.write(peer, region, "data", 4096, remote_offset=INBOX, signal=Signal(1, 8 * ARRIVED)).wait(20_000)
        except ExpertwireError as problem:
            error = type(problem).__name__
    endpoint.native.publish_verdict(peer)
    return error


def wait_for_count(endpoint: Endpoint, at_least: int) -> None:
    wait_until(endpoint, lambda: counter(endpoint, ARRIVED) >= at_least, f"count {at_least}")


def clear_inbox(endpoint: Endpoint) -> int:
    """Rank 0 has removed the writer: nothing of it arrives from here on. The count that it had reached."""
    data(endpoint).numpy("uint8", (4096,), INBOX)[:] = 0
    return counter(endpoint, ARRIVED)


def inbox(endpoint: Endpoint) -> tuple[int, int]:
    """(bytes that are not zero, count)"""
    return int(data(endpoint).numpy("uint8", (4096,), INBOX).astype(bool).sum()), counter(endpoint, ARRIVED)


def watch_for_faults(endpoint: Endpoint, seconds: float) -> tuple[int, str] | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and endpoint.fault() is None:
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)
    return endpoint.fault()


def barrier_with_all(endpoint: Endpoint) -> None:
    endpoint.barrier(20_000)


def submit_error(endpoint: Endpoint, peer: int) -> str:
    """What a submission says once the peer's farewell has been seen."""
    text = ""

    def refused() -> bool:
        nonlocal text
        try:
            endpoint.signal(peer, 1, 8 * 5)
        except ExpertwireError as error:
            text = str(error)
        else:
            endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)
        return bool(text)

    wait_until(endpoint, refused, f"the refusal of work for rank {peer}")
    return text


def close_endpoint(endpoint: Endpoint) -> None:
    endpoint.close()


def begin_barrier_in_vain(endpoint: Endpoint) -> None:
    """Once a beat has passed the hard deadline, so that nothing more leaves over the lane that words of barriers take."""
    wait_until(endpoint, lambda: endpoint.statistics().slots_quarantined > 0, "the hard deadline of a beat")
    with pytest.raises(DeadlineError, match="have not arrived"):
        endpoint.barrier(100)


def publish_call_and_verdict(endpoint: Endpoint, dead: int) -> None:
    """Two words of one pulse: over a lane of one slot the second stands behind the first, and falls with it at the hard deadline."""
    endpoint.native.publish_call(7, 1)
    endpoint.native.publish_verdict(dead)
    wait_until(endpoint, lambda: endpoint.statistics().slots_quarantined > 0, "the hard deadline of the first word")
