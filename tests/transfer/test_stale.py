"""Registrations that are taken back at any time: an error of who still used them, and of nobody and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy
import pytest

from expertwire.errors import NotFoundError, TransferError
from expertwire.transfer import Agent, Card, Descriptors
from transfer.stale import BAD_KEY, NBYTES, Two, rows
from transfer.world import BOTH


@pytest.fixture(params=list(BOTH))
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(*(stack.enter_context(Agent(name, BOTH[request.param])) for name in "ab"))


def part_of(two: Two) -> Card:
    """What was on a card that said nothing of connections and only of `there`."""
    (area,) = (each for each in two.card.areas if each.address == int(two.there.ctypes.data))
    return replace(two.card, areas=(area,), complete=False, door=None)


def before_they_meet(two: Two) -> None:
    two.b.deregister(rows(two.there), "DRAM")
    two.a.add_remote(two.card)


def once_they_know_each_other(two: Two) -> None:
    two.a.add_remote(two.card)
    two.b.deregister(rows(two.there), "DRAM")


def after_it_was_used(two: Two) -> None:
    two.a.add_remote(two.card)
    assert not two.move("WRITE", two.there)
    two.there[:] = 1
    two.b.deregister(rows(two.there), "DRAM")


def by_a_card_that_was_on_its_way_for_long(two: Two) -> None:
    """They know each other without it; it is taken back; only then is it heard of."""
    old = part_of(two)
    two.a.add_remote(replace(two.card, areas=tuple(area for area in two.card.areas if area not in old.areas)))
    with pytest.raises(NotFoundError):
        two.move("WRITE", two.there)
    two.b.deregister(rows(two.there), "DRAM")
    two.a.add_remote(old)


def registered_anew(two: Two) -> None:
    two.b.deregister(rows(two.there), "DRAM")
    two.b.register(rows(two.there), "DRAM")
    two.a.add_remote(two.card)


@pytest.mark.parametrize(
    "taken_back", [before_they_meet, once_they_know_each_other, after_it_was_used, by_a_card_that_was_on_its_way_for_long, registered_anew]
)
def test_whenever_a_registration_is_taken_back_its_owner_is_well(two: Two, taken_back: Callable[[Two], None]) -> None:
    taken_back(two)
    two.only_its_own_fails()
    if taken_back is not registered_anew:
        two.b.register(rows(two.there), "DRAM")
    two.a.add_remote(two.b.card())
    assert not two.move("WRITE", two.there)
    assert numpy.all(two.there[:4096] == 7)


def test_a_card_that_says_more_than_was_registered_reaches_nothing(two: Two) -> None:
    """Forged, or damaged: the addresses lie within what the card says, and beside what is registered."""
    whole, always = two.card.areas
    two.a.add_remote(replace(two.card, areas=(whole, replace(always, nbytes=2 * always.nbytes))))
    beside = [(int(two.always.ctypes.data) + 4096, 4096, 0)]
    transfer = two.a.initialize("READ", [(int(two.here.ctypes.data), 4096, 0)], beside, "b", kind="DRAM")
    transfer.post()
    with pytest.raises(TransferError, match=f"{BAD_KEY}|out_of_range"):
        transfer.wait()
    assert not two.move("WRITE", two.always)


def test_taken_back_and_given_again_all_the_time_while_transfers_run(two: Two) -> None:
    """Whatever a transfer meets, it ends well or by bad_key, and one to other memory always ends well."""
    two.a.add_remote(two.card)
    over, moved = threading.Event(), threading.Event()
    rounds = 0

    def come_and_go() -> None:
        nonlocal rounds
        while not over.is_set():
            two.b.deregister(rows(two.there), "DRAM")
            two.b.register(rows(two.there), "DRAM")
            rounds += 1
            moved.clear()
            moved.wait(0.1 * (rounds % 3))  # sometimes not at all; else until something has gone there, on a busy machine too

    owner = threading.Thread(target=come_and_go)
    owner.start()
    ended = {"well": 0, "bad_key": 0}
    until = time.monotonic() + 20
    try:
        while min(ended.values()) < 3 or rounds < 5:
            assert time.monotonic() < until, (ended, rounds)
            if sum(ended.values()) % 3 == 0:
                two.a.add_remote(two.b.card())
                if not two.a.knows("b", Descriptors.of(rows(two.there), "DRAM")):
                    continue  # the card was made while it was away
            said = two.move("WRITE", two.there, NBYTES)
            assert not said or BAD_KEY in said, said
            ended["bad_key" if said else "well"] += 1
            moved.set()
            assert not two.move("READ", two.always)
    finally:
        over.set()
        owner.join()
