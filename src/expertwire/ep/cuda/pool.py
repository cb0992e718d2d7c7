"""The data region of a GPU as a pool of extents, with a part for captured graphs.

Eager results: one extent is offered to each operation, trimmed to what was used, and free again when the last tensor over it has died and
the stream that it was handed to has passed that point. Captured results come from extents that eager traffic never gets again before
`destroy`, for a replay writes them whenever it runs; once their tensors have died they serve later captures, since replays are ordered on
the comm stream, in which whoever uses them next waits behind.

Called under the Buffer's lock. Finalizers run at any time and in any thread, so they only leave word in a queue.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from expertwire.ep.config import align_up
from expertwire.ep.cpu.pool import EXTENT_ALIGNMENT, Extent, Extents
from expertwire.errors import CapacityError


class Mark(Protocol):
    """A point in a stream's work: torch.cuda.Event, or a test's."""

    def query(self) -> bool:
        """Whether it has been passed."""


@dataclass(frozen=True)
class _Cooling:
    extent: Extent
    marks: tuple[Mark, ...]


class DevicePool:
    """Extents of one rank's data region. `mark(stream)` gives a point in that stream, now."""

    def __init__(self, capacity: int, mark: Callable[[object], Mark]) -> None:
        self.capacity = capacity // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._mark = mark
        self._eager = Extents(self.capacity)
        self._graph = Extents(self.capacity)
        self._graph.take(Extent(0, self.capacity))  # nothing yet
        self.graph_bytes = 0
        self._ended: deque[tuple[Extent, tuple[object, ...]]] = deque()
        self._graph_ended: deque[Extent] = deque()
        self._cooling: list[_Cooling] = []
        self._needs: dict[int, int] = {}
        self._needs_ended: deque[int] = deque()
        self._numbers = 0

    @property
    def reserve_bytes(self) -> int:
        """What must stay free, in one piece, after an eager result is kept: a quarter of what is not the graphs', or the combine input of
        any handle that lives, whichever is more, but no more than half."""
        room = self.capacity - self.graph_bytes
        return min(max(room // 4, *self._needs.values(), 0), room // 2)

    @property
    def free_bytes(self) -> int:
        """Bytes that no result holds."""
        self.drain()
        return sum(extent.length for extent in (*self._eager.free, *self._graph.free))

    def drain(self) -> None:
        """Take back what has died. Not while a graph is recorded: marks cannot be made then."""
        while self._ended:
            extent, streams = self._ended.popleft()
            self._cooling.append(_Cooling(extent, tuple(self._mark(stream) for stream in streams)))
            self._eager.give(extent)
        self._cooling = [one for one in self._cooling if not all(mark.query() for mark in one.marks)]
        self._drain_needs()

    def _drain_needs(self) -> None:
        while self._needs_ended:
            del self._needs[self._needs_ended.popleft()]

    def offer(self) -> tuple[Extent, tuple[Mark, ...]]:
        """The largest free extent, taken, and what to wait for before it is written: marks of those who used it before."""
        self.drain()
        extent = self._eager.largest()
        self._eager.take(extent)
        marks = [mark for one in self._cooling if _overlap(one.extent, extent) for mark in one.marks]
        return extent, tuple(marks)

    def withdraw(self, offer: Extent) -> None:
        """Give an offer back; nobody writes to it any more but in a call, and calls are in order."""
        self._eager.give(offer)

    def reserve_for(self, holder: object, length: int) -> None:
        """While `holder` lives, keep `length` bytes within reach."""
        self._numbers += 1
        self._needs[self._numbers] = align_up(length, EXTENT_ALIGNMENT)
        weakref.finalize(holder, self._needs_ended.append, self._numbers).atexit = False

    def keep(self, offer: Extent, used_bytes: int) -> Extent | None:
        """Trim an offer to what was used. None if the reserve would not be left: copy the result out, then `withdraw` the offer."""
        used = Extent(offer.offset, align_up(used_bytes, EXTENT_ALIGNMENT))
        rest = Extent(used.end, offer.length - used.length)
        self._eager.give(rest)
        if self._eager.largest().length < self.reserve_bytes:
            self._eager.take(rest)
            return None
        return used

    def captured(self, length: int) -> Extent:
        """`length` bytes for a graph that is being recorded."""
        self._drain_needs()
        while self._graph_ended:
            self._graph.give(self._graph_ended.popleft())
        length = align_up(max(length, 1), EXTENT_ALIGNMENT)
        fitting = [extent for extent in self._graph.free if extent.length >= length]
        if fitting:
            found = min(fitting, key=lambda extent: (extent.length, extent.offset))
            taken = Extent(found.offset, length)
            self._graph.take(taken)
            return taken
        return self._carve(length)

    def _carve(self, length: int) -> Extent:
        """From eager memory that nobody uses, for good; a quarter of the region stays eager."""
        left = self.capacity - self.graph_bytes - length
        free = [extent for extent in self._eager.free if not any(_overlap(one.extent, extent) for one in self._cooling)]
        room = max(free, key=lambda extent: extent.length, default=Extent(0, 0))
        if room.length < length or left < self.capacity // 4:
            raise CapacityError(
                f"a graph that is being recorded needs {length} bytes for what it receives; {room.length} are free in one piece, "
                f"{self.graph_bytes} of {self.capacity} belong to graphs already, and a quarter stays for eager calls: "
                "give a larger num_nvl_bytes"
            )
        taken = Extent(room.end - length, length)
        self._eager.take(taken)
        self.graph_bytes += length
        return taken

    def follow(self, holder: object, extent: Extent, streams: tuple[object, ...], captured: bool) -> None:
        """When `holder` dies the extent is free again, of an eager result once `streams` have passed that point."""
        ended = (self._graph_ended.append, extent) if captured else (self._ended.append, (extent, streams))
        weakref.finalize(holder, *ended).atexit = False


def _overlap(one: Extent, other: Extent) -> bool:
    return one.offset < other.end and other.offset < one.end
