"""SPEC T14: work that never ends gives its memory back when its endpoint is closed, and a new one has taken over for the others."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabric import bodies as common
from fabric import replacement_bodies as bodies
from fabric.provider_setups import on_library
from fabric.ranks import TCP, Group, ranks
from harness import stop

HARD_MS = 1500
FAILED = {"TIMED_OUT", "ABORTED"}  # itself past the hard deadline, or behind one that was
SETTINGS = dataclasses.replace(TCP, timeout_ms=1000, hard_timeout_ms=HARD_MS, max_outstanding=64)
PATIENT = dataclasses.replace(SETTINGS, timeout_ms=20_000, hard_timeout_ms=30_000)  # where no deadline is what is tested
LIBRARIES = pytest.mark.parametrize("library", ["chosen", "system"])


@contextmanager
def stopped(group: Group, rank: int) -> Iterator[None]:
    """From here on: the kernel stops each thread when it next looks, and one that runs answers what is written to it until then."""
    stop(group[rank].pid)
    deadline = time.monotonic() + 10
    while not all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in Path(f"/proc/{group[rank].pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"rank {rank} has not stopped"
        time.sleep(0.001)
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
                assert max(removal[0] for removal in removals) < 20.0, f"seconds of each removal: {removals}"  # type: ignore[index]
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


def test_one_that_was_removed_and_wakes_writes_nothing_that_anybody_reads() -> None:
    """It was stopped while it wrote to rank 0, which had nothing on its way to it; only rank 0 has removed it.

    So its endpoint at rank 0 is gone when it wakes up; what it says of rank 0 to rank 1, who still listens to it, counts for nothing.
    """
    with ranks(3, SETTINGS, heartbeat_ms=200, silence_ms=60_000) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        group[2].ask(bodies.write_until_refused, 0)
        group[0].call(bodies.wait_for_count, 5 * bodies.PARTS + 20)
        with stopped(group, 2):
            group[0].call(bodies.await_silence, 2, 1200)
            group[0].call(bodies.remove, 2)
            assert group[0].call(bodies.counts)["endpoints_replaced"] == 1
            reached = group[0].call(bodies.clear_inbox)
        assert group[2].answer() in ("PeerError", "TransferError")  # the connection broke, or its write's hard deadline had passed
        assert group[0].call(bodies.inbox) == (0, reached)
        assert [group[rank].call(bodies.watch_for_faults, 1.0) for rank in (0, 1)] == [None, None]


@LIBRARIES
def test_a_rank_that_died_comes_back_under_its_name(library: str) -> None:
    """Twice: a new process, a new incarnation, with blobs that were made after the survivors' endpoints were replaced."""
    with ranks(3, on_library(PATIENT, library)) as group:
        group.all(bodies.barrier_with_all)
        both(group, bodies.exchange_rounds, 0, 5)
        last = 5
        for number in (1, 2):
            group[2].call(bodies.connect, 0)
            os.kill(group[2].pid, signal.SIGKILL)
            for rank in (0, 1):
                assert group[rank].call(common.await_fault, 10_000)[0] == 2
            for rank in (0, 1):
                group[rank].ask(bodies.remove, 2)
            for rank in (0, 1):
                group[rank].answer()
                assert group[rank].call(bodies.counts)["endpoints_replaced"] == number
            group.restart(2)
            for rank in (0, 1):
                group[2].call(bodies.connect, rank)
                group[rank].call(bodies.connect, 2)
            both(group, bodies.exchange_rounds, last, last + 20)
            last += 20
            group.all(bodies.barrier_with_all)
            assert group.all(bodies.fault_of) == [None] * 3


@LIBRARIES
def test_a_barrier_is_told_once_the_peer_can_be_reached_again(library: str) -> None:
    """Its word could not be sent when it began, and nobody calls here any more: the other must not wait for it in vain."""
    with ranks(2, on_library(SETTINGS, library), heartbeat_ms=100, silence_ms=60_000) as group:
        group[0].call(bodies.connect, 1)
        with stopped(group, 1):
            group[0].call(bodies.begin_barrier_in_vain)
        group[1].call(bodies.barrier_with_all)
        both(group, bodies.exchange_rounds, 0, 5)
        group.all(bodies.barrier_with_all)


def test_a_verdict_that_was_dropped_before_its_post_is_told_again() -> None:
    """It stood behind another word to a stopped peer, and fell with it. No beat comes by that would take it along."""
    settings = dataclasses.replace(SETTINGS, max_outstanding=4)
    with ranks(3, settings, lanes=3, heartbeat_ms=60_000, silence_ms=600_000) as group:
        group[0].call(bodies.connect, 1)
        with stopped(group, 1):
            group[0].call(bodies.publish_call_and_verdict, 2)
        fault = group[1].call(common.await_fault, 10_000)
        assert fault is not None
        assert fault[:2] == (2, 0)


def test_who_left_is_not_called_dead() -> None:
    with ranks(2, TCP) as group:
        both(group, bodies.exchange_rounds, 0, 2)
        group[1].call(bodies.close_endpoint)
        assert "rank 1 has left" in group[0].call(bodies.submit_error, 1)
        group[0].call(bodies.remove, 1)
        assert group[0].call(bodies.counts)["endpoints_replaced"] == 0, "one that said farewell needs no fence"


def test_local_needs_no_replacement() -> None:
    """What is posted there has landed when post() returns: nothing of a stopped peer's is ever stuck."""
    local = dataclasses.replace(SETTINGS, provider="local")
    with ranks(2, local, heartbeat_ms=100) as group:
        both(group, bodies.exchange_rounds, 0, 2)
        with stopped(group, 1):
            group[0].call(bodies.post_stuck, 1, 8)
            group[0].call(bodies.await_silence, 1, 700)
            group[0].call(bodies.remove, 1)
            counts = group[0].call(bodies.counts)
            assert counts["endpoints_replaced"] == counts["replacements_failed"] == 0


def test_a_blob_from_before_a_replacement_still_leads_to_us() -> None:
    """Who is added after a replacement is told where we are, until it has answered."""
    with ranks(3, PATIENT, heartbeat_ms=200) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        os.kill(group[2].pid, signal.SIGKILL)
        for rank in (0, 1):
            assert group[rank].call(common.await_fault, 10_000)[0] == 2
            group[rank].ask(bodies.remove, 2)
        for rank in (0, 1):
            group[rank].answer()
        group.restart(2, stale=True)
        for rank in (0, 1):
            group[2].call(bodies.connect, rank)
            group[rank].call(bodies.connect, 2)
        both(group, bodies.exchange_rounds, 5, 25)
        assert group.all(bodies.fault_of) == [None] * 3


@pytest.mark.parametrize("ordering", ["auto", "counted"])
def test_who_writes_by_a_blob_from_before_a_replacement_goes_on_after_it(ordering: str) -> None:
    """It comes back while the others still have the endpoint that it knows, and writes; they remove who was there before, and add it."""
    settings = dataclasses.replace(PATIENT, ordering=ordering, trust_immediates=True)
    with ranks(3, settings, heartbeat_ms=200) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        os.kill(group[2].pid, signal.SIGKILL)
        for rank in (0, 1):
            assert group[rank].call(common.await_fault, 10_000)[0] == 2

        def early() -> None:
            group[2].call(bodies.begin_stream, (0, 1))
            for rank in (0, 1):
                group[rank].ask(bodies.remove, 2)
            for rank in (0, 1):
                group[rank].answer()
                assert group[rank].call(bodies.counts)["endpoints_replaced"] == 1

        group.restart(2, stale=True, early=early)
        both(group, bodies.exchange_rounds, 5, 25)
        written, statuses = group[2].call(bodies.end_stream)
        assert statuses == {"OK"}
        assert [group[rank].call(bodies.count_of, bodies.STREAM) for rank in (0, 1)] == written
        group.all(bodies.barrier_with_all)
        assert group.all(bodies.fault_of) == [None] * 3


def test_a_pause_of_our_own_is_not_held_against_who_is_told_of_a_replacement() -> None:
    """Rank 1 answers while rank 0, which asked it, is stopped for longer than the hard deadline that rank 1 has for it."""
    with ranks(3, SETTINGS, heartbeat_ms=200, silence_ms=60_000) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        group[0].call(bodies.connect, 2)
        with stopped(group, 2):
            group[0].call(bodies.await_silence, 2, 1200)
            with stopped(group, 1):
                before = group[0].call(bodies.descriptors)
                group[0].ask(bodies.remove, 2)
                deadline = time.monotonic() + 10
                while len(os.listdir(f"/proc/{group[0].pid}/fd")) < before + 3:
                    assert time.monotonic() < deadline, "rank 0 opens no endpoint"
                    time.sleep(0.001)
                time.sleep(0.2)  # for it to tell rank 1; the test proves nothing where that takes longer
                stop(group[0].pid)
            time.sleep(HARD_MS / 1000 + 0.3)
            os.kill(group[0].pid, signal.SIGCONT)
            group[0].answer()
            assert group[0].call(bodies.counts)["endpoints_replaced"] >= 1
            both(group, bodies.exchange_rounds, 5, 25)
            assert [group[rank].call(bodies.watch_for_faults, 1.0) for rank in (0, 1)] == [None, None]


@LIBRARIES
def test_several_endpoints_are_replaced_at_once(library: str) -> None:
    """By both survivors at the same time, with traffic over all of them and, at the end, a revocation that each must answer."""
    settings = dataclasses.replace(on_library(SETTINGS, library), timeout_ms=3000, hard_timeout_ms=3000)
    with ranks(3, settings, lanes=4, endpoints=2, bulk_window=8, bulk_hold_us=0) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        for rank in (0, 1):
            group[rank].call(bodies.connect, 2)
        with stopped(group, 2):
            for rank in (0, 1):
                group[rank].call(bodies.post_stuck, 2, 4, 4)
            for rank in (0, 1):
                group[rank].call(bodies.await_quarantine, 4)
            for rank, (_, statuses) in enumerate(both(group, bodies.remove_while_exchanging, 2, 5, 65)):  # type: ignore[misc]
                assert set(statuses) <= FAILED, f"rank {rank}: {statuses}"
            for rank in (0, 1):
                counts = group[rank].call(bodies.counts)
                assert counts["endpoints_replaced"] == 1
                assert counts["replacements_failed"] == counts["misuses"] == counts["slots_quarantined"] == 0
        both(group, bodies.exchange_rounds, 65, 85)
        assert [group[rank].call(bodies.fault_of) for rank in (0, 1)] == [None, None]
