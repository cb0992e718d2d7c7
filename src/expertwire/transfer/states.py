"""The life of a transfer: every state, every event, one table. Pure."""

from __future__ import annotations

import enum

from expertwire.errors import StateError

__all__ = ["TRANSITIONS", "TransferEvent", "TransferState", "advance"]


class TransferState(enum.Enum):
    """READY: never posted. ACTIVE: posted, owns its memory. DONE: delivered. FAILED: ended, nothing of it is in flight. RELEASED: over."""

    READY = "ready"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"

    __hash__ = object.__hash__  # each is one object, and the enum's own hash costs more than the look-up


class TransferEvent(enum.Enum):
    """What may happen to one."""

    POST = "post"
    SUCCEED = "succeed"
    FAIL = "fail"
    RELEASE = "release"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.READY, TransferEvent.POST): TransferState.ACTIVE,
    (TransferState.DONE, TransferEvent.POST): TransferState.ACTIVE,
    (TransferState.FAILED, TransferEvent.POST): TransferState.ACTIVE,
    (TransferState.ACTIVE, TransferEvent.SUCCEED): TransferState.DONE,
    (TransferState.ACTIVE, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.READY, TransferEvent.RELEASE): TransferState.RELEASED,
    (TransferState.DONE, TransferEvent.RELEASE): TransferState.RELEASED,
    (TransferState.FAILED, TransferEvent.RELEASE): TransferState.RELEASED,
    (TransferState.RELEASED, TransferEvent.RELEASE): TransferState.RELEASED,
}


def advance(state: TransferState, event: TransferEvent) -> TransferState:
    """The state after `event`. Raises `StateError` where the table has no such step."""
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise StateError(f"a transfer that is {state.value} cannot {event.value}")
    return found
