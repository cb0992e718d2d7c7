"""When an endpoint may be closed (SPEC T14): never under work that may still end by itself, always in the end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.testing.cluster import simulation

REQUEST, PEER = 0, 2
HARD = 1_000_000
OLD, NEW = 0, 1


def probe(**options: Any) -> Any:
    return simulation().EngineProbe(**options)


def test_what_may_still_complete_keeps_the_old_endpoint() -> None:
    engine = probe(outstanding_max=8, peers=3, lanes=1)
    _, stuck = engine.submit(0, [0])
    ((stuck_ticket, _),) = engine.post()
    assert not engine.drained(OLD)
    engine.advance(HARD)
    assert engine.drained(OLD), "what is quarantined is what the close is for"
    _, before = engine.submit(1, [0], [(0, REQUEST)])
    ((write, _),) = engine.post()
    engine.replace_endpoint(OLD, NEW)
    assert not engine.drained(OLD)
    _, after = engine.submit(2, [0])
    ((later, _),) = engine.post()
    engine.complete(write)
    assert engine.drained(OLD), "the signal behind it goes out over the new one, as does what came since"
    engine.endpoint_closed(OLD)
    assert engine.status(stuck) == "timed_out"
    assert engine.status(before) == engine.status(after) == "pending"
    ((signal, kind),) = engine.post()
    assert kind == "signal"
    engine.complete(stuck_ticket)  # a late word on what the close has ended
    engine.complete(later)
    engine.complete(signal)
    assert engine.status(before) == engine.status(after) == "ok"
    assert engine.statistics()["completions_stale"] == 1
    assert engine.invariants() == ""
    assert engine.idle()


def test_a_signal_that_order_lets_go_leaves_over_the_old_endpoint_first() -> None:
    """Class A: its data was posted there, and only there is it ordered behind them."""
    engine = probe(outstanding_max=8, peers=1, lanes=1, ordered=True)
    _, request = engine.submit(0, [0], [(0, REQUEST)])
    ((write, _),) = engine.post(1)
    engine.replace_endpoint(OLD, NEW)
    engine.complete(write)
    assert not engine.drained(OLD), "the signal is still to be posted there"
    ((signal, _),) = engine.post()
    assert not engine.drained(OLD)
    engine.complete(signal)
    assert engine.drained(OLD)
    assert engine.status(request) == "ok"


def test_half_the_cap_quarantined_asks_for_a_replacement() -> None:
    engine = probe(outstanding_max=8, peers=2, lanes=1)
    for _ in range(3):
        engine.submit(0, [0])
    engine.post()
    engine.advance(HARD)
    assert engine.endpoint_to_replace() == -1
    engine.peer_closed(0)
    for _ in range(4):
        engine.submit(0, [0])
    engine.post()
    engine.advance(HARD)
    assert engine.endpoint_to_replace() == OLD
    engine.replace_endpoint(OLD, NEW)
    engine.endpoint_closed(OLD)
    assert engine.endpoint_to_replace() == -1
    assert engine.submit(0, [0])[0] == "ok", "the lane has opened again"


events = st.lists(
    st.tuples(
        st.sampled_from(["submit", "signal", "post", "again", "complete", "fail", "advance", "dead"]), st.integers(0, 2), st.integers(0, 7)
    ),
    max_size=60,
)


@given(before=events, after=events, ordered=st.booleans())
@settings(max_examples=150, deadline=None)
def test_closing_a_drained_endpoint_ends_nothing_but_quarantined_work(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], ordered: bool
) -> None:
    """Whatever happened before and since; and it is drained at the latest when the hard deadline of what it carried has passed."""
    engine = probe(outstanding_max=6, peers=3, lanes=2, ordered=ordered)
    flying: list[int] = []
    requests: list[int] = []

    def play(steps: list[tuple[str, int, int]]) -> None:
        for what, peer, number in steps:
            if what in ("submit", "signal"):
                controls = [(number % 2, PEER if number > 3 else REQUEST)] if what == "signal" else []
                status, request = engine.submit(peer, [number % 2], controls)
                if status == "ok":
                    requests.append(request)
            elif what in ("post", "again"):
                flying.extend(ticket for ticket, _ in engine.post(1 + number, ["again"] if what == "again" else []))
            elif what in ("complete", "fail") and flying:
                engine.complete(flying.pop(number % len(flying)), "ok" if what == "complete" else "io_error")
            elif what == "advance":
                engine.advance(number * HARD // 5)
            elif what == "dead":
                engine.peer_dead(peer)
            assert engine.invariants() == ""

    play(before)
    engine.replace_endpoint(OLD, NEW)
    play(after)
    for _ in range(4):  # nothing that was accepted before the replacement waits longer than to be posted and to time out
        if engine.drained(OLD):
            break
        flying.extend(ticket for ticket, _ in engine.post(64))
        engine.advance(HARD)
    assert engine.drained(OLD)
    open_before = [request for request in requests if engine.status(request) == "pending"]
    engine.endpoint_closed(OLD)
    assert engine.invariants() == ""
    ended = [engine.status(request) for request in open_before]
    assert "closed" not in ended, "something that was not quarantined ended with the close"
    assert engine.drained(OLD)
