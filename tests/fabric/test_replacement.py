"""SPEC T14: work that never ends gives its memory back when its endpoint is closed, and a new one has taken over for the others."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from fabric import bodies as common
from fabric import replacement_bodies as bodies
from fabric.ranks import TCP, Group, ranks

HARD_MS = 1500
FAILED = {"TIMED_OUT", "ABORTED"}  # itself past the hard deadline, or behind one that was
SETTINGS = dataclasses.replace(TCP, timeout_ms=1000, hard_timeout_ms=HARD_MS, max_outstanding=64)


@contextmanager
def stopped(group: Group, rank: int) -> Iterator[None]:
    os.kill(group[rank].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(group[rank].pid, signal.SIGCONT)


def both(group: Group, body: object, *arguments: object) -> list[object]:
    """The body on ranks 0 and 1, each given the other as partner."""
    for rank in (0, 1):
        group[rank].ask(body, 1 - rank, *arguments)  # type: ignore[arg-type]
    return [group[rank].answer() for rank in (0, 1)]


def test_a_stopped_peer_is_removed_while_the_others_go_on() -> None:
    """Twice, so that the endpoint's two places are both used; both survivors replace theirs at the same time."""
    with ranks(4, SETTINGS) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        last = 5
        for number, victim in enumerate((2, 3), start=1):
            group[0].call(bodies.connect, victim)
            with stopped(group, victim):
                group[0].call(bodies.post_stuck, victim, 8)
                both(group, bodies.exchange_rounds, last, last + 5)
                group[0].call(bodies.await_quarantine, 8)
                if victim == 2:
                    group[3].ask(bodies.remove, victim)  # by every survivor: who does not would heed what it says when it wakes up
                removals = both(group, bodies.remove_while_exchanging, victim, last + 5, last + 105)
                last += 105
                if victim == 2:
                    group[3].answer()
                assert set(removals[0][1]) <= FAILED  # type: ignore[index]
                assert max(removal[0] for removal in removals) < 5.0, f"seconds of each removal: {removals}"  # type: ignore[index]
                counts = group[0].call(bodies.counts)
                assert counts["endpoints_replaced"] == number
                assert counts["replacements_failed"] == counts["misuses"] == counts["slots_quarantined"] == 0
            if victim == 2:
                group[2].ask(bodies.write_after_waking, 0)
            both(group, bodies.exchange_rounds, last, last + 50)
            last += 50
            if victim == 2:
                assert group[2].answer() != "ok"
        assert [group[rank].call(bodies.fault_of) for rank in (0, 1)] == [None, None]


def test_too_much_quarantined_work_replaces_the_endpoint_by_itself() -> None:
    """Nobody removes the stopped peer: it is held dead, since the endpoint that it knows is gone.

    Each peer has 7 lanes and the runtime's own; with 16 slots that is one each, so that the stopped one's are half of them.
    """
    lanes = 7
    settings = dataclasses.replace(SETTINGS, max_outstanding=16)
    with ranks(3, settings, lanes=lanes, heartbeat_ms=200, silence_ms=1000) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        group[0].call(bodies.connect, 2)
        with stopped(group, 2):
            group[0].call(bodies.post_stuck, 2, lanes, lanes)
            both(group, bodies.exchange_rounds, 5, 10)
            assert set(group[0].call(bodies.await_replacement)) <= FAILED
            assert group[0].call(bodies.counts)["endpoints_replaced"] == 1
            both(group, bodies.exchange_rounds, 10, 60)
            assert group[0].call(common.await_fault, 5000)[0] == 2
            group[0].call(bodies.remove, 2)
            group[0].call(bodies.close_stuck)
        both(group, bodies.exchange_rounds, 60, 110)
