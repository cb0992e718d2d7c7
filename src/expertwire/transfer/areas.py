"""Which registered area an address lies in, for whole arrays of addresses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from expertwire.errors import NotFoundError
from expertwire.transfer.descriptors import U64, Descriptors

__all__ = ["AreaTable"]


class AreaTable:
    """Areas of one kind of memory of one agent, which may overlap; area i is `lengths[i]` bytes from `addresses[i]`."""

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        starts = numpy.array(addresses, dtype=numpy.uint64)
        ends = starts + numpy.array(lengths, dtype=numpy.uint64)
        order = numpy.argsort(starts, kind="stable")
        self._starts, ends = starts[order], ends[order]
        # Of all areas that begin at or before an address, the one that reaches farthest holds a piece if any of them does.
        farthest = numpy.maximum.accumulate(ends)
        first = numpy.where(ends == farthest, numpy.arange(len(ends)), 0)
        best = numpy.maximum.accumulate(first)
        self._ends = farthest
        self._begins = self._starts[best]
        self._numbers = order[best].astype(numpy.uint32)

    def __len__(self) -> int:
        return len(self._starts)

    def covers(self, descriptors: Descriptors) -> NDArray[numpy.bool_]:
        """bool [N]: whether each piece lies within one area."""
        if not len(self):
            return numpy.zeros(len(descriptors), dtype=numpy.bool_)
        place = numpy.searchsorted(self._starts, descriptors.addresses, side="right").astype(numpy.int64) - 1
        known = place >= 0
        ends = self._ends[numpy.maximum(place, 0)]
        return known & (descriptors.addresses < ends) & (descriptors.lengths <= ends - descriptors.addresses)

    def find(self, descriptors: Descriptors, whose: str) -> tuple[NDArray[numpy.uint32], U64]:
        """(number of the area uint32 [N], offset in it in bytes uint64 [N]) of each piece.

        Raises `NotFoundError` naming the first that no area holds; `whose` says whose they are, for the message.
        """
        held = self.covers(descriptors)
        if not held.all():
            index = int(numpy.argmin(held))
            address, nbytes, _ = descriptors[index]
            raise NotFoundError(
                f"descriptor {index} ({nbytes} bytes at {address:#x}) does not lie within memory that {whose} has registered as "
                f"{descriptors.kind}: {len(self)} areas{self._nearest(address)}"
            )
        place = numpy.searchsorted(self._starts, descriptors.addresses, side="right").astype(numpy.int64) - 1
        return self._numbers[place], descriptors.addresses - self._begins[place]

    def _nearest(self, address: int) -> str:
        place = int(numpy.searchsorted(self._starts, numpy.uint64(address), side="right")) - 1
        if place < 0:
            return f", the first begins at {int(self._starts[0]):#x}" if len(self) else ""
        return f", the nearest is {int(self._begins[place]):#x} to {int(self._ends[place]):#x}"
