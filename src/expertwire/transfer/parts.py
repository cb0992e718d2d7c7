"""A transfer of more pieces than the transport's tables hold at one time: one part after the other, and one end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertwire.errors import DeadlineError, ExpertwireError, PeerError, StateError
from expertwire.fabric import Status
from expertwire.transfer.states import ACTIVE, DONE, NEVER_POSTED, RELEASED

if TYPE_CHECKING:
    from expertwire.fabric.request import PreparedRequest

__all__ = ["Parts"]

_LOOK_MS = 1000
_LOOP_S = 0.002  # between looks of a task that awaits: a transfer of this size takes seconds


class Parts:
    """What `PreparedRequest` is for a transfer that goes at once.

    The next part is submitted when the one before has ended, by a thread, so the caller need do nothing. The last one carries the
    notification, which so leaves behind all of them. Where one fails none follows it.
    """

    def __init__(self, parts: Sequence[PreparedRequest], timeout_ms: int) -> None:
        """`timeout_ms`: of an `await`."""
        self._parts, self._timeout_ms = parts, timeout_ms
        self._status, self.code = NEVER_POSTED, 0
        self.times = (0, 0, 0, 0)
        self._at = 0  # which part is on its way
        self._lock = threading.Lock()  # of what is above
        self._ended = threading.Event()
        self._ended.set()

    # ---- what a PreparedRequest has, and its native

    @property
    def native(self) -> Parts:
        """Itself."""
        return self

    async def ended(self) -> None:
        """Until it is not on its way any more. Raises `DeadlineError`."""
        until = time.monotonic() + self._timeout_ms / 1000
        while not self._ended.is_set():
            if time.monotonic() >= until:
                raise self.late(self._timeout_ms)
            await asyncio.sleep(_LOOP_S)

    def late(self, limit_ms: int) -> ExpertwireError:
        """What is raised where it has not ended in time."""
        return DeadlineError(
            f"part {self._at + 1} of {len(self._parts)} is on its way after {limit_ms} ms; it keeps its memory: wait again"
        )

    def submit(self, notification: bytes | None, timeout_ms: int, later: bool) -> int | None:
        """Once more, beginning with the first part; None where it is on its way or was released."""
        begun = time.monotonic_ns()
        with self._lock:
            if self._status in (ACTIVE, RELEASED):
                return None
            wall = time.time_ns()
            self._parts[0].native.submit(None, timeout_ms, True)
            self._at, self._status, self.code = 0, ACTIVE, 0
            self._ended.clear()
            self.times = (begun, time.monotonic_ns() - begun, wall, 0)
        threading.Thread(target=self._run, args=(notification,), name="expertwire parts", daemon=True).start()
        return ACTIVE

    def status(self) -> int:
        """As the native's: ACTIVE until the last part has ended, or one has failed."""
        return self._status

    def turn(self) -> int:
        """Help the part that is on its way for at most 20 µs; `status()`."""
        if self._status == ACTIVE:
            self._parts[self._at].native.turn()
        return self._status

    def wait(self, timeout_ms: int) -> int:
        """`status()` once it has ended, or ACTIVE when the deadline passed."""
        self._ended.wait(timeout_ms / 1000)
        return self._status

    def cancel(self) -> None:
        """Where nothing of it was posted; else it goes on."""
        with self._lock:
            if self._status == ACTIVE and self._at == 0:
                self._parts[0].native.cancel()
        if self._parts[0].native.status() == Status.CANCELLED:
            self._ended.wait(self._timeout_ms / 1000)

    def release(self) -> bool:
        """It will not be submitted again. False: it is on its way."""
        with self._lock:
            if self._status == ACTIVE:
                return False
            self._status = RELEASED
        for part in self._parts:
            part.native.release()
        return True

    # ---- inside, on the thread

    def _run(self, notification: bytes | None) -> None:
        try:
            status = self._go_through(notification)
        except PeerError:
            status = int(Status.PEER_DEAD)
        except StateError:  # the agent was closed, or a region
            status = int(Status.CLOSED)
        except ExpertwireError:  # an error of before is latched
            status = int(Status.ABORTED)
        with self._lock:
            self.code = self._parts[self._at].native.code if status != DONE else 0
            self.times = (*self.times[:3], time.monotonic_ns())
            self._status = status
            self._ended.set()

    def _go_through(self, notification: bytes | None) -> int:
        last = len(self._parts) - 1
        while (status := self._end_of(self._parts[self._at])) == DONE and self._at < last:
            following = self._parts[self._at + 1]
            while True:
                try:
                    following.native.submit(notification if self._at + 1 == last else None, self._timeout_ms, True)
                    break
                except DeadlineError:
                    continue  # the tables are full of others' work
            with self._lock:
                self._at += 1
        return status

    def _end_of(self, part: PreparedRequest) -> int:
        while (status := part.native.status()) == ACTIVE:
            try:
                part.native.wait(_LOOK_MS)
            except PeerError:
                continue  # it has ended, or owns its memory all the same
        return status
