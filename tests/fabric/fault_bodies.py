"""What the ranks of test_faults run. A rank that has come back as another endpoint keeps it as `endpoint.again`."""

from __future__ import annotations

import time
from contextlib import suppress

from expertwire.errors import ExpertwireError, StateError
from expertwire.fabric import Endpoint, Request, Scope, Signal
from fabric.bodies import counter, data
from fabric.ranks import COUNTERS, DATA_BYTES

STREAM_BYTES = 1 << 18
LONG_S = 40.0  # within what the test waits for an answer


def now(endpoint: Endpoint) -> Endpoint:
    """The endpoint that this rank has now."""
    found = getattr(endpoint, "again", endpoint)
    assert isinstance(found, Endpoint)
    return found


def blob(endpoint: Endpoint) -> bytes:
    return now(endpoint).blob()


def return_as_another(endpoint: Endpoint) -> bytes:
    """Close, and open again under the same rank."""
    now(endpoint).close()
    again = Endpoint(endpoint.rank, endpoint.size, endpoint.settings, counters=COUNTERS)
    again.region("data", DATA_BYTES)
    endpoint.again = again  # type: ignore[attr-defined]
    return again.blob()


def meet(endpoint: Endpoint, blobs: dict[int, bytes]) -> None:
    for peer, theirs in blobs.items():
        now(endpoint).add_peer(peer, theirs)
    now(endpoint).start()


def replace_peer(endpoint: Endpoint, peer: int, theirs: bytes) -> None:
    now(endpoint).remove_peer(peer)
    now(endpoint).add_peer(peer, theirs)


def barriers_in_order(endpoint: Endpoint, rounds: int) -> list[int]:
    """Each rank counts at every other before its barrier; after it, what has been counted here since the first."""
    mine, seen = now(endpoint), []
    before = counter(mine, 4)
    mine.barrier()
    for _ in range(rounds):
        for peer in range(mine.size):
            if peer != mine.rank:
                mine.signal(peer, 1, 32, scope=Scope.PEER)
        mine.barrier()
        seen.append(counter(mine, 4) - before)
        mine.barrier()
    return seen


def stream_until_it_dies(endpoint: Endpoint, victim: int, other: int, more: int) -> tuple[str, int, float, set[str]]:
    """Signalled writes to two ranks, both in flight at once, until one of them is dead; then `more` writes to the other.

    Returns (what was raised, whom it names, seconds from the post that failed, statuses of the writes to the other).
    """
    region, raised, fine = data(endpoint), None, set()
    deadline = time.monotonic() + LONG_S
    while raised is None:
        assert time.monotonic() < deadline, f"writes to rank {victim} still end well after {LONG_S} s"
        beside = endpoint.write(other, region, "data", STREAM_BYTES, signal=Signal(1, 8))
        posted = time.monotonic()
        try:
            endpoint.write(victim, region, "data", STREAM_BYTES, signal=Signal(1, 8)).wait()
        except ExpertwireError as error:
            raised = error
        took = time.monotonic() - posted
        fine.add(status_at_end(beside))
    for _ in range(more):
        fine.add(status_at_end(endpoint.write(other, region, "data", STREAM_BYTES, signal=Signal(1, 8))))
    return type(raised).__name__, getattr(raised, "rank", -1), took, fine


def status_at_end(request: Request) -> str:
    """Without asking who is dead: that rank is not this request's peer."""
    deadline = time.monotonic() + 20
    while not request.done:
        request.poll()
        assert time.monotonic() < deadline, request
    return request.status().name


def write_to_a_stopped(endpoint: Endpoint, stopped: int, other: int, count: int, timeout_ms: int) -> tuple[str, float, set[str]]:
    """`count` writes to each, submitted in turns. (how the wait for the last to the stopped one ended, seconds, the others' statuses)"""
    region = data(endpoint)
    held, fine = [], []
    for _ in range(count):
        held.append(endpoint.write(stopped, region, "data", STREAM_BYTES, signal=Signal(1, 8)))
        fine.append(endpoint.write(other, region, "data", STREAM_BYTES, signal=Signal(1, 8)))
    for request in fine:
        request.wait()
    begun = time.monotonic()
    try:
        held[-1].wait(timeout_ms)
        ended = "ok"
    except ExpertwireError as error:
        ended = type(error).__name__
    endpoint.stuck = held  # type: ignore[attr-defined]
    return ended, time.monotonic() - begun, {request.status().name for request in fine}


def write_past_the_place(endpoint: Endpoint, peer: int, count: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Writes to a peer whose queue is stuck, and its removal: (name and text of what each wait raised, statuses at the end)."""
    requests = [endpoint.write(peer, data(endpoint), "data", 4096, signal=Signal(1, 8)) for _ in range(count)]
    raised = []
    for request in requests:
        try:
            request.wait()
        except ExpertwireError as error:
            raised.append((type(error).__name__, str(error)))
    endpoint.remove_peer(peer)
    deadline = time.monotonic() + 20
    while not all(request.done for request in requests):
        requests[0].poll()
        assert time.monotonic() < deadline, requests
    return raised, [request.status().name for request in requests]


def write_on(endpoint: Endpoint, target: int, value: int) -> tuple[int, str]:
    """Signalled writes, one after the other, until one is refused; how many ended well, and what refused the last."""
    region, done = data(endpoint), 0
    region.numpy("uint8")[:] = value
    deadline = time.monotonic() + LONG_S
    while True:
        assert time.monotonic() < deadline, f"{done} writes to rank {target} have ended well, none was refused"
        try:
            endpoint.write(target, region, "data", STREAM_BYTES, signal=Signal(1, 8 * 9)).wait()
            done += 1
        except ExpertwireError as error:
            return done, str(error)


OWN_BYTES = 300_000  # more than the provider copies at the post


def blob_with_memory_of_its_own(endpoint: Endpoint) -> tuple[str, bytes]:
    """Of an endpoint that has registered memory which is not a memfd; its name, and the blob."""
    endpoint.own = bytearray(OWN_BYTES)  # type: ignore[attr-defined]
    endpoint.registered = endpoint.register(endpoint.own)  # type: ignore[attr-defined]
    return endpoint.registered.name, endpoint.blob()  # type: ignore[attr-defined]


def add_and_write(endpoint: Endpoint, peer: int, blob: bytes, own: str, value: int) -> None:
    endpoint.add_peer(peer, blob)
    data(endpoint).numpy("uint8", (OWN_BYTES,))[:] = value
    endpoint.write(peer, data(endpoint), own, 64).wait()
    endpoint.write(peer, data(endpoint), own, OWN_BYTES - 64, offset=64, remote_offset=64).wait()


def read_back(endpoint: Endpoint, peer: int, own: str) -> set[int]:
    data(endpoint).numpy("uint8")[:] = 0
    endpoint.read(peer, data(endpoint), own, OWN_BYTES).wait()
    return set(data(endpoint).numpy("uint8", (OWN_BYTES,)).tolist())


def write_own(endpoint: Endpoint, peer: int, own: str) -> str:
    """What ends a write to it."""
    try:
        endpoint.write(peer, data(endpoint), own, 64).wait()
    except ExpertwireError as error:
        return str(error)
    return ""


def write_whole(endpoint: Endpoint, peer: int) -> None:
    endpoint.write(peer, data(endpoint), "data", 64).wait()


def own_is(endpoint: Endpoint) -> set[int]:
    return set(endpoint.own)  # type: ignore[attr-defined]


def close_own(endpoint: Endpoint) -> None:
    endpoint.registered.close()  # type: ignore[attr-defined]


def fence_off(endpoint: Endpoint, writer: int, value: int) -> None:
    """Remove the writer, close the region that it knows, and offer fresh memory under another name.

    The close is refused while the writer is in the middle of a copy: `close_fenced` asks again.
    """
    endpoint.remove_peer(writer)
    endpoint.fenced = data(endpoint)  # type: ignore[attr-defined]
    with suppress(StateError):
        endpoint.fenced.close(200)  # type: ignore[attr-defined]
    fresh = endpoint.region("fresh", STREAM_BYTES)
    fresh.numpy("uint8")[:] = value
    endpoint.fresh = fresh  # type: ignore[attr-defined]


def close_fenced(endpoint: Endpoint) -> None:
    endpoint.fenced.close()  # type: ignore[attr-defined]


def fresh_is(endpoint: Endpoint, value: int) -> bool:
    return bool((endpoint.fresh.numpy("uint8") == value).all())  # type: ignore[attr-defined]


def write_fresh(endpoint: Endpoint, peer: int, blob: bytes, value: int) -> None:
    endpoint.add_peer(peer, blob)
    region = data(endpoint)
    region.numpy("uint8")[:] = value
    endpoint.write(peer, region, "fresh", STREAM_BYTES).wait()


def accuse_and_leave(endpoint: Endpoint, accused: int) -> None:
    """A verdict, told to all, and then a farewell."""
    endpoint.native.publish_verdict(accused)
    endpoint.close()


def hears_of(endpoint: Endpoint, peer: int, seconds: float) -> tuple[tuple[int, str] | None, bool, str]:
    """After so long: (who is held dead, whether the peer is held to have left, how a write to it ends)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)
    try:
        endpoint.write(peer, data(endpoint), "data", 64).wait()
        ended = "ok"
    except ExpertwireError as error:
        ended = str(error)
    return endpoint.fault(), endpoint.native.pulse(peer)[4], ended


def await_farewell(endpoint: Endpoint, peer: int) -> None:
    deadline = time.monotonic() + 10
    while not endpoint.native.pulse(peer)[4]:
        assert time.monotonic() < deadline, f"no farewell of rank {peer}"
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)


def remove(endpoint: Endpoint, peer: int) -> None:
    endpoint.remove_peer(peer)


def try_barriers(endpoint: Endpoint, count: int, timeout_ms: int) -> list[str]:
    """How each ends."""
    ended = []
    for _ in range(count):
        try:
            endpoint.barrier(timeout_ms)
            ended.append("ok")
        except ExpertwireError as error:
            ended.append(f"{type(error).__name__}: {error}")
    return ended


def beats(endpoint: Endpoint, peer: int) -> int:
    return int(endpoint.native.pulse(peer)[0])


def await_beats(endpoint: Endpoint, peer: int, count: int) -> None:
    deadline = time.monotonic() + 10
    while beats(endpoint, peer) < count:
        assert time.monotonic() < deadline, f"rank {peer} has beaten {beats(endpoint, peer)} times"
        endpoint.native.doorbell_wait(endpoint.native.doorbell_seen(), 20)
