"""What a transfer moves, once indices, areas and neighbours are settled: arrays that cross into the core as they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from expertwire.errors import InvalidArgumentError, InvalidTypeError
from expertwire.transfer.descriptors import U64

__all__ = ["Runs", "indices_of", "same_lengths"]

U32 = NDArray[numpy.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """M runs: `lengths[i]` bytes between `local_offsets[i]` of area `locals_[i]` and `remote_offsets[i]` of the peer's `remotes[i]`."""

    locals_: U32
    local_offsets: U64
    remotes: U32
    remote_offsets: U64
    lengths: U64

    def __len__(self) -> int:
        return len(self.lengths)

    def merged(self) -> Runs:
        """The same bytes in as few runs as neighbours allow: what goes on where the one before it ended, on both sides, joins that."""
        if len(self) < 2:
            return self
        goes_on = (
            (self.locals_[1:] == self.locals_[:-1])
            & (self.remotes[1:] == self.remotes[:-1])
            & (self.local_offsets[1:] == self.local_offsets[:-1] + self.lengths[:-1])
            & (self.remote_offsets[1:] == self.remote_offsets[:-1] + self.lengths[:-1])
        )
        if not goes_on.any():
            return self
        first = numpy.flatnonzero(numpy.concatenate(([True], ~goes_on)))
        return Runs(
            self.locals_[first],
            self.local_offsets[first],
            self.remotes[first],
            self.remote_offsets[first],
            numpy.add.reduceat(self.lengths, first),
        )

    def parts(self, operations: int, chunk_bytes: int) -> list[Runs]:
        """The same bytes, in order, in parts of at most `operations` chunks, where a run is cut into chunks of `chunk_bytes`."""
        most = max(1, operations)
        chunks = _chunks(self.lengths, chunk_bytes)
        if int(chunks.sum()) <= most:
            return [self]
        whole = self._cut(most * chunk_bytes) if int(chunks.max()) > most else self
        ends = numpy.cumsum(_chunks(whole.lengths, chunk_bytes))
        found, first, before = [], 0, 0
        while first < len(whole):
            after = int(numpy.searchsorted(ends, before + most, side="right"))
            found.append(whole._between(first, after))
            first, before = after, int(ends[after - 1])
        return found

    def _between(self, first: int, after: int) -> Runs:
        part = slice(first, after)
        return Runs(self.locals_[part], self.local_offsets[part], self.remotes[part], self.remote_offsets[part], self.lengths[part])

    def _cut(self, most_bytes: int) -> Runs:
        """No run longer than that."""
        pieces = _chunks(self.lengths, most_bytes).astype(numpy.int64)
        which = numpy.arange(pieces.sum()) - numpy.repeat(numpy.cumsum(pieces) - pieces, pieces)
        done = which.astype(numpy.uint64) * numpy.uint64(most_bytes)
        lengths = numpy.minimum(numpy.repeat(self.lengths, pieces) - done, numpy.uint64(most_bytes))
        return Runs(
            numpy.repeat(self.locals_, pieces),
            numpy.repeat(self.local_offsets, pieces) + done,
            numpy.repeat(self.remotes, pieces),
            numpy.repeat(self.remote_offsets, pieces) + done,
            lengths,
        )


def _chunks(lengths: U64, most_bytes: int) -> U64:
    """How many pieces of at most so many bytes each length takes."""
    return (lengths - numpy.uint64(1)) // numpy.uint64(most_bytes) + numpy.uint64(1)


def indices_of(given: Any, count: int, side: str) -> NDArray[numpy.int64]:
    """int64 [M] of what the caller gives for a prepared list of `count`: one number, a sequence, an integer array; None means all.

    Raises `InvalidArgumentError` with the first index that is not below `count`.
    """
    if given is None:
        return numpy.arange(count, dtype=numpy.int64)
    try:
        array = numpy.atleast_1d(numpy.asarray(given))
    except ValueError:
        raise InvalidTypeError(f"{side} indices must be whole numbers in one dimension") from None
    if array.size == 0:
        raise InvalidArgumentError(f"there are no {side} indices; a transfer moves at least one descriptor")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidTypeError(f"{side} indices are of {array.dtype} and shape {array.shape}; they must be whole numbers in one dimension")
    wrong = (array < 0) | (array >= count)
    if wrong.any():
        place = int(numpy.argmax(wrong))
        raise InvalidArgumentError(f"{side} index {place} is {int(array[place])}; the prepared list has {count} descriptors")
    return array.astype(numpy.int64)


def same_lengths(local: U64, remote: U64) -> None:
    """Raises `InvalidArgumentError` where two sides do not pair: another number of descriptors, or another length of one."""
    if len(local) != len(remote):
        raise InvalidArgumentError(f"{len(local)} local and {len(remote)} remote descriptors do not pair")
    if len(local) == 0:
        raise InvalidArgumentError("there are no descriptors; a transfer moves at least one")
    differ = local != remote
    if differ.any():
        index = int(numpy.argmax(differ))
        raise InvalidArgumentError(
            f"descriptor {index} has {int(local[index])} bytes here and {int(remote[index])} there; they must be equal"
        )
