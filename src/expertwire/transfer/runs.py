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
