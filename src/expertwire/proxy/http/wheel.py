"""Deadlines of many connections for the price of one timer: each is looked at now and then, and ended if its time has passed.

A timer of its own for each leg would cost more than all the rest of the leg: moving a deadline here is one assignment.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

NEVER: Final = math.inf
TICK_S: Final = 0.1
# However late a deadline is, who has it is looked at within this: so that nobody is kept in memory for minutes after its end.
FAR_S: Final = 2.0


class Timed:
    """Something with a deadline. Whoever moves `due` (s, monotonic) to before `looked_at` calls `Wheel.watch` after it."""

    __slots__ = ("due", "looked_at")

    def __init__(self) -> None:
        self.due = NEVER
        self.looked_at = NEVER  # when the wheel looks next; NEVER: it does not know this one

    def expire(self, now: float) -> None:
        """`due` has passed; it has been set to NEVER."""
        raise NotImplementedError


class Wheel:
    """Looks at what it watches. Late by at most two ticks, never early."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, list[Timed]] = {}
        self._turned_to = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, item: Timed, now: float) -> None:
        """Make sure that `item` is looked at when it is due, or soon enough before."""
        at = item.due
        if at > now + FAR_S:
            if at == NEVER:
                return
            at = now + FAR_S
        if item.looked_at <= at:
            return
        slot = max(int(at / TICK_S) + 1, self._turned_to + 1)
        item.looked_at = slot * TICK_S
        self._slots.setdefault(slot, []).append(item)
        if self._timer is None:
            self._turned_to = max(self._turned_to, int(now / TICK_S))
            self._timer = self._loop.call_later(TICK_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = time.monotonic()
        for slot in range(self._turned_to + 1, int(now / TICK_S) + 1):
            self._turned_to = slot
            for item in self._slots.pop(slot, ()):
                if item.looked_at != slot * TICK_S:
                    continue  # moved to an earlier slot, which has looked at it
                item.looked_at = NEVER
                if item.due <= now:
                    item.due = NEVER
                    item.expire(now)
                else:
                    self.watch(item, now)
        if self._slots and self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._turn)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._slots.clear()
