"""Back-pressure: four slots, six ranks, queues of the provider at their least. Nothing fails, order holds, nobody starves."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from expertwire.fabric.config import Settings
from fabric import bodies, torture_bodies
from fabric.ranks import LOCAL, SHM, TCP, ranks
from harness import stop

RANKS = 6
COUNT = 24  # writes to each peer on each lane
SLOTS = 4
# One operation at a time: beyond it libfabric says -FI_EAGAIN. The completion queue is opened for 2 × SLOTS operations, the messages that
# may arrive, and no more (csrc/provider/libfabric_provider.cpp).
TIGHT = {"FI_OFI_RXM_TX_SIZE": "1", "FI_OFI_RXM_MSG_TX_SIZE": "1", "FI_OFI_RXM_MSG_RX_SIZE": "8"}
FOUR = [dataclasses.replace(settings, max_outstanding=SLOTS) for settings in (LOCAL, TCP, SHM)]
EVERY = pytest.mark.parametrize("settings", FOUR, ids=["local", "tcp", "shm"])


def no_failure(counted: object) -> None:
    for name in ("requests_failed", "operations_failed", "misuses", "thread_failures", "completions_unknown", "quarantines"):
        assert getattr(counted, name) == 0, f"{name}: {counted}"
    assert getattr(counted, "slots_counted_peak") <= SLOTS  # noqa: B009


@EVERY
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_more_peers_than_slots_nothing_fails_order_holds_nobody_starves(settings: Settings, sync: bool) -> None:
    """A lane to each of five peers twice over and one of the runtime's: fifteen queue pairs share four slots."""
    with ranks(RANKS, dataclasses.replace(settings, sync_writes=sync), lanes=torture_bodies.LANES, environment=TIGHT) as group:
        for member in group.members:
            member.ask(torture_bodies.stream_to_all, [peer for peer in range(RANKS) if peer != member.rank], COUNT)
        tallies = [member.answer(90) for member in group.members]
        for tally in tallies:
            assert tally.wrong == []
            assert tally.statuses == {"OK"}
            assert tally.arrived == (RANKS - 1) * torture_bodies.LANES * COUNT
            slowest, fastest = min(tally.done_at_first.values()), max(tally.done_at_first.values())
            assert fastest == torture_bodies.LANES * COUNT
            assert slowest >= fastest // 4, f"when one peer had all its writes, another had {slowest}: {tally.done_at_first}"
        for counted in group.all(bodies.statistics):
            no_failure(counted)
            assert counted.slots_short
            assert counted.controls_held > 0


@pytest.mark.parametrize("path", ["atomic", "message"])
def test_the_providers_queue_says_again_and_nothing_is_lost(path: str) -> None:
    """512 slots over a queue of one: all back-pressure comes from the provider."""
    settings = dataclasses.replace(TCP, signal_path=path)
    with ranks(3, settings, lanes=torture_bodies.LANES, environment=TIGHT) as group:
        for member in group.members:
            member.ask(torture_bodies.stream_to_all, [peer for peer in range(3) if peer != member.rank], 60)
        for tally in [member.answer(90) for member in group.members]:
            assert tally.wrong == []
            assert tally.statuses == {"OK"}
        counted = group.all(bodies.statistics)
        assert sum(one.posts_again for one in counted) > 0
        assert all(one.requests_failed == one.misuses == one.thread_failures == 0 for one in counted)


@pytest.mark.parametrize("settings", FOUR[1:], ids=["tcp", "shm"])
def test_one_stopped_peer_leaves_slots_for_the_others(settings: Settings) -> None:
    """It can hold a slot of its lane and one of the runtime's; two are left for the rest. (On local nothing is ever held.)"""
    with ranks(4, settings) as group:  # not TIGHT: the one operation that libfabric takes then would be the stopped peer's
        group.all(bodies.barrier_in_order, 1)
        stop(group[3].pid)
        try:
            group[0].call(bodies.stuck_write, 3, 1 << 18, 100)
            for member in (group[0], group[1], group[2]):
                member.ask(torture_bodies.all_done, (member.rank + 1) % 3, 60, 4096)
            assert [member.answer() for member in (group[0], group[1], group[2])] == [{"OK"}] * 3
        finally:
            os.kill(group[3].pid, signal.SIGCONT)
        assert group[0].call(bodies.finish_stuck) == 64
        for counted in group.all(bodies.statistics):
            no_failure(counted)
