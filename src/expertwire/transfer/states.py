"""The life of a transfer, as the core's numbers tell it. Pure: the steps between them are the core's, in one table there."""

from __future__ import annotations

import enum

__all__ = ["ACTIVE", "DONE", "NEVER_POSTED", "RELEASED", "TransferState", "state_of"]

DONE, ACTIVE, NEVER_POSTED, RELEASED = 0, 1, -1, -2  # statuses of what is prepared; all others are failures


class TransferState(enum.Enum):
    """READY: never posted. ACTIVE: posted, owns its memory. DONE: delivered. FAILED: ended, nothing of it is in flight. RELEASED: over."""

    READY = "ready"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"

    __hash__ = object.__hash__  # each is one object, and the enum's own hash costs more than the look-up


_STATES = {
    DONE: TransferState.DONE,
    ACTIVE: TransferState.ACTIVE,
    NEVER_POSTED: TransferState.READY,
    RELEASED: TransferState.RELEASED,
}


def state_of(status: int) -> TransferState:
    """The state of a transfer whose status that is."""
    return _STATES.get(status, TransferState.FAILED)
