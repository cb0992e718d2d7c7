"""Who is held dead, and is not removed: what is still to be said to it is kept, and keeps nobody awake."""

from __future__ import annotations

import os
import signal
import time

import pytest

from expertwire.errors import StateError
from expertwire.fabric import Endpoint
from fabric import bodies
from fabric.provider_peer import DATA, DEADLINE_S, Pair, pair
from fabric.provider_setups import SETUPS, Setup
from fabric.ranks import TCP, ranks

FABRIC = pytest.mark.parametrize(
    "setup", [SETUPS[name] for name in ("tcp-system-atomic", "tcp-wheel-message", "shm-wheel")], ids=["system", "wheel", "shm"]
)
SLEEPS = 4
TURNS_A_SLEEP = 16  # one that looks without end is let sleep after 64 turns (progress_thread.cpp)


def come_to_rest(both: Pair) -> None:
    """Polls until whoever polls may sleep, and nothing wakes it."""
    end = time.monotonic() + DEADLINE_S
    while both.probe.sleep(0):
        assert time.monotonic() < end, "it is kept awake"
        both.probe.poll()


@FABRIC
def test_what_is_to_be_said_to_one_that_was_killed_keeps_nobody_awake(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        both.kill()
        assert not both.probe.deregister_region(DATA), "it was told to nobody"
        both.probe.expect_nothing_of(0)
        come_to_rest(both)
        both.probe.greet_peers()
        come_to_rest(both)
        both.probe.remove_peer(0)
        come_to_rest(both)
        assert both.probe.deregister_region(DATA)


@FABRIC
def test_what_was_to_be_said_to_one_that_wakes_is_said(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        both.stop()
        assert not both.probe.deregister_region(DATA)
        both.probe.expect_nothing_of(0)
        come_to_rest(both)
        both.send_signal(signal.SIGCONT)
        end = time.monotonic() + DEADLINE_S
        while not both.probe.deregister_region(DATA):
            assert time.monotonic() < end, "it was not told again"
            both.probe.greet_peers()
            both.probe.poll()


def revoke(endpoint: Endpoint) -> str:
    """Why the region cannot be closed."""
    region = endpoint.register(bytearray(4096))
    try:
        region.close(50)
    except StateError as error:
        return str(error)
    return ""


def rests(endpoint: Endpoint) -> bool:
    """Whether its progress thread sleeps more than it looks."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        before = after = endpoint.statistics()
        while after.thread_sleeps < before.thread_sleeps + SLEEPS and time.monotonic() < end:
            time.sleep(0.02)
            after = endpoint.statistics()
        if after.turns - before.turns <= TURNS_A_SLEEP * (after.thread_sleeps - before.thread_sleeps):
            return True
    return False


def test_a_rank_beside_one_that_was_killed_rests() -> None:
    """Measured before: 44 % of a core for as long as the dead one was not removed."""
    with ranks(2, TCP) as group:
        group.all(bodies.barrier_in_order, 1)
        os.kill(group[1].pid, signal.SIGKILL)
        assert "have not said that they are through with it" in group[0].call(revoke)
        assert group[0].call(rests)
