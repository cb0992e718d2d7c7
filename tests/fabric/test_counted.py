"""Class C through the whole stack: the target counts immediates (docs/counted_immediates.md). The bodies are those of class B's tests."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from expertwire.fabric.config import Settings
from fabric import bodies as common
from fabric import fault_bodies, torture_bodies
from fabric import replacement_bodies as bodies
from fabric.ranks import TCP, ranks
from fabric.test_replacement import FAILED, both, stopped
from fabric.test_replacement import SETTINGS as IMPATIENT
from fabric.test_torture import TIGHT

COUNTED = dataclasses.replace(TCP, ordering="counted", trust_immediates=True)
ALONE = dataclasses.replace(COUNTED, delivery_complete="0")  # as where the provider has none: every write is acknowledged
EVERY = pytest.mark.parametrize("settings", [COUNTED, ALONE], ids=["beside", "alone"])
BACK_AND_FORTH = 60


@EVERY
def test_counted_signals_are_exact_and_never_early(settings: Settings) -> None:
    with ranks(3, settings) as group:
        both(group, bodies.exchange_rounds, 0, BACK_AND_FORTH)
        counted = group[0].call(common.statistics)
        # The first ones went gated, before the other side had told us our number.
        assert counted.provider_signals_applied > bodies.PARTS * BACK_AND_FORTH // 2
        assert counted.requests_failed == counted.misuses == counted.provider_unattributed_errors == 0
        group.all(bodies.barrier_with_all)


@EVERY
def test_back_pressure_loses_nothing_and_wider_scopes_cover_counted_writes(settings: Settings) -> None:
    settings = dataclasses.replace(settings, max_outstanding=8)
    with ranks(3, settings, lanes=torture_bodies.LANES, environment=TIGHT) as group:
        for member in group.members:
            member.ask(torture_bodies.stream_to_all, [peer for peer in range(3) if peer != member.rank], 40)
        for tally in [member.answer(90) for member in group.members]:
            assert tally.wrong == []
            assert tally.statuses == {"OK"}
        for member in group.members:
            member.ask(torture_bodies.all_done, (member.rank + 1) % 3, 60, 4096)
        assert [member.answer() for member in group.members] == [{"OK"}] * 3


@EVERY
def test_a_target_killed_in_the_middle_fails_its_writer_alone(settings: Settings) -> None:
    with ranks(3, settings) as group:
        group.all(common.barrier_in_order, 1)
        group[0].ask(fault_bodies.stream_until_it_dies, 2, 1, 20)
        assert group[2].call(common.wait_counter, 1, 3)
        os.kill(group[2].pid, signal.SIGKILL)
        kind, named, _, statuses = group[0].answer()
        assert (kind, named, statuses) == ("PeerError", 2, {"OK"})
        assert group[1].call(common.counter, 1) >= 20


def test_what_only_the_answer_of_one_who_is_removed_would_end_ends_with_the_removal() -> None:
    """Its unacknowledged writes were waited for until their hard deadline; the removal gave up before it."""
    with ranks(3, dataclasses.replace(ALONE, timeout_ms=1000, hard_timeout_ms=60_000)) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        group[0].call(bodies.connect, 2)
        with stopped(group, 2):
            group[0].call(bodies.post_unacknowledged, 2, 8)
            group[0].call(bodies.remove, 2)
            assert group[0].call(bodies.counts)["requests_live"] == 0


def test_endpoints_are_replaced_with_counted_writes_on_their_way() -> None:
    settings = dataclasses.replace(IMPATIENT, ordering="counted", trust_immediates=True)
    with ranks(3, settings) as group:
        both(group, bodies.exchange_rounds, 0, 5)
        group[0].call(bodies.connect, 2)
        with stopped(group, 2):
            group[0].call(bodies.post_stuck, 2, 8)
            group[0].call(bodies.await_quarantine, 8)
            removals = both(group, bodies.remove_while_exchanging, 2, 5, 105)
            assert set(removals[0][1]) <= FAILED  # type: ignore[index]
            counts = group[0].call(bodies.counts)
            assert counts["endpoints_replaced"] == 1
            assert counts["replacements_failed"] == counts["misuses"] == counts["slots_quarantined"] == 0
        both(group, bodies.exchange_rounds, 105, 155)


def test_a_source_killed_in_the_middle_comes_back_as_another_and_counts_from_nothing() -> None:
    settings = dataclasses.replace(IMPATIENT, ordering="counted", trust_immediates=True)
    with ranks(3, settings) as group:
        group.all(bodies.barrier_with_all)
        both(group, bodies.exchange_rounds, 0, 5)
        group[2].ask(bodies.write_until_refused, 0)
        group[0].call(bodies.wait_for_count, 5 * bodies.PARTS + 20)
        os.kill(group[2].pid, signal.SIGKILL)
        for rank in (0, 1):
            assert group[rank].call(common.await_fault, 10_000)[0] == 2
            group[rank].ask(bodies.remove, 2)
        for rank in (0, 1):
            group[rank].answer()
        group.restart(2)
        assert group[2].call(torture_bodies.all_done, 0, 40, 4096) == {"OK"}
        assert group[0].call(torture_bodies.all_done, 2, 40, 4096) == {"OK"}
        group.all(bodies.barrier_with_all)
