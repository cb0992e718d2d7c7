"""The words of a replacement (SPEC T14) with two providers in one process, so that a test says who polls when."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fabric.provider_peer import DATA, DEADLINE_S, WORDS, Side
from fabric.provider_setups import SETUPS, Setup

FIRST, SECOND = 0, 1  # the endpoint's two places
WIRE = pytest.mark.parametrize("setup", [SETUPS["tcp-system-message"], SETUPS["tcp-wheel-message"]], ids=["system", "wheel"])


@contextmanager
def known_to_each_other(setup: Setup, **options: object) -> Iterator[tuple[Side, Side]]:
    """Two sides, each the other's peer 0, whose greetings were answered."""
    setup.require()
    ours, theirs = (Side(setup.kind, {**setup.options, **options}) for _ in range(2))
    try:
        ours.connect(theirs.blob())
        theirs.connect(ours.blob())
        for side in (ours, theirs):
            signal(side, FIRST, ours, theirs)
        yield ours, theirs
    finally:
        ours.probe.close()
        theirs.probe.close()


def until(done: Callable[[], bool], *sides: Side) -> None:
    """Only these sides poll."""
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end, "it has not come to that"
        for side in sides:
            side.probe.poll()


def signal(source: Side, endpoint: int, *sides: Side) -> None:
    """A signal from there, over that endpoint, which is answered."""
    end = time.monotonic() + DEADLINE_S
    while (outcome := source.probe.post("signal", 0, 0, remote=WORDS, operand=1, endpoint=endpoint))[0] == "again":
        assert time.monotonic() < end, "AGAIN for too long"
        for side in sides:
            side.probe.poll()
    assert outcome[0] == "posted"
    ended: list[tuple[int, int, str, int]] = []
    while not ended:
        assert time.monotonic() < end, "a signal was not answered"
        for side in sides:
            found = side.probe.poll()[0]
            ended += found if side is source else []
    assert [entry[2] for entry in ended] == ["ok"]


@WIRE
def test_a_peer_that_moves_twice_before_we_know_that_our_answers_have_left_is_followed(setup: Setup) -> None:
    """We do not poll between the two: the second one's only word came while we took the first to be under way."""
    with known_to_each_other(setup) as (ours, theirs):
        assert theirs.probe.open_replacement(FIRST) == SECOND
        signal(theirs, SECOND, ours, theirs)  # its connection is there when the second word goes that way
        theirs.probe.announce_replacement(0)
        until(lambda: theirs.probe.unmoved_peers() == [(0, True)], theirs)
        end = time.monotonic() + DEADLINE_S
        while theirs.probe.unmoved_peers():  # we take single steps: none after the one in which our answers leave
            assert time.monotonic() < end, "the first move is not answered"
            ours.probe.poll()
            pause = time.monotonic() + 0.05
            while theirs.probe.unmoved_peers() and time.monotonic() < pause:
                theirs.probe.poll()
        assert theirs.probe.close_endpoints(FIRST)
        assert theirs.probe.open_replacement(SECOND) == FIRST
        theirs.probe.announce_replacement(0)
        until(lambda: theirs.probe.unmoved_peers() == [(0, True)], theirs)
        until(lambda: not theirs.probe.unmoved_peers(), ours, theirs)
        assert theirs.probe.close_endpoints(SECOND)
        signal(ours, FIRST, ours, theirs)
        signal(theirs, FIRST, ours, theirs)
        assert (ours.word(0), theirs.word(0)) == (3, 2)


@WIRE
def test_a_peer_whose_move_is_not_waited_for_any_more_is_still_written_to(setup: Setup) -> None:
    """Its move was then ended twice, the second time to no address at all: what was sent next divided by their number."""
    with known_to_each_other(setup) as (ours, theirs):
        assert theirs.probe.open_replacement(FIRST) == SECOND
        theirs.probe.announce_replacement(0)
        until(lambda: theirs.probe.unmoved_peers() == [(0, True)], theirs)
        until(lambda: ours.probe.unmoved_peers() != [], ours)  # it answers
        ours.probe.forgo_peer(0)
        until(lambda: not theirs.probe.unmoved_peers(), ours, theirs)
        assert theirs.probe.close_endpoints(FIRST)
        signal(ours, FIRST, ours, theirs)
        signal(theirs, SECOND, ours, theirs)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Whoever opens one is refused (EMFILE)."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@WIRE
@pytest.mark.parametrize("what", ["signal", "write"])
def test_an_answer_that_finds_no_descriptor_for_its_connection_leaves_later(setup: Setup, what: str) -> None:
    """It goes over the endpoint that has just been opened in place of that which was written to. It was forgotten, and so the peer
    waited for it until it held us dead."""
    counted = {"ordering": "counted", "trust_immediates": True, "delivery_complete": "0"} if what == "write" else {}
    with known_to_each_other(setup, **counted) as (ours, theirs):
        if what == "write":  # until we have told it its number
            end = time.monotonic() + DEADLINE_S
            while theirs.probe.post("write", 5, 0, local=DATA, remote=DATA, bytes=64, generation=2)[0] == "again":
                assert time.monotonic() < end, "its writes are not counted"
                ours.probe.poll()
                theirs.probe.poll()
        else:
            assert theirs.probe.post("signal", 5, 0, remote=WORDS, operand=4, generation=2)[0] == "posted"
            ours.word(0)
        for _ in range(3):  # it leaves, and is not answered
            theirs.probe.poll()
        assert ours.probe.open_replacement(FIRST) == SECOND
        ended: list[tuple[int, int, str, int]] = []
        with no_more_descriptors():
            for _ in range(100):
                ours.probe.poll()
                ended += theirs.probe.poll()[0]
            assert ended == [], "nothing was short: the test shows nothing"

        def arrived() -> bool:
            ended.extend(theirs.probe.poll()[0])
            return ended != []

        until(arrived, ours)
        assert ended == [(5, 2, "ok", 0)]
