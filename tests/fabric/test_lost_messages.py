"""A message is lost with its connection, between two that live: nobody hears of it, so what is to be answered is said again at each beat.

Both providers are in this process. The bytes that stand in its sockets are read away, and the connections are shut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

import pytest

from fabric.provider_peer import DATA, DEADLINE_S, Side
from fabric.provider_setups import SETUPS, Setup
from fabric.test_replacement_words import FIRST, SECOND, known_to_each_other, signal, until

WIRE = pytest.mark.parametrize(
    "setup", [SETUPS[name] for name in ("tcp-system-atomic", "tcp-wheel-atomic", "tcp-wheel-message")], ids=["system", "wheel", "emulated"]
)
BEAT_S = 0.01


def connections() -> list[socket.socket]:
    """Every TCP connection of this process, as a second descriptor of each."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(one)
            else:
                one.close()
    return found


def break_connections() -> int:
    """How many bytes were lost with them."""
    lost = 0
    for one in connections():
        with one, contextlib.suppress(OSError):
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while read := one.recv(1 << 20):
                    lost += len(read)
            one.shutdown(socket.SHUT_RDWR)
    return lost


def beating(done: Callable[[], bool], *sides: Side) -> None:
    """These sides poll, and at each beat say again what was not answered."""
    end, beat = time.monotonic() + DEADLINE_S, 0.0
    while not done():
        assert time.monotonic() < end, "it was not said again"
        if time.monotonic() >= beat:
            beat = time.monotonic() + BEAT_S
            for side in sides:
                side.probe.greet_peers()
        for side in sides:
            side.probe.poll()


@WIRE
@pytest.mark.parametrize("lost", ["revocation", "its answer"])
def test_a_region_is_closed_though_a_message_about_it_was_lost(setup: Setup, lost: str) -> None:
    with known_to_each_other(setup) as (ours, theirs):
        assert not ours.probe.deregister_region(DATA)
        for side in (ours,) if lost == "revocation" else (ours, theirs):
            for _ in range(50):
                side.probe.poll()
        assert break_connections() > 0, "nothing was on its way: the test shows nothing"
        assert not ours.probe.deregister_region(DATA)
        beating(lambda: ours.probe.deregister_region(DATA), ours, theirs)


@WIRE
@pytest.mark.parametrize("lost", ["words", "answers"])
def test_a_replacement_ends_though_its_last_words_were_lost(setup: Setup, lost: str) -> None:
    with known_to_each_other(setup) as (ours, theirs):
        assert theirs.probe.open_replacement(FIRST) == SECOND
        theirs.probe.announce_replacement(0)
        until(lambda: theirs.probe.unmoved_peers() == [(0, True)], theirs)
        for _ in range(0 if lost == "words" else 50):
            ours.probe.poll()
        assert break_connections() > 0, "nothing was on its way: the test shows nothing"
        beating(lambda: not theirs.probe.unmoved_peers(), ours, theirs)
        assert theirs.probe.close_endpoints(FIRST)
        signal(theirs, SECOND, ours, theirs)
        signal(ours, FIRST, ours, theirs)


@WIRE
def test_who_is_busy_goes_over_all_the_same(setup: Setup) -> None:
    """It never rests, and was not told by last words: the greeting that comes in their place ends what is on its way first."""
    with known_to_each_other(setup) as (ours, theirs):
        assert theirs.probe.open_replacement(FIRST) == SECOND
        theirs.probe.announce_replacement(0)
        until(lambda: theirs.probe.unmoved_peers() == [(0, True)], theirs)
        assert break_connections() > 0
        free = list(range(8))

        def moved() -> bool:
            for slot in free[:]:
                if ours.probe.post("write", slot, 0, local=DATA, remote=DATA, bytes=1 << 16, generation=7)[0] == "posted":
                    free.remove(slot)
            free.extend(entry[0] for entry in ours.probe.poll()[0])
            return not theirs.probe.unmoved_peers()

        beating(moved, theirs, ours)
