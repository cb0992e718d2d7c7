"""Slots, lines, windows, gates and records, taken apart: one engine whose provider is the test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.testing.cluster import simulation

REQUEST, QUEUE_PAIR, PEER = 0, 1, 2
HARD = 1_000_000


def probe(**options: Any) -> Any:
    return simulation().EngineProbe(**options)


def tickets(posted: list[tuple[int, str]], kind: str = "write") -> list[int]:
    return [ticket for ticket, what in posted if what == kind]


def check(engine: Any) -> None:
    assert engine.invariants() == ""


def test_a_request_ends_once_with_its_last_chunk() -> None:
    engine = probe()
    status, request = engine.submit(0, [0, 1, 0])
    assert status == "ok"
    assert engine.region_uses() == 3
    posted = tickets(engine.post())
    assert len(posted) == 3
    for ticket in posted[:2]:
        engine.complete(ticket)
        assert engine.status(request) == "pending"
    assert engine.release(request) == "refused"
    engine.complete(posted[2])
    assert engine.status(request) == "ok"
    assert engine.region_uses() == 0
    assert engine.idle()
    assert engine.release(request) == "ok"
    assert engine.status(request) == "stale"
    assert engine.release(request) == "stale"
    check(engine)


def test_a_request_of_nothing_is_done_at_once() -> None:
    engine = probe()
    status, request = engine.submit(1, [])
    assert (status, engine.status(request)) == ("ok", "ok")


def test_completions_of_another_generation_change_nothing() -> None:
    engine = probe()
    _, first = engine.submit(0, [0])
    (old,) = tickets(engine.post())
    engine.complete(old)
    _, second = engine.submit(0, [0])
    (new,) = tickets(engine.post())
    assert old & 0xFFFFFFFF == new & 0xFFFFFFFF, "the slot is used again"
    assert old != new, "under a new generation"
    engine.complete(old, "io_error")
    engine.complete(0xFFFFFFFF, "io_error")
    assert engine.status(second) == "pending"
    assert engine.status(first) == "ok"
    statistics = engine.statistics()
    assert (statistics["completions_stale"], statistics["completions_unknown"]) == (1, 1)
    engine.complete(new)
    assert engine.status(second) == "ok"


def test_retirement_is_in_order_within_a_lane_and_independent_between_lanes() -> None:
    engine = probe()
    _, first = engine.submit(0, [0])
    _, second = engine.submit(0, [0])
    _, other = engine.submit(0, [1])
    a, b, c = tickets(engine.post())
    lanes = [engine.lane(0, 0)["in_flight"], engine.lane(0, 1)["in_flight"]]
    assert lanes == [2, 1]
    # Round robin: lane 0, lane 1, lane 0.
    engine.complete(c)
    assert engine.status(second) == "pending", "the chunk before it is in flight"
    engine.complete(b)
    assert engine.status(other) == "ok", "another lane does not wait"
    engine.complete(a)
    assert (engine.status(first), engine.status(second)) == ("ok", "ok")
    assert engine.lane(0, 0)["retired"] == 2


@pytest.mark.parametrize("scope", [REQUEST, QUEUE_PAIR, PEER])
def test_a_signal_leaves_when_what_it_covers_is_delivered(scope: int) -> None:
    engine = probe()
    _, earlier = engine.submit(0, [1])
    _, request = engine.submit(0, [0, 0], [(0, scope)])
    posted = engine.post()
    assert tickets(posted, "signal") == []
    lane_one, lane_zero = tickets(posted)[1], [tickets(posted)[0], tickets(posted)[2]]
    engine.complete(lane_zero[1])
    engine.complete(lane_zero[0], delivered=False)  # it has left here, no more
    assert engine.post() == []
    engine.complete(lane_zero[0])
    if scope == PEER:
        assert engine.post() == [], "the other lane is covered as well"
        engine.complete(lane_one)
    (signal,) = tickets(engine.post(), "signal")
    assert engine.status(request) == "pending"
    engine.complete(signal)
    assert engine.status(request) == "ok"
    if scope != PEER:
        assert engine.status(earlier) == "pending"
    check(engine)


def test_a_later_write_does_not_wait_for_a_held_signal() -> None:
    engine = probe()
    engine.submit(0, [0], [(0, REQUEST)])
    (first,) = tickets(engine.post())
    _, later = engine.submit(0, [0])
    (second,) = tickets(engine.post())
    engine.complete(first)
    engine.complete(second)
    assert engine.status(later) == "ok"
    assert engine.statistics()["gates_closed"] == 0


def test_a_signal_with_nothing_unfinished_leaves_at_once() -> None:
    engine = probe()
    engine.submit(0, [], [(0, REQUEST), (1, PEER)])
    posted = engine.post()
    assert [kind for _, kind in posted] == ["signal"], "the second covers the first"
    engine.complete(posted[0][0])
    assert len(engine.post()) == 1


def test_class_a_sends_the_signal_behind_its_data_on_one_endpoint() -> None:
    engine = probe(ordered=True, outstanding_max=16)
    engine.submit(0, [0, 0], [(0, REQUEST)])
    assert [kind for _, kind in engine.post()] == ["write", "write"]
    assert [kind for _, kind in engine.post()] == ["signal"], "posted is enough where order is promised"


def test_again_keeps_order_and_nothing_is_lost() -> None:
    engine = probe(outstanding_max=16)
    requests = [engine.submit(0, [0])[1] for _ in range(4)]
    first = tickets(engine.post(64, ["posted", "again"]))
    assert len(first) == 1
    assert engine.post(64, ["again"]) == []
    rest = tickets(engine.post())
    assert len(rest) == 3
    assert engine.statistics()["posts_again"] == 2
    for index, ticket in enumerate(first + rest):
        engine.complete(ticket)
        assert [engine.status(r) for r in requests] == ["ok"] * (index + 1) + ["pending"] * (3 - index), "out of order"
    check(engine)


def test_the_cap_is_shared_by_the_live_lanes() -> None:
    engine = probe(outstanding_max=8, peers=2, lanes=2)
    for _ in range(10):
        assert engine.submit(0, [0])[0] == "ok"
    assert len(engine.post()) == 2, "cap 8 over 4 live lanes"
    assert engine.statistics()["window"] == 2
    engine.submit(1, [1])
    assert len(engine.post()) == 1, "another lane has its own share"
    engine.peer_dead(1)
    assert engine.statistics()["window"] == 4
    assert engine.statistics()["slots_quarantined"] == 1
    assert len(engine.post()) == 2


def test_fewer_slots_than_lanes_is_told_and_served() -> None:
    engine = probe(outstanding_max=2, peers=3, lanes=2)
    assert engine.statistics()["slots_short"]
    requests = [engine.submit(peer, [lane])[1] for peer in range(3) for lane in range(2)]
    for _ in range(3):
        posted = tickets(engine.post())
        assert len(posted) == 2
        for ticket in posted:
            engine.complete(ticket)
    assert [engine.status(r) for r in requests] == ["ok"] * 6


def test_a_full_table_pushes_back_and_takes_nothing() -> None:
    engine = probe(outstanding_max=2, peers=1, lanes=1, queued_max=4)
    taken = 0
    while engine.submit(0, [0, 0])[0] == "ok":
        taken += 1
    assert taken == 4, "eight operations"
    assert engine.submit(0, [0] * 9)[0] == "invalid", "more than the table ever holds"
    check(engine)


def test_an_error_aborts_what_is_queued_behind_it_and_the_lane_reopens() -> None:
    engine = probe(outstanding_max=4, peers=1, lanes=2)
    _, failing = engine.submit(0, [0, 1])
    _, in_flight = engine.submit(0, [0])
    _, queued = engine.submit(0, [0, 0])
    _, elsewhere = engine.submit(0, [1])
    posted = tickets(engine.post())
    assert engine.lane(0, 0)["in_flight"] == 2
    engine.complete(posted[0], "bad_key")
    assert engine.status(queued) == "aborted"
    assert engine.status(failing) == "pending", "its other chunk is in flight"
    assert engine.first_error(failing) == "bad_key"
    assert engine.lane(0, 0) | {"state": "aborting", "error": "bad_key"} == engine.lane(0, 0)
    _, after = engine.submit(0, [0])
    assert engine.post() == [], "what came since waits for the lane"
    for ticket in posted[1:]:
        engine.complete(ticket)
    assert [engine.status(r) for r in (failing, in_flight, elsewhere)] == ["bad_key", "ok", "ok"]
    lane = engine.lane(0, 0)
    assert (lane["state"], lane["generation"], lane["error"]) == ("open", 2, "ok")
    (ticket,) = tickets(engine.post())
    engine.complete(ticket)
    assert engine.status(after) == "ok"
    check(engine)


def test_a_wide_signal_fails_with_what_it_covers() -> None:
    engine = probe()
    _, failing = engine.submit(0, [0])
    (ticket,) = tickets(engine.post())
    _, barrier = engine.submit(0, [], [(1, PEER)])
    mark = engine.quiet_mark()
    engine.complete(ticket, "out_of_range")
    assert (engine.status(failing), engine.status(barrier)) == ("out_of_range", "aborted")
    assert engine.post() == []
    assert engine.quiet(mark) == "out_of_range"
    assert engine.quiet(engine.quiet_mark()) == "ok", "later waits are not told again"


def test_hard_deadline_quarantines_and_the_record_waits_for_the_drain() -> None:
    engine = probe(outstanding_max=4, peers=2, lanes=1)
    _, late = engine.submit(0, [0])
    _, queued = engine.submit(0, [0], [(0, REQUEST)])
    (ticket, _) = tickets(engine.post())
    _, third = engine.submit(0, [0])
    engine.advance(HARD - 1)
    assert engine.statistics()["slots_quarantined"] == 0
    engine.advance(1)
    statistics = engine.statistics()
    assert (statistics["slots_quarantined"], statistics["slots_counted"]) == (2, 0)
    assert engine.status(late) == "pending"
    assert engine.first_error(late) == "timed_out"
    assert engine.status(third) == "aborted"
    assert engine.status(queued) == "pending"
    assert engine.submit(0, [0])[0] == "timed_out"
    _, other = engine.submit(1, [0])
    (healthy,) = tickets(engine.post())
    engine.complete(healthy)
    assert engine.status(other) == "ok", "other lanes go on"
    engine.complete(ticket)
    assert engine.status(late) == "timed_out"
    engine.peer_closed(0)
    assert engine.status(queued) == "timed_out"
    assert engine.idle()
    assert engine.lane(0, 0)["state"] == "open"
    assert engine.submit(0, [0])[0] == "ok"
    check(engine)


def test_a_dead_peer_is_latched_until_it_is_closed_and_opened() -> None:
    engine = probe()
    _, flying = engine.submit(0, [0])
    engine.post()
    _, queued = engine.submit(0, [1])
    engine.peer_dead(0)
    assert (engine.status(flying), engine.first_error(flying), engine.status(queued)) == ("pending", "peer_dead", "peer_dead")
    assert engine.submit(0, [0])[0] == "peer_dead"
    assert engine.submit(1, [0])[0] == "ok"
    assert engine.close_peer(0) == "pending", "its memory may still be touched"
    engine.peer_closed(0)
    assert engine.status(flying) == "peer_dead"
    assert engine.close_peer(0) == "ok"
    assert engine.submit(0, [0])[0] == "closed"


def test_cancel_only_before_anything_is_posted() -> None:
    engine = probe(outstanding_max=1, peers=1, lanes=1)
    _, posted = engine.submit(0, [0])
    _, waiting = engine.submit(0, [0], [(0, REQUEST)])
    (ticket,) = tickets(engine.post())
    assert engine.cancel(posted) == "refused"
    assert engine.status(posted) == "pending"
    assert engine.cancel(waiting) == "ok"
    assert engine.status(waiting) == "cancelled"
    assert engine.cancel(waiting) == "refused"
    engine.complete(ticket)
    assert engine.status(posted) == "ok"
    assert engine.idle()
    check(engine)


def test_a_signal_is_withheld_until_it_has_left() -> None:
    """Class B: it leaves behind writes that have arrived, so that what they read may always be overwritten."""
    engine = probe(outstanding_max=4, peers=1, lanes=1)
    _, request = engine.submit(0, [0], [(0, REQUEST)])
    (write,) = tickets(engine.post())
    assert (engine.withhold(request), engine.status(request)) == ("cancelled", "pending"), "its write is on its way"
    engine.complete(write)
    assert (engine.status(request), engine.post(), engine.withhold(request)) == ("cancelled", [], "ok")
    _, request = engine.submit(0, [0], [(0, REQUEST)])
    assert (engine.withhold(request), engine.status(request)) == ("cancelled", "cancelled"), "nothing was posted"
    _, request = engine.submit(0, [0], [(0, REQUEST)])
    engine.complete(*tickets(engine.post()))
    (signal,) = tickets(engine.post(), "signal")
    assert (engine.withhold(request), engine.status(request)) == ("ok", "pending")
    engine.complete(signal)
    assert (engine.status(request), engine.withhold(request)) == ("ok", "ok")
    assert engine.release(request) == "ok"
    assert engine.withhold(request) == "stale"
    assert engine.idle()
    check(engine)


def test_a_signal_that_has_left_before_its_writes_have_arrived_is_not_withheld() -> None:
    engine = probe(outstanding_max=4, peers=1, lanes=1, ordered=True)
    _, request = engine.submit(0, [0], [(0, REQUEST)])
    (write,) = tickets(engine.post())
    (signal,) = tickets(engine.post(), "signal")
    assert engine.withhold(request) == "pending"
    engine.complete(write)
    assert engine.withhold(request) == "ok"
    engine.complete(signal)
    assert (engine.status(request), engine.idle()) == ("ok", True)


def test_again_for_ever_meets_the_hard_deadline() -> None:
    engine = probe(outstanding_max=2, peers=2, lanes=1)
    _, stuck = engine.submit(0, [0])
    assert engine.post(64, ["again"]) == []
    engine.advance(HARD)
    assert engine.status(stuck) == "pending"
    assert engine.post(64, ["again"]) == []
    assert engine.status(stuck) == "timed_out"
    _, after = engine.submit(0, [0])
    (ticket,) = tickets(engine.post())
    engine.complete(ticket)
    assert engine.status(after) == "ok"


def test_one_again_and_a_long_sleep_is_no_deadline() -> None:
    """A process that did not run was not refused: it asks once more before a request fails."""
    engine = probe(outstanding_max=2, peers=2, lanes=1)
    _, request = engine.submit(0, [0])
    assert engine.post(64, ["again"]) == []
    engine.advance(3 * HARD)
    assert engine.status(request) == "pending"
    (ticket,) = tickets(engine.post())
    engine.complete(ticket)
    assert engine.status(request) == "ok"
    assert engine.idle()
    check(engine)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "post", "complete", "error", "cancel", "withhold", "time", "dead", "close"]),
        st.integers(0, 7),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, cap=st.integers(1, 6), ordered=st.booleans())
def test_invariants_hold_whatever_the_order_of_events(steps: list[tuple[str, int, int]], cap: int, ordered: bool) -> None:
    engine = probe(outstanding_max=cap, peers=2, lanes=2, ordered=ordered, queued_max=12)
    requests: list[int] = []
    flying: list[int] = []
    for what, a, b in steps:
        if what == "submit":
            status, request = engine.submit(a % 2, [(a + i) % 2 for i in range(b)], [(a // 2 % 2, a % 3)] if a > 2 else [])
            if status == "ok":
                requests.append(request)
        elif what == "post":
            flying += [ticket for ticket, _ in engine.post(1 + a, ["again"] if b == 0 else ["failed"] if b == 5 else [])]
        elif what in ("complete", "error") and flying:
            engine.complete(flying.pop(a % len(flying)), "ok" if what == "complete" else "io_error")
        elif what == "cancel" and requests:
            engine.cancel(requests[a % len(requests)])
        elif what == "withhold" and requests:
            engine.withhold(requests[a % len(requests)])
        elif what == "time":
            engine.advance(HARD // 3)
        elif what == "dead" and a == 0:
            engine.peer_dead(b % 2)
        elif what == "close" and a == 0:
            engine.peer_closed(b % 2)
        check(engine)
        assert engine.statistics()["slots_counted"] <= cap
    for peer in range(2):
        engine.peer_dead(peer)
        engine.peer_closed(peer)
        check(engine)
    assert engine.idle()
    assert "pending" not in {engine.status(request) for request in requests}


def test_what_has_arrived_is_taken_before_deadlines_are_judged() -> None:
    """A process that was stopped finds more completions than one turn takes; those of the next turn came in time, too."""
    engine = probe(outstanding_max=128, peers=1, lanes=1)
    requests = [engine.submit(0, [0])[1] for _ in range(100)]
    waiting = [ticket for ticket, _ in engine.post(128)]
    assert len(waiting) == 100
    waiting = engine.turn_after_pause(HARD, waiting)
    assert len(waiting) == 36
    while waiting:
        waiting = engine.turn_after_pause(0, waiting)
    assert {engine.status(request) for request in requests} == {"ok"}
    late = engine.submit(0, [0])[1]
    engine.post(1)
    engine.turn_after_pause(HARD, [])
    assert engine.statistics()["slots_quarantined"] == 1, "who waits for nothing more is judged at once"
    assert engine.status(late) == "pending"


def test_a_wait_that_passed_its_deadline_as_the_request_ended_changes_nothing() -> None:
    """Found by csrc/fuzz/fuzz_engine."""
    engine = probe(outstanding_max=8, peers=1, lanes=1)
    status, request = engine.submit(0, [])
    assert (status, engine.status(request)) == ("ok", "ok")
    engine.mark_stalled(request)
    assert engine.invariants() == ""
    assert engine.status(request) == "ok"
