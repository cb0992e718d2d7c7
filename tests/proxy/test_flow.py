"""One pair of legs: whatever happens in whatever order, it ends once, and parameters are used once, in time, or released."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import StateError
from expertwire.proxy.flow import TABLE, TERMINAL, Action, Event, Flow, Limits, State

LIMITS = st.builds(Limits, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.booleans())


class Watcher:
    """Walks a flow and holds what must always hold."""

    def __init__(self, limits: Limits) -> None:
        self.flow, self.limits = Flow(limits), limits
        self.seen: list[Action] = []
        self.deadline: float | None = None  # of parameters that are held
        self.leg_open = False

    def step(self, event: Event, now: float, deadline: float = 0.0) -> None:
        before = self.flow.state
        if event is Event.PREFILLED and not self.flow.over:
            self.flow.grant(deadline)
            self.deadline = deadline
        actions = self.flow.step(event, now)
        if before in TERMINAL:
            assert actions == ()
            assert self.flow.state is before
        for action in actions:
            self.check(action, now)
            self.seen.append(action)

    def check(self, action: Action, now: float) -> None:
        committed = Action.COMMIT in self.seen
        if action is Action.SEND and self.deadline is not None:
            assert now < self.deadline
            self.deadline = None
        if action is Action.RELEASE:
            assert self.deadline is not None
            self.deadline = None
        if action in (Action.PREFILL, Action.DECODE):
            assert not committed
            assert self.deadline is None or action is Action.DECODE
        if action in (Action.COMMIT, Action.FAIL):
            assert not committed
        if action in (Action.FINISH, Action.ABORT):
            assert committed

    def ended(self) -> None:
        assert self.flow.over
        assert self.deadline is None, "parameters were neither used nor released"
        ends = [action for action in self.seen if action in (Action.FINISH, Action.FAIL, Action.ABORT)]
        assert len(ends) == (self.flow.state is not State.CLIENT_GONE)
        rounds = 1 + self.limits.reprefills
        assert self.seen.count(Action.PREFILL) <= self.limits.prefill_attempts * rounds
        assert self.seen.count(Action.DECODE) <= self.limits.decode_attempts + rounds + 1


@given(LIMITS, st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_of_events_ends_once(limits: Limits, data: st.DataObject) -> None:
    watcher, now = Watcher(limits), 0.0
    for _ in range(60):
        possible = sorted(TABLE[watcher.flow.state])
        event = data.draw(st.sampled_from(possible))
        now += data.draw(st.sampled_from([0.0, 0.5, 30.0]))
        watcher.step(event, now, now + data.draw(st.sampled_from([1.0, 25.0])))
        if watcher.flow.over:
            break
    else:
        watcher.step(Event.GONE, now)
    for event in Event:
        watcher.step(event, now)
    watcher.ended()


@given(LIMITS)
@settings(max_examples=50, deadline=None)
def test_it_ends_without_the_client_leaving(limits: Limits) -> None:
    """The longest way: every attempt fails as late as it can."""
    watcher = Watcher(limits)
    watcher.step(Event.START, 0.0)
    late = {State.PREFILLING: Event.PREFILLED, State.HANDOFF: Event.UNREACHED, State.DECODING: Event.STALE}
    for _ in range(100):
        if watcher.flow.over:
            break
        if watcher.flow.state is State.PREFILLING and watcher.flow.prefills < limits.prefill_attempts:
            watcher.step(Event.OVERLOADED, 0.0)
        else:
            watcher.step(late[watcher.flow.state], 0.0, 25.0)
    watcher.ended()


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, e in product(State, Event) if e not in TABLE[s]])
def test_what_cannot_happen_raises_and_changes_nothing(state: State, event: Event) -> None:
    flow = Flow(Limits())
    flow.state = state
    with pytest.raises(StateError, match=f"{event.name} cannot happen to a request that is {state.name}"):
        flow.step(event, 0.0)
    assert flow.state is state


def test_every_row_of_the_table_can_be_left_when_the_client_leaves() -> None:
    assert all(Event.GONE in row for row in TABLE.values())


def walk(*events: Event, limits: Limits | None = None, now: float = 0.0, deadline: float = 25.0) -> tuple[Flow, tuple[Action, ...]]:
    """The flow, and what the last event asked for."""
    flow = Flow(limits or Limits())
    actions: tuple[Action, ...] = ()
    for event in events:
        if event is Event.PREFILLED:
            flow.grant(deadline)
        actions = flow.step(event, now)
    return flow, actions


def test_an_expired_lease_is_prefilled_again() -> None:
    flow, _ = walk(Event.START, Event.PREFILLED)
    assert flow.step(Event.READY, 25.0) == (Action.CLOSE, Action.RELEASE, Action.PREFILL)
    assert flow.state is State.PREFILLING
    flow.grant(60.0)
    assert flow.step(Event.PREFILLED, 30.0) == (Action.DECODE,)
    assert flow.step(Event.READY, 59.9) == (Action.SEND,)


def test_a_decode_server_that_is_not_reached_means_prefill_again() -> None:
    flow, actions = walk(Event.START, Event.PREFILLED, Event.UNREACHED)
    assert actions == (Action.RELEASE, Action.PREFILL)
    flow, actions = walk(Event.START, Event.PREFILLED, Event.UNREACHED, Event.PREFILLED, Event.UNREACHED)
    assert actions == (Action.RELEASE, Action.FAIL)
    assert flow.state is State.FAILED


@pytest.mark.parametrize("event", [Event.REFUSED, Event.UNFIT, Event.LOST, Event.TIMED_OUT])
def test_what_was_answered_is_not_asked_again(event: Event) -> None:
    for before in ((Event.START,), (Event.START, Event.PREFILLED, Event.READY), (Event.START_ALONE, Event.READY)):
        flow, actions = walk(*before, event)
        assert actions == (Action.FAIL,)
        assert flow.state is State.FAILED


@pytest.mark.parametrize("event", [Event.UNREACHED, Event.OVERLOADED, Event.STALE])
def test_prefill_is_tried_elsewhere(event: Event) -> None:
    flow, actions = walk(Event.START, event, event)
    assert actions == (Action.PREFILL,)
    assert flow.step(event, 0.0) == (Action.FAIL,)


def test_decode_alone_only_if_it_is_allowed() -> None:
    assert walk(Event.START, Event.NO_SERVER)[1] == (Action.FAIL,)
    flow, actions = walk(Event.START, Event.NO_SERVER, limits=Limits(alone_allowed=True))
    assert actions == (Action.ALONE, Action.DECODE)
    assert flow.step(Event.READY, 1e9) == (Action.SEND,)
