"""Faults between real processes: docs/faults.md has the table of which is tested where."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expertwire.fabric.config import Settings
from fabric import bodies, fault_bodies, torture_bodies
from fabric.provider_peer import claim_place
from fabric.ranks import LOCAL, SHM, TCP, Group, Rank, ranks
from harness import stop

SEEN_S = 20.0  # 10 s (SPEC T19), on a machine that is busy with other tests
WAIT_MS = 500
GRACE_S = 10.0  # for a busy machine to notice that a deadline has passed
EVERY = pytest.mark.parametrize("settings", [LOCAL, TCP, SHM], ids=["local", "tcp", "shm"])
NOT_SHM = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])


@EVERY
def test_who_comes_back_meets_the_others_at_their_barriers(settings: Settings) -> None:
    """Barriers are numbered: another endpoint under the same rank counts on from where the others are."""
    with ranks(3, settings) as group:
        group.all(bodies.barrier_in_order, 3)
        for returning in (1, 0, 1):
            blob = group[returning].call(fault_bodies.return_as_another)
            others = {member.rank: member for member in group.members if member.rank != returning}
            group[returning].ask(fault_bodies.meet, {rank: member.call(fault_bodies.blob) for rank, member in others.items()})
            for member in others.values():
                member.call(fault_bodies.replace_peer, returning, blob)
            group[returning].answer()
            for seen in group.all(fault_bodies.barriers_in_order, 2):
                assert seen == [2, 4]


@EVERY
def test_a_rank_killed_in_a_transfer_fails_its_writer_alone(settings: Settings) -> None:
    with ranks(3, settings) as group:
        group.all(bodies.barrier_in_order, 1)
        group[0].ask(fault_bodies.stream_until_it_dies, 2, 1, 20)
        assert group[2].call(bodies.wait_counter, 1, 3)
        os.kill(group[2].pid, signal.SIGKILL)
        kind, named, seconds, statuses = group[0].answer()
        assert (kind, named) == ("PeerError", 2)
        assert seconds < SEEN_S
        assert statuses == {"OK"}
        assert group[1].call(bodies.counter, 1) >= 20


@EVERY
def test_a_rank_stopped_in_a_transfer_holds_up_its_writes_alone(settings: Settings) -> None:
    with ranks(3, settings) as group:
        group.all(bodies.barrier_in_order, 1)
        stop(group[2].pid)
        try:
            ended, seconds, statuses = group[0].call(fault_bodies.write_to_a_stopped, 2, 1, 40, WAIT_MS)
        finally:
            os.kill(group[2].pid, signal.SIGCONT)
        assert ended == ("ok" if settings.provider == "local" else "DeadlineError")  # mapped memory takes writes whoever sleeps
        assert seconds < WAIT_MS / 1000 + GRACE_S
        assert statuses == {"OK"}
        assert group[1].call(bodies.wait_counter, 1, 40)
        assert group[0].call(bodies.finish_stuck) == 40
        assert group[2].call(bodies.wait_counter, 1, 40)


def test_a_place_that_a_dead_rank_left_unfilled_ends_with_the_removal_of_whose_it_is() -> None:
    """A rank killed between taking a place in another's queue and filling it: nothing gets past that place any more."""
    with ranks(3, dataclasses.replace(SHM, timeout_ms=500, hard_timeout_ms=1000)) as group:
        group.all(bodies.barrier_in_order, 1)
        if not claim_place(group[1].pid):
            pytest.skip("another layout of libfabric's shm")
        errors, statuses = group[0].call(fault_bodies.write_past_the_place, 1, 3)
        assert [name for name, _ in errors] == ["DeadlineError"] * 3
        assert all("with rank 1 over shm has not ended after 500 ms" in text for _, text in errors)
        assert set(statuses) <= {"TIMED_OUT", "ABORTED"}  # by the removal
        for there, here in ((0, 2), (2, 0)):
            assert group[there].call(torture_bodies.all_done, here, 10, 4096) == {"OK"}


def test_one_that_was_stopped_and_wakes_finds_the_region_closed() -> None:
    """On local, where its mapping outlives its removal."""
    with ranks(3, LOCAL) as group:
        group.all(bodies.barrier_in_order, 1)
        group[2].ask(fault_bodies.write_on, 1, 0xEE)
        assert group[1].call(bodies.wait_counter, 9, 3)
        stop(group[2].pid)
        try:
            group[1].call(fault_bodies.fence_off, 2, 0x5A)
        finally:
            os.kill(group[2].pid, signal.SIGCONT)
        counted = group[1].call(bodies.counter, 9)
        group[1].call(fault_bodies.close_fenced)
        done, why = group[2].answer()
        assert done >= 3
        assert "bad_key" in why
        assert group[1].call(bodies.counter, 9) <= counted + 1, "one that had been begun"
        assert group[1].call(fault_bodies.fresh_is, 0x5A)
        group[0].call(fault_bodies.write_fresh, 1, group[1].call(fault_bodies.blob), 0x11)
        assert group[1].call(fault_bodies.fresh_is, 0x11)


def test_memory_of_the_callers_own_is_attached_to_until_it_is_closed() -> None:
    """On one host it needs no memfd. A key of before the close reaches nothing, and that is said of it alone."""
    with ranks(2, LOCAL) as group:
        name, blob = group[1].call(fault_bodies.blob_with_memory_of_its_own)
        group[0].call(fault_bodies.add_and_write, 1, blob, name, 0x5A)
        assert group[1].call(fault_bodies.own_is) == {0x5A}
        assert group[0].call(fault_bodies.read_back, 1, name) == {0x5A}
        group[1].call(fault_bodies.close_own)
        assert "bad_key" in group[0].call(fault_bodies.write_own, 1, name)
        assert group[1].call(fault_bodies.own_is) == {0x5A}
        group[0].call(fault_bodies.write_whole, 1)


@pytest.mark.parametrize("fenced", [True, False])
def test_what_one_says_that_was_removed_and_wakes_does_not_end_who_has_its_name_now(fenced: bool) -> None:
    """On local its mappings outlive its removal, so that its words land where those of the newcomer do: that it leaves, and whom it blames.

    Not fenced: it was removed before it could have been missed.
    """
    with ranks(3, LOCAL, share=True, heartbeat_ms=100 if fenced else 1000) as group:
        group.all(bodies.barrier_in_order, 1)
        stop(group[2].pid)
        pid = group[2].pid
        try:
            for rank in (0, 1):
                if fenced:
                    group[rank].call(bodies.await_silence, 2, 700)
                group[rank].call(fault_bodies.remove, 2)
            old = group.restart(2, spare=True)
            group.all(bodies.barrier_briefly, 10_000)
        finally:
            os.kill(pid, signal.SIGCONT)
        old.call(fault_bodies.accuse_and_leave, 1)
        for rank in (0, 1):
            assert group[rank].call(fault_bodies.hears_of, 2, 1.0) == (None, False, "ok"), f"rank {rank}"
        group.all(bodies.barrier_briefly, 10_000)
        group[2].call(bodies.close_twice)
        for rank in (0, 1):
            group[rank].call(fault_bodies.await_farewell, 2)
            assert group[rank].call(bodies.await_fault, 300) is None


@contextmanager
def replaced_while_stopped(settings: Settings, share: bool, fenced: bool, mapped: bool, silence_ms: int) -> Iterator[tuple[Group, Rank]]:
    """Rank 2 is stopped and removed, another process has its name, and the old one wakes up. Not fenced: before it could be missed."""
    settings = dataclasses.replace(settings, liveness="heartbeat")
    with ranks(3, settings, share=share, heartbeat_ms=100, silence_ms=silence_ms) as group:
        group.all(bodies.barrier_in_order, 1)
        pid = group[2].pid
        stop(pid)
        try:
            for rank in (0, 1):
                if fenced:
                    group[rank].call(bodies.await_silence, 2, 700)
                group[rank].ask(fault_bodies.remove, 2)
            for rank in (0, 1):
                group[rank].answer()
            old = group.restart(2, spare=True, mapped=mapped)
            group.all(bodies.barrier_briefly, 10_000)
        finally:
            os.kill(pid, signal.SIGCONT)
        yield group, old


@pytest.mark.parametrize(
    ("settings", "share", "fenced", "mapped"),
    [(LOCAL, True, True, True), (LOCAL, True, False, False), (LOCAL, False, False, False), (TCP, True, True, False)],
    ids=["local", "local not missed", "local over the fabric", "tcp"],
)
def test_who_wakes_and_has_been_replaced_tells_nobody_anything(settings: Settings, share: bool, fenced: bool, mapped: bool) -> None:
    """Its beats hide no silence of the newcomer's, its barriers pass for none of them, and it is told."""
    with replaced_while_stopped(settings, share, fenced, mapped, 60_000) as (group, old):
        if share:
            assert old.call(bodies.await_fault, 20_000)[0] == 2, "it learns who it is no longer"
        ended = old.call(fault_bodies.try_barriers, 2, 200)
        assert "ok" not in ended
        for rank in (0, 1):
            group[rank].ask(bodies.barrier_briefly, 10_000)
        assert not any(group[rank].connection.poll(0.3) for rank in (0, 1)), "a barrier was passed without rank 2"
        group[2].call(bodies.barrier_briefly, 10_000)
        for rank in (0, 1):
            group[rank].answer()
        stop(group[2].pid)
        try:
            for rank in (0, 1):  # it beats every 100 ms; nobody is held dead here, however busy the machine
                group[rank].call(bodies.await_silence, 2, 1000)
        finally:
            os.kill(group[2].pid, signal.SIGCONT)


def test_who_wakes_and_has_been_replaced_does_not_unsay_whom_the_other_has_removed() -> None:
    """The newcomer removes rank 1, which was stopped and wakes up to hold it dead: rank 0 does not heed that."""
    with replaced_while_stopped(LOCAL, True, True, False, 60_000) as (group, old):
        stop(group[1].pid)
        try:
            group[2].call(bodies.await_silence, 1, 700)
            group[2].call(fault_bodies.remove, 1)
            beats = group[0].call(fault_bodies.beats, 1)
            stop(group[2].pid)
        finally:
            os.kill(group[1].pid, signal.SIGCONT)
        try:
            group[0].call(fault_bodies.await_beats, 1, beats + 5)  # the old one's, too
            group[1].call(bodies.publish_verdict, 2)
            assert group[0].call(bodies.await_fault, 500) is None
        finally:
            os.kill(group[2].pid, signal.SIGCONT)
        assert old.call(bodies.await_fault, 10_000)[0] == 2


@NOT_SHM
def test_who_is_removed_and_added_again_goes_on_where_it_was(settings: Settings) -> None:
    """The same process, whose memory was mapped before and is not now: neither side's words are counted twice."""
    with ranks(2, settings, share=True, heartbeat_ms=100) as group:
        group.all(bodies.barrier_in_order, 3)
        group[0].call(bodies.remove_and_add, 1)
        for _ in range(2):
            group.all(bodies.barrier_briefly, 10_000)
        for early, late in ((1, 0), (0, 1)):
            group[early].ask(bodies.barrier_briefly, 10_000)
            assert not group[early].connection.poll(0.2), f"rank {early} passed a barrier without rank {late}"
            group[late].call(bodies.barrier_briefly, 10_000)
            group[early].answer()
        group[1].call(bodies.close_twice)
        group[0].call(fault_bodies.await_farewell, 1)
        assert group[0].call(bodies.await_fault, 300) is None
