"""Regions of peers: their numbers are given back, and one that was names nothing any more."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest

from expertwire.errors import CapacityError, InvalidArgumentError, MismatchError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from expertwire.fabric.request import PreparedRequest
from fabric.ranks import LOCAL, TCP

ROOM = 8
BYTES = 4096
EITHER = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
GENERATIONS = 4095  # of a row (engine/types.hpp)


def endpoint_of(settings: Settings, room: int = ROOM) -> Endpoint:
    return Endpoint(0, 3, replace(settings, timeout_ms=20_000), independent=True, remote_regions_max=room)


@pytest.fixture(params=[LOCAL, TCP], ids=["local", "tcp"])
def met(request: pytest.FixtureRequest) -> Iterator[tuple[Endpoint, Endpoint]]:
    with endpoint_of(request.param) as here, endpoint_of(request.param) as there:
        meet(here, there)
        here.start()
        there.start()
        yield here, there


def meet(here: Endpoint, there: Endpoint) -> None:
    here.add_peer(1, there.blob(own_only=True), 1)
    there.add_peer(1, here.blob(own_only=True), 1)


def write(here: Endpoint, remote: int) -> PreparedRequest:
    memory = here.register(bytearray(BYTES))
    places, numbers = numpy.zeros(1, dtype=numpy.uint64), numpy.array([remote], dtype=numpy.uint32)
    locals_, lengths = numpy.array([memory.number], dtype=numpy.uint32), numpy.array([BYTES], dtype=numpy.uint64)
    return here.prepare_arrays("write", 1, locals_, places, numbers, places, lengths)


def test_a_region_that_was_registered_anew_takes_the_place_of_the_old_one(met: tuple[Endpoint, Endpoint]) -> None:
    here, there = met
    seen: set[int] = set()
    before: PreparedRequest | None = None
    for turn in range(3 * ROOM):
        memory = there.register(bytearray(BYTES))
        number = here.announce(1, "#of theirs", BYTES, memory.key())
        assert number not in seen
        if before:  # what was prepared for the region before is refused, also where its row is another's now
            with pytest.raises(InvalidArgumentError, match="is not one that rank 1 has announced, as things are"):
                before.native.submit(None, 1000, False)
        before = write(here, number)
        assert before.native.submit(None, 5000, False) is not None
        assert before.native.wait(20_000) == 0
        seen.add(number)
        assert here.statistics().remote_regions == 2, f"in turn {turn}"


def test_the_same_again_is_the_same(met: tuple[Endpoint, Endpoint]) -> None:
    here, there = met
    key = there.register(bytearray(BYTES)).key()
    assert len({here.announce(1, "#of theirs", BYTES, key) for _ in range(2 * ROOM)}) == 1


@EITHER
def test_a_removed_peer_gives_back_what_it_had(settings: Settings) -> None:
    with endpoint_of(settings) as here:
        here.start()
        for _ in range(5):
            with endpoint_of(settings) as there:
                meet(here, there)
                there.start()
                for index in range(ROOM - 1):
                    here.announce(1, f"#{index}", BYTES, there.register(bytearray(BYTES)).key())
                one_more = there.register(bytearray(BYTES)).key()
                with pytest.raises(CapacityError, match=r"'#more' of rank 1 would be one more than the 8 regions of peers"):
                    here.announce(1, "#more", BYTES, one_more)
                assert here.statistics().remote_regions == ROOM
                here.remove_peer(1)
                assert here.statistics().remote_regions == 0


def test_a_row_that_has_had_all_its_numbers_is_not_used_again() -> None:
    with endpoint_of(LOCAL, room=3) as here, endpoint_of(LOCAL) as there:
        meet(here, there)
        keys = [there.register(bytearray(BYTES)).key() for _ in range(2)]
        numbers: list[int] = []

        def announce_all() -> None:
            for turn in range(3 * GENERATIONS):
                numbers.append(here.announce(1, "#of theirs", BYTES, keys[turn % 2]))  # noqa: PERF401  (what was given is kept)

        with pytest.raises(CapacityError):
            announce_all()
        assert len(set(numbers)) == len(numbers) == 2 * GENERATIONS


@EITHER
def test_a_peer_whose_blob_fails_half_way_leaves_its_number_to_the_next(settings: Settings) -> None:
    with endpoint_of(settings) as here, endpoint_of(settings) as wrong, endpoint_of(settings) as right:
        blob = wrong.blob(own_only=True)
        larger = blob[:12] + struct.pack("<I", 1000) + blob[16:]  # its control region is too small for so many peers
        for _ in range(3):
            with pytest.raises(MismatchError, match="has no region 'runtime' of"):
                here.add_peer(1, larger, 1)
            assert here.statistics().peers == here.statistics().remote_regions == 0
        meet(here, right)
        here.start()
        right.start()
        here.notify(1, b"well").wait(20_000)
