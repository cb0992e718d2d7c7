"""What the ranks of test_lanes run. Rank 0 writes to rank 1."""

from __future__ import annotations

import random
import time

import numpy
import pytest

from expertwire.errors import StateError
from expertwire.fabric import Endpoint, Request, Scope, Signal
from expertwire.fabric.lanes import SMALL_BYTES_MAX
from expertwire.testing.oracle import check_payload, payload, payload_seed
from fabric.bodies import counter, data

SMALL_AREA = 256 << 10  # small writes land below it, bulk from here on
BULK_BYTES = (700 << 10) + 4097  # no multiple of any chunk
GUARD = 0xA5
SMALL_DONE, BULK_DONE = 0, 1  # counters; then one for each lane


def pieces(epoch: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the small writes of one epoch: every byte of the area but the last ones, none twice."""
    draw = random.Random(epoch)
    found, at = [], 0
    while at < SMALL_AREA - SMALL_BYTES_MAX:
        size = draw.choice((8, 24, 700, 4096, draw.randrange(1, SMALL_BYTES_MAX)))
        found.append((at, size))
        at += size
    draw.shuffle(found)
    return found


def guard(endpoint: Endpoint) -> None:
    data(endpoint).numpy("uint8")[:] = GUARD


def clear_places(endpoint: Endpoint, nbytes: int) -> None:
    data(endpoint).numpy("uint8", (endpoint.lanes * nbytes,))[:] = 0


def write_both(endpoint: Endpoint, epoch: int) -> int:
    """One bulk and many small writes beside it, each with its signal; how many small ones had ended before the bulk."""
    region = data(endpoint)
    region.numpy("uint8")[:] = payload(payload_seed(0, epoch), 0, region.bytes)
    bulk = endpoint.write(1, region, "data", BULK_BYTES, offset=SMALL_AREA, remote_offset=SMALL_AREA, signal=Signal(1, 8 * BULK_DONE))
    before = 0
    for offset, size in pieces(epoch):
        endpoint.write(1, region, "data", size, offset=offset, remote_offset=offset, signal=Signal(1, 8 * SMALL_DONE)).wait()
        before += not bulk.done
    bulk.wait()
    return before


def check_both(endpoint: Endpoint, epoch: int) -> None:
    """Every byte of the epoch is there once its signals are, and nothing was written beside it."""
    small = pieces(epoch)
    end = max(offset + size for offset, size in small)
    area = data(endpoint).numpy("uint8")
    endpoint.wait_counter(SMALL_DONE, sum(len(pieces(each)) for each in range(1, epoch + 1)), 20_000)
    assert check_payload(area[:end], payload_seed(0, epoch)) is None
    endpoint.wait_counter(BULK_DONE, epoch, 20_000)
    assert check_payload(area[SMALL_AREA : SMALL_AREA + BULK_BYTES], payload_seed(0, epoch), SMALL_AREA) is None
    assert bool((area[end:SMALL_AREA] == GUARD).all()), "a byte between the small ones and the bulk was written"
    assert bool((area[SMALL_AREA + BULK_BYTES :] == GUARD).all()), "a byte behind the bulk was written"


def write_in_order(endpoint: Endpoint, rounds: int, nbytes: int) -> None:
    """On every lane: rounds into one place each, all in flight, each with a signal behind its own lane. They end in that order."""
    region = data(endpoint)
    posted: list[list[Request]] = [[] for _ in range(endpoint.lanes)]
    words = region.numpy("uint64", (endpoint.lanes * rounds * nbytes // 8,))
    words.reshape(endpoint.lanes * rounds, -1)[:] = numpy.tile(numpy.arange(1, rounds + 1, dtype="uint64"), endpoint.lanes)[:, None]
    for number in range(rounds):
        for lane in range(endpoint.lanes):
            posted[lane].append(
                endpoint.write(
                    1,
                    region,
                    "data",
                    nbytes,
                    offset=(lane * rounds + number) * nbytes,
                    remote_offset=lane * nbytes,
                    lane=lane,
                    signal=Signal(1, 8 * (2 + lane), scope=Scope.QUEUE_PAIR, lane=lane),
                )
            )
    deadline = time.monotonic() + 40
    while not all(requests[-1].done for requests in posted):
        assert time.monotonic() < deadline, f"ended by lane: {[sum(r.done for r in requests) for requests in posted]} of {rounds}"
        for requests in posted:
            requests[-1].poll()
            done = [request.done for request in reversed(requests)][::-1]  # looked at from the last: what it sees done was done before
            assert done == sorted(done, reverse=True), "one ended before one that its lane had taken earlier"


def check_in_order(endpoint: Endpoint, rounds: int, nbytes: int) -> None:
    """At every count a lane's place holds that round or a later one, whole words; at the end the last one."""
    places = [data(endpoint).numpy("uint64", (nbytes // 8,), lane * nbytes) for lane in range(endpoint.lanes)]
    seen = [0] * endpoint.lanes
    while min(seen) < rounds:
        lane = seen.index(min(seen))
        assert endpoint.wait_counter(2 + lane, seen[lane] + 1, 20_000)
        for each, place in enumerate(places):
            count = counter(endpoint, 2 + each)
            assert int(place.min()) >= count, f"lane {each}: count {count} came before its data"
            assert count >= seen[each]
            seen[each] = count
    assert all(bool((place == rounds).all()) for place in places)


def deregister_in_use(endpoint: Endpoint) -> None:
    """Refused while any lane still reads it; taken once all have ended."""
    memory = bytearray(4 * BULK_BYTES)
    region = endpoint.register(memory)
    requests = [endpoint.write(1, region, "data", BULK_BYTES, offset=i * BULK_BYTES, remote_offset=SMALL_AREA) for i in range(4)]
    with pytest.raises(StateError, match="in use"):
        region.close(0)
    for request in requests:
        request.wait()
    region.close(5000)
