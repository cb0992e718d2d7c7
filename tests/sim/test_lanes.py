"""Bulk lanes in the engine: few operations in flight, after everything else, and nothing of the order within a lane changes."""

from __future__ import annotations

from typing import Any

from expertwire.testing.cluster import simulation

SMALL, BULK = 0, 1
REQUEST = 0


def probe(**options: Any) -> Any:
    return simulation().EngineProbe(**{"outstanding_max": 64, "peers": 2, "lanes": 2, "bulk_window": 2, **options})


def test_a_bulk_lane_has_its_window_and_no_more_in_flight() -> None:
    engine = probe()
    _, bulk = engine.submit(0, [BULK] * 5)
    _, other = engine.submit(1, [BULK] * 3)
    first = [ticket for ticket, _ in engine.post()]
    assert [engine.lane(peer, BULK)["in_flight"] for peer in (0, 1)] == [2, 2]
    engine.complete(first[0])
    assert len(engine.post()) == 1, "one has ended, one follows"
    flying = first[1:] + [ticket for ticket, _ in engine.post()]
    while engine.status(bulk) == "pending" or engine.status(other) == "pending":
        for _ in range(20):
            flying += [ticket for ticket, _ in engine.post()]
            assert all(engine.lane(peer, BULK)["in_flight"] <= 2 for peer in (0, 1))
        if not flying:
            break
        engine.complete(flying.pop(0))
    assert engine.invariants() == ""


def test_small_lanes_are_served_first_and_never_wait_for_a_bulk_window() -> None:
    engine = probe()
    _, bulk = engine.submit(0, [BULK] * 4, [(SMALL, REQUEST)])
    _, small = engine.submit(0, [SMALL] * 3)
    posted = engine.post(4)
    assert engine.lane(0, SMALL)["in_flight"] == 3, "although the bulk was there before"
    assert engine.lane(0, BULK)["in_flight"] == 1
    for ticket, _ in posted[:3]:
        engine.complete(ticket)
    assert engine.status(small) == "ok"
    assert engine.status(bulk) == "pending"
    _, later = engine.submit(0, [SMALL])
    ((ticket, _),) = engine.post(1)
    engine.complete(ticket)
    assert engine.status(later) == "ok", "with the bulk still in flight"


def test_the_signal_of_a_bulk_goes_out_over_the_small_lane_when_all_of_it_is_there() -> None:
    engine = probe()
    _, bulk = engine.submit(0, [BULK] * 3, [(SMALL, REQUEST)])
    flying: list[int] = []
    for _ in range(3):
        flying += [ticket for ticket, kind in engine.post() if kind == "write"]
        engine.complete(flying.pop(0))
    ((signal, kind),) = engine.post()
    assert kind == "signal"
    engine.complete(signal)
    assert engine.status(bulk) == "ok"
    assert engine.idle()


def test_bulk_is_not_starved_where_small_lanes_want_every_slot() -> None:
    engine = probe(outstanding_max=2)  # for four lanes
    _, bulk = engine.submit(0, [BULK] * 4)
    for _ in range(100):
        for peer in (0, 1):
            engine.submit(peer, [SMALL])
        for ticket, _ in engine.post():
            engine.complete(ticket)
        if engine.status(bulk) == "ok":
            break
    assert engine.status(bulk) == "ok"
    assert engine.invariants() == ""


def held_probe() -> Any:
    engine = probe(bulk_hold_ns=500_000, hard_timeout_ns=1_000_000_000)
    engine.advance(100_000_000)
    return engine


def finish(engine: Any, posted: list[tuple[int, int]]) -> int:
    """All of them, and how many there were."""
    for ticket, _ in posted:
        engine.complete(ticket)
    return len(posted)


def test_bulk_waits_for_one_small_and_goes_on_when_that_has_ended() -> None:
    engine = held_probe()
    engine.submit(0, [BULK] * 4)
    _, small = engine.submit(1, [SMALL])
    only = engine.post()
    assert len(only) == 1, "no chunk to any peer beside it"
    engine.advance(400_000)
    assert engine.post() == []
    finish(engine, only)
    assert engine.status(small) == "ok"
    assert len(engine.post()) == 1, "at once, one a take"
    assert len(engine.post()) == 1, "and its window"
    assert engine.post() == []
    assert engine.invariants() == ""


def test_beside_a_stream_of_small_work_bulk_goes_in_steps() -> None:
    """One chunk in each hold, however many small ones come and go; then its window."""
    engine = held_probe()
    _, bulk = engine.submit(0, [BULK] * 20)
    steps = []
    for turn in range(200):  # a small write each 10 us
        _, small = engine.submit(0, [SMALL])
        if finish(engine, engine.post()) > 1:
            steps.append(turn)
        assert engine.status(small) == "ok"
        engine.advance(10_000)
    assert steps == [51, 101, 151], "the second small one makes it a stream"
    engine.advance(100_000)
    took = []
    while posted := engine.post() + engine.post():
        took.append(finish(engine, posted))
    assert took == [2] * 8 + [1], "what the three steps left"
    assert engine.status(bulk) == "ok"
    assert engine.idle()


def test_where_a_small_one_has_met_bulk_the_next_meets_no_more_than_one_chunk() -> None:
    engine = held_probe()
    engine.submit(0, [BULK] * 20)
    met = engine.post() + engine.post()
    engine.submit(1, [SMALL])
    assert finish(engine, met + engine.post()) == 3
    for _ in range(4):
        one = engine.post()
        assert engine.post() == [], "for 20 ms its window is one"
        assert finish(engine, one) == 1
    engine.advance(20_000_000)
    assert finish(engine, engine.post() + engine.post()) == 2


def test_a_small_one_that_does_not_end_holds_nobody_for_long() -> None:
    engine = held_probe()
    engine.submit(1, [SMALL])
    engine.post()
    engine.submit(0, [BULK] * 4)
    assert engine.post() == []
    engine.advance(1_000_000)
    assert len(engine.post() + engine.post()) == 2
    assert engine.invariants() == ""


CHUNK = 65_536


def joining_probe(**options: Any) -> Any:
    engine = probe(**{"bulk_window": 8, "bulk_chunk_bytes": CHUNK, "bulk_post_bytes": 4 * CHUNK, "hard_timeout_ns": 10**9, **options})
    engine.advance(100_000_000)
    return engine


def test_neighbours_are_posted_as_one_and_end_with_it() -> None:
    engine = joining_probe()
    _, bulk = engine.submit(0, [BULK] * 10)
    posted = engine.post()
    assert engine.posted_bytes() == [4 * CHUNK, 4 * CHUNK], "four at most, and a window of eight"
    assert engine.lane(0, BULK)["in_flight"] == 8, "each is in flight by itself"
    assert engine.invariants() == ""
    engine.complete(posted[1][0])
    assert engine.lane(0, BULK)["retired"] == 0, "what is before it has not ended"
    engine.complete(posted[0][0])
    assert engine.lane(0, BULK)["retired"] == 8
    last = engine.post()
    assert engine.posted_bytes() == [2 * CHUNK]
    finish(engine, last)
    assert engine.status(bulk) == "ok"
    assert engine.idle()
    assert engine.invariants() == ""


def test_reads_have_half_the_window() -> None:
    engine = joining_probe()
    engine.submit(0, [BULK] * 10, reads=True)
    engine.post()
    assert engine.posted_bytes() == [4 * CHUNK]


def test_a_lead_stands_by_itself_beside_a_full_window() -> None:
    for reads, posts in ((False, [4 * CHUNK, 4 * CHUNK]), (True, [4 * CHUNK])):
        engine = joining_probe()
        _, bulk = engine.submit(0, [BULK] * 12, reads=reads, lead=2048)
        posted = engine.post()
        assert engine.posted_bytes() == [2048, *posts]
        finish(engine, posted)
        while engine.status(bulk) == "pending":
            finish(engine, engine.post())
        assert engine.invariants() == ""


def test_what_begins_a_page_is_led_to_the_middle_of_one() -> None:
    for address in range(3 * 4096):
        lead = simulation().lead_at(address)
        ahead = [(header + drift - address - lead) % 4096 for header in (16, 40) for drift in range(0, 100, 8)]
        assert not any(1 <= far <= 47 for far in ahead), f"at {address} the kernel copies at a tenth of its rate"
        assert lead == 0 or (lead <= 2112 and (address + lead) % 4096 == 2048)
    assert simulation().lead_at(1000) == 0


def test_requests_are_not_joined_with_each_other_nor_in_class_a() -> None:
    engine = joining_probe()
    engine.submit(0, [BULK] * 2)
    engine.submit(0, [BULK] * 3)
    engine.post()
    assert engine.posted_bytes() == [2 * CHUNK, 3 * CHUNK]
    ordered = joining_probe(ordered=True)
    ordered.submit(0, [BULK] * 3)
    ordered.post()
    assert ordered.posted_bytes() == [CHUNK] * 3


def test_where_a_small_one_has_met_bulk_chunks_go_one_by_one() -> None:
    engine = joining_probe(bulk_hold_ns=500_000)
    engine.submit(0, [BULK] * 20)
    met = engine.post()
    assert engine.posted_bytes() == [4 * CHUNK]
    engine.submit(1, [SMALL])
    finish(engine, met + engine.post())
    one = engine.post()
    assert engine.posted_bytes() == [CHUNK]
    assert engine.post() == []
    finish(engine, one)
    engine.advance(20_000_000)
    engine.post()
    assert engine.posted_bytes() == [4 * CHUNK]


def test_in_a_stream_of_small_ones_nothing_is_joined() -> None:
    engine = joining_probe(bulk_hold_ns=500_000)
    engine.submit(0, [BULK] * 20)
    sizes: list[int] = []
    for _ in range(110):  # a small write each 10 us, none of which meets a chunk
        engine.submit(0, [SMALL])
        finish(engine, engine.post())
        sizes += [size for size in engine.posted_bytes() if size >= CHUNK]
        engine.advance(10_000)
    assert sizes == [CHUNK, CHUNK]
    engine.advance(100_000)
    engine.post()
    assert engine.posted_bytes() == [4 * CHUNK]


def test_what_was_joined_and_pushed_back_is_posted_again_in_order() -> None:
    engine = joining_probe(bulk_window=4)
    _, bulk = engine.submit(0, [BULK] * 4)
    assert engine.post(1, ["again"]) == []
    assert engine.lane(0, BULK)["in_flight"] == 0
    assert engine.invariants() == ""
    again = engine.post()
    assert engine.posted_bytes() == [4 * CHUNK]
    finish(engine, again)
    assert engine.status(bulk) == "ok"


def test_what_was_joined_fails_as_one() -> None:
    for how in ("post", "completion", "deadline"):
        engine = joining_probe()
        _, bulk = engine.submit(0, [BULK] * 6)
        _, behind = engine.submit(0, [BULK])
        posted = engine.post(1, ["failed"] if how == "post" else [])
        if how == "completion":
            engine.complete(posted[0][0], "io_error")
        if how == "deadline":
            engine.advance(2 * 10**9)
            assert engine.status(bulk) == "pending", "its memory is still the provider's"
            assert engine.statistics()["slots_quarantined"] == 4
            engine.complete(posted[0][0])
        assert engine.status(bulk) == {"post": "bad_key", "completion": "io_error", "deadline": "timed_out"}[how]
        assert engine.status(behind) == "aborted"
        assert engine.lane(0, BULK)["state"] == "open"
        assert engine.idle()
        assert engine.invariants() == ""


def test_what_was_joined_ends_with_its_peer_and_a_late_word_changes_nothing() -> None:
    engine = joining_probe()
    _, bulk = engine.submit(0, [BULK] * 6)
    ((first, _), _) = engine.post()
    engine.peer_dead(0)
    assert engine.status(bulk) == "pending"
    engine.peer_closed(0)
    assert engine.status(bulk) == "peer_dead"
    engine.complete(first)
    assert engine.statistics()["completions_stale"] == 1
    assert engine.idle()
    assert engine.invariants() == ""
