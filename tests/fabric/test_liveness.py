"""Death is seen within 10 s, named by its root cause, and told from leaving."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from expertwire.errors import PeerError
from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, SHM, TCP, ranks
from harness import stop

SEEN_S_MAX = 20.0  # 10 s (SPEC T19), on a machine that is busy with other tests
BOTH = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
EVERY = pytest.mark.parametrize("settings", [LOCAL, TCP, SHM], ids=["local", "tcp", "shm"])


@BOTH
@pytest.mark.parametrize("liveness", ["auto", "heartbeat"])
@pytest.mark.parametrize("share", [False, True], ids=["fabric", "mapped"])
def test_a_killed_peer_is_named_by_every_other(settings: Settings, liveness: str, share: bool) -> None:
    with ranks(4, dataclasses.replace(settings, liveness=liveness), share=share) as group:
        group.all(bodies.barrier_in_order, 1)
        os.kill(group[2].pid, signal.SIGKILL)
        start = time.monotonic()
        living = [group[0], group[1], group[3]]
        for member in living:
            member.ask(bodies.await_fault, int(SEEN_S_MAX * 1000))
        faults = [member.answer() for member in living]
        assert time.monotonic() - start <= SEEN_S_MAX
        assert [fault and fault[0] for fault in faults] == [2, 2, 2], f"faults: {faults}"


@EVERY
def test_a_barrier_with_a_dead_peer_raises_in_time(settings: Settings) -> None:
    with ranks(3, settings) as group:
        group.all(bodies.barrier_in_order, 1)
        for member in (group[0], group[1]):
            member.ask(bodies.barrier_in_order, 1)
        os.kill(group[2].pid, signal.SIGKILL)
        start = time.monotonic()
        for member in (group[0], group[1]):
            with pytest.raises(PeerError, match="rank 2 is dead") as caught:
                member.answer()
            assert caught.value.rank == 2
        assert time.monotonic() - start <= SEEN_S_MAX


def test_the_root_cause_is_named_and_not_its_messenger() -> None:
    """Rank 1 sees rank 2 dead, says so and leaves by dying; rank 0 is told about rank 2."""
    settings = dataclasses.replace(TCP, liveness="heartbeat")
    with ranks(3, settings, heartbeat_ms=200, silence_ms=1000) as group:
        group.all(bodies.barrier_in_order, 1)
        group[1].call(bodies.publish_verdict, 2)
        fault = group[0].call(bodies.await_fault, 5000)
        assert fault is not None
        assert fault[:2] == (2, 1)
        os.kill(group[1].pid, signal.SIGKILL)
        assert group[0].call(bodies.await_fault, 1)[0] == 2


def test_who_breaks_off_after_another_fell_silent_is_not_named() -> None:
    """Rank 3 stops: only its silence tells. Rank 1 then breaks off without a word, which is seen at once."""
    settings = dataclasses.replace(TCP, liveness="heartbeat")
    with ranks(4, settings, heartbeat_ms=200, silence_ms=2500) as group:
        group.all(bodies.barrier_in_order, 1)
        stop(group[3].pid)
        try:
            for member in (group[0], group[2]):
                member.call(bodies.await_silence, 3, 800)
            os.kill(group[1].pid, signal.SIGKILL)
            for member in (group[0], group[2]):
                member.ask(bodies.await_fault, 9000)
            faults = [member.answer() for member in (group[0], group[2])]
        finally:
            os.kill(group[3].pid, signal.SIGCONT)
        assert [fault and fault[0] for fault in faults] == [3, 3], f"faults: {faults}"


@BOTH
@pytest.mark.parametrize("liveness", ["auto", "heartbeat"])
def test_leaving_is_no_death(settings: Settings, liveness: str) -> None:
    with ranks(3, dataclasses.replace(settings, liveness=liveness), heartbeat_ms=100, silence_ms=1500) as group:
        group.all(bodies.barrier_in_order, 1)
        group[2].call(bodies.close_twice)
        group[2].connection.send(None)
        group[2].process.join(10)
        assert group[0].call(bodies.await_fault, 2500) is None
        for member in (group[0], group[1]):
            member.ask(bodies.barrier_briefly, 5000)
        assert [member.answer() for member in (group[0], group[1])] == [None, None]


def test_a_stopped_peer_across_hosts_is_dead_after_silence() -> None:
    settings = dataclasses.replace(TCP, liveness="heartbeat")
    with ranks(2, settings, heartbeat_ms=100, silence_ms=1500) as pair:
        pair.all(bodies.barrier_in_order, 1)
        stop(pair[1].pid)
        try:
            fault = pair[0].call(bodies.await_fault, 8000)
        finally:
            os.kill(pair[1].pid, signal.SIGCONT)
        assert fault is not None
        assert fault[0] == 1
        assert "no heartbeat for" in fault[2]
