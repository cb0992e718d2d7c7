"""The data region as a pool of extents: one is offered to each operation, trimmed to what was used, and free again when the last tensor
over it has died."""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import torch

from expertwire.ep.config import align_up
from expertwire.ep.cpu.memory import apart
from expertwire.errors import CapacityError

EXTENT_ALIGNMENT = 4096  # bytes: rows of different results never share a page


@dataclass(frozen=True)
class Extent:
    """Bytes [offset, offset + length) of the data region."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.length


class Extents:
    """What of [0, capacity) is free: ascending, no two adjacent. Pure."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [Extent(0, capacity)] if capacity else []

    @property
    def free(self) -> tuple[Extent, ...]:
        """Free extents, ascending."""
        return tuple(self._free)

    def largest(self) -> Extent:
        """The largest free extent, the first of several; of length 0 when nothing is free."""
        return max(self._free, key=lambda extent: (extent.length, -extent.offset), default=Extent(0, 0))

    def take(self, extent: Extent) -> None:
        """Take a part of what is free."""
        if extent.length == 0:
            return
        place = bisect_left(self._free, extent.offset + 1, key=lambda free: free.offset) - 1
        if place < 0 or self._free[place].end < extent.end:
            raise CapacityError(f"{extent} is not free; free is {self._free}")
        around = self._free[place]
        parts = (Extent(around.offset, extent.offset - around.offset), Extent(extent.end, around.end - extent.end))
        self._free[place : place + 1] = [part for part in parts if part.length]

    def give(self, extent: Extent) -> None:
        """Give back what was taken; it joins its free neighbours."""
        if extent.length == 0:
            return
        place = bisect_left(self._free, extent.offset, key=lambda free: free.offset)
        before = self._free[place - 1] if place > 0 else None
        after = self._free[place] if place < len(self._free) else None
        outside = extent.offset < 0 or extent.end > self.capacity
        if outside or (before is not None and before.end > extent.offset) or (after is not None and after.offset < extent.end):
            raise CapacityError(f"{extent} was not taken; free is {self._free} of {self.capacity} bytes")
        first, last, start, end = place, place, extent.offset, extent.end
        if before is not None and before.end == start:
            first, start = place - 1, before.offset
        if after is not None and after.offset == end:
            last, end = place + 1, after.end
        self._free[first:last] = [Extent(start, end - start)]


class Pool:
    """Extents of one rank's data region, with a reserve.

    A result is kept in place only if the largest extent left then is at least the reserve: a quarter of the region, or the combine input of
    any handle that lives, whichever is more, but no more than half of the region. So there is always something to offer, and a combine
    goes in rounds only where its input is larger than that. A result that would eat into the reserve is copied out by the caller.

    Called under the Buffer's lock. Finalizers run at any time and in any thread, so they only leave word in a queue.
    """

    def __init__(self, address: int, capacity: int, owner: object) -> None:
        self._address = address
        self._owner = owner  # keeps the region mapped; so does every tensor over it
        self._extents = Extents(capacity // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT)
        self._ended: deque[Extent | int] = deque()
        self._needs: dict[int, int] = {}  # by number of the handle
        self._numbers = 0

    @property
    def reserve_bytes(self) -> int:
        """What must stay free, in one piece, after a result is kept."""
        self._drain()
        return min(max(self._extents.capacity // 4, *self._needs.values(), 0), self._extents.capacity // 2)

    @property
    def free_bytes(self) -> int:
        """Bytes that no result holds."""
        self._drain()
        return sum(extent.length for extent in self._extents.free)

    def offer(self) -> Extent:
        """The largest free extent, taken."""
        self._drain()
        extent = self._extents.largest()
        self._extents.take(extent)
        return extent

    def apart(self, tensor: torch.Tensor, offer: Extent) -> torch.Tensor:
        """The tensor, or a copy of one that lies in what is on offer: a view of the region that no result of ours keeps taken."""
        return apart(tensor, self._address + offer.offset, offer.length)

    def withdraw(self, offer: Extent) -> None:
        """Give an offer back; nobody writes to it any more."""
        self._extents.give(offer)

    def reserve_for(self, holder: object, length: int) -> None:
        """While `holder` lives, keep `length` bytes within reach."""
        self._drain()
        self._numbers += 1
        self._needs[self._numbers] = align_up(length, EXTENT_ALIGNMENT)
        weakref.finalize(holder, self._ended.append, self._numbers).atexit = False

    def keep(self, offer: Extent, used_bytes: int) -> ctypes.Array[ctypes.c_char] | None:
        """Trim an offer to what was used and give its memory, which is free again when the array dies.

        None if the reserve would not be left: copy the result out, then `withdraw` the offer.
        """
        used = Extent(offer.offset, align_up(used_bytes, EXTENT_ALIGNMENT))
        rest = Extent(used.end, offer.length - used.length)
        self._extents.give(rest)
        if self._extents.largest().length < self.reserve_bytes:
            self._extents.take(rest)
            return None
        memory = self.memory(Extent(offer.offset, used_bytes))
        weakref.finalize(memory, self._ended.append, used).atexit = False
        return memory

    @property
    def whole(self) -> ctypes.Array[ctypes.c_char]:
        """All of the region."""
        return self.memory(Extent(0, self._extents.capacity))

    def memory(self, extent: Extent) -> ctypes.Array[ctypes.c_char]:
        """The bytes of an extent. The array keeps the region mapped."""
        memory = (ctypes.c_char * extent.length).from_address(self._address + extent.offset)
        memory.owner = self._owner  # type: ignore[attr-defined]
        return memory

    def _drain(self) -> None:
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, Extent):
                self._extents.give(ended)
            else:
                del self._needs[ended]
