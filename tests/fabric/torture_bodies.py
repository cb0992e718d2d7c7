"""What the ranks of test_torture run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from expertwire.errors import DeadlineError
from expertwire.fabric import Endpoint, Request, Scope, Signal, Status
from expertwire.testing.oracle import check_payload, payload, payload_seed
from fabric.bodies import counter, data

LANES = 2
PLACE_BYTES = 1024  # each write has its own
LENGTHS = (1024, 8, 1000, 333, 1, 64, 513)
LIMIT_S = 60.0


@dataclass
class Tally:
    """What one rank saw."""

    wrong: list[str] = field(default_factory=list)
    arrived: int = 0  # writes that were looked at when their signal was here
    done_at_first: dict[int, int] = field(default_factory=dict)  # peer → writes ended when the first peer's had all ended
    statuses: set[str] = field(default_factory=set)


def half(endpoint: Endpoint) -> int:
    """Where arrivals begin in region `data`; what is sent lies before."""
    return data(endpoint).bytes // 2


def place_of(source: int, lane: int, number: int, count: int) -> int:
    return ((source * LANES + lane) * count + number) * PLACE_BYTES


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def stream_to_all(endpoint: Endpoint, peers: list[int], count: int) -> Tally:
    """`count` writes to each of those peers on each lane, all submitted before the first is waited for, while theirs arrive here.

    Every write is followed by a count that covers its lane: when n have come, the first n writes of that lane must all be there.
    """
    tally, seen = Tally(), {(peer, lane): 0 for peer in peers for lane in range(LANES)}
    region = data(endpoint)
    for lane in range(LANES):
        for number in range(count):
            at = place_of(endpoint.rank, lane, number, count)
            seed = payload_seed(endpoint.rank * LANES + lane, number)
            region.numpy("uint8", (PLACE_BYTES,), at)[:] = payload(seed, 0, PLACE_BYTES)
    requests: dict[int, list[Request]] = {peer: [] for peer in peers}
    for number in range(count):
        for peer in peers:
            for lane in range(LANES):
                at = place_of(endpoint.rank, lane, number, count)
                word = 8 * (endpoint.rank * LANES + lane)
                signal = Signal(1, word, scope=Scope.QUEUE_PAIR, lane=lane)
                request = endpoint.write(
                    peer, region, "data", length_of(number), offset=at, remote_offset=half(endpoint) + at, lane=lane, signal=signal
                )
                requests[peer].append(request)
        look(endpoint, seen, count, tally)
    deadline = time.monotonic() + LIMIT_S
    while not ended(requests, count, tally) or any(here < count for here in seen.values()):
        bell = endpoint.native.doorbell_seen()
        look(endpoint, seen, count, tally)
        endpoint.native.turn()
        endpoint.native.doorbell_wait(bell, 5)
        if time.monotonic() > deadline:
            raise DeadlineError(f"rank {endpoint.rank}: arrived {seen}, {endpoint.statistics()}")
    tally.statuses = {request.status().name for found in requests.values() for request in found}
    return tally


def ended(requests: dict[int, list[Request]], count: int, tally: Tally) -> bool:
    """Whether all have; notes how far each peer's are when the first peer's are through."""
    done = {peer: sum(request.done for request in found) for peer, found in requests.items()}
    if not tally.done_at_first and max(done.values()) == LANES * count:
        tally.done_at_first = done
    return all(number == LANES * count for number in done.values())


def look(endpoint: Endpoint, seen: dict[tuple[int, int], int], count: int, tally: Tally) -> None:
    """Every write that a count says is here."""
    for (peer, lane), before in seen.items():
        here = counter(endpoint, peer * LANES + lane)
        for number in range(before, here):
            at = half(endpoint) + place_of(peer, lane, number, count)
            found: np.ndarray[tuple[int], np.dtype[np.uint8]] = data(endpoint).numpy("uint8", (length_of(number),), at)
            problem = check_payload(found, payload_seed(peer * LANES + lane, number))
            if problem is not None:
                tally.wrong.append(f"rank {endpoint.rank}: write {number} of rank {peer}, lane {lane}, at count {here}: {problem}")
            tally.arrived += 1
        seen[peer, lane] = here


def all_done(endpoint: Endpoint, peer: int, count: int, length: int) -> set[str]:
    """`count` writes to one peer, waited for in the end; how they ended."""
    region = data(endpoint)
    requests = [endpoint.write(peer, region, "data", length, signal=Signal(1, 8 * 60)) for _ in range(count)]
    for request in requests:
        request.wait()
    return {Status(request.status()).name for request in requests}
