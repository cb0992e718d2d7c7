"""Lists of pieces of memory, whole arrays at a time. Pure: nothing here knows whether a piece is registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from expertwire.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["KINDS", "U64", "Descriptors", "kind_of"]

U64 = NDArray[numpy.uint64]
KINDS = ("DRAM", "VRAM", "BLOCK", "OBJ", "FILE")  # NIXL's names; the place is the number in records that go over a wire
_ALIASES = {"cpu": "DRAM", "cuda": "VRAM"}
_COLUMNS = 3
_TAGGED_COLUMNS = 4
_STRIDED_COLUMNS = 5
_PIECES_MAX = 1 << 24  # of one list: 400 MB of numbers; a row of five could name any number of them


class Descriptors:
    """N pieces of memory of one kind: `addresses`, `lengths` (bytes) and `devices`, each uint64 [N], read-only.

    `metas`: what came with 4-tuples, kept for whoever gave it, else None. `owners`: tensors that the pieces are of, kept alive.
    """

    __slots__ = ("addresses", "devices", "kind", "lengths", "metas", "owners")

    def __init__(
        self,
        kind: str,
        addresses: U64,
        lengths: U64,
        devices: U64,
        metas: tuple[bytes, ...] | None = None,
        owners: tuple[object, ...] = (),
    ) -> None:
        """Checked: one length of all three, no empty piece, none that begins at 0 or reaches 2^64. Raises `InvalidArgumentError`."""
        self.kind = kind_of(kind)
        self.addresses, self.lengths, self.devices = addresses, lengths, devices
        self.metas, self.owners = metas, owners
        _check(addresses, lengths, devices)
        for array in (addresses, lengths, devices):
            array.flags.writeable = False

    @classmethod
    def of(cls, given: Any, kind: str | None = None) -> Descriptors:
        """From another Descriptors, a contiguous tensor or several, tuples (address, bytes, device[, meta]), or an integer array N × 3.

        A row of an array N × 5 is (address, bytes, device, stride, count): so many pieces, each that many bytes behind the one before it.

        `kind` ("DRAM", "VRAM", …; "cpu" and "cuda" too) is needed for tuples and arrays, since a number does not say whose memory it is in;
        of a tensor its device says it. Raises `InvalidArgumentError`, `InvalidTypeError`.
        """
        if isinstance(given, Descriptors):
            _same_kind(given.kind, kind)
            return given
        if hasattr(given, "data_ptr"):
            return cls._of_tensors([given], kind)
        if isinstance(given, numpy.ndarray):
            return cls._of_array(given, kind)
        if not isinstance(given, list | tuple):
            raise InvalidTypeError(
                f"descriptors are a {type(given).__name__}; give a list of tuples (address, bytes, device), an integer array of N × 3, "
                "a tensor or a list of tensors"
            )
        if given and hasattr(given[0], "data_ptr"):
            return cls._of_tensors(given, kind)
        return cls._of_tuples(given, kind)

    @classmethod
    def _of_tensors(cls, tensors: Sequence[Any], kind: str | None) -> Descriptors:
        kinds = set()
        rows = []
        for number, tensor in enumerate(tensors):
            if not hasattr(tensor, "data_ptr"):
                raise InvalidTypeError(f"entry {number} of a list of tensors is a {type(tensor).__name__}")
            if not tensor.is_contiguous():
                raise InvalidArgumentError(f"tensor {number} of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
            found = kind_of(tensor.device.type)
            kinds.add(found)
            rows.append((tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0 if found == "DRAM" else tensor.device.index or 0))
        if len(kinds) > 1:
            raise InvalidArgumentError(f"a list of descriptors is of one kind of memory; these tensors are on {sorted(kinds)}")
        (found,) = kinds
        _same_kind(found, kind)
        return cls(found, *_columns(numpy.array(rows, dtype=numpy.uint64)), owners=tuple(tensors))

    @classmethod
    def _of_array(cls, array: NDArray[Any], kind: str | None) -> Descriptors:
        if array.dtype not in (numpy.uint64, numpy.int64):
            raise InvalidTypeError(f"an array of descriptors is of {array.dtype}; it must be uint64 or int64")
        if array.ndim == 2 and array.shape[1] == _STRIDED_COLUMNS:
            _not_negative(array)
            return cls(_named(kind), *_strided(array.astype(numpy.uint64)))
        if array.ndim != 2 or array.shape[1] != _COLUMNS:
            raise InvalidArgumentError(
                f"an array of descriptors is of shape {array.shape}; it must be N × {_COLUMNS}: address, bytes, device, "
                f"or N × {_STRIDED_COLUMNS}: address, bytes, device, stride, count"
            )
        _not_negative(array)
        return cls(_named(kind), *_columns(array.astype(numpy.uint64)))

    @classmethod
    def _of_tuples(cls, rows: Sequence[Any], kind: str | None) -> Descriptors:
        widths = {len(row) if isinstance(row, list | tuple) else -1 for row in rows}
        if not widths <= {_COLUMNS, _TAGGED_COLUMNS} or len(widths) > 1:
            raise InvalidTypeError("descriptors are tuples (address, bytes, device), or all with a fourth entry of bytes")
        tagged = widths == {_TAGGED_COLUMNS}
        metas = tuple(_meta(number, row[-1]) for number, row in enumerate(rows)) if tagged else None
        table = _whole_numbers([row[:_COLUMNS] for row in rows])
        return cls(_named(kind), *_columns(table), metas=metas)

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        return int(self.addresses[index]), int(self.lengths[index]), int(self.devices[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptors):
            return NotImplemented
        return self.kind == other.kind and all(
            bool(numpy.array_equal(mine, theirs))
            for mine, theirs in ((self.addresses, other.addresses), (self.lengths, other.lengths), (self.devices, other.devices))
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __repr__(self) -> str:
        return f"Descriptors({self.kind}, {len(self)} pieces, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Of all pieces together."""
        return int(self.lengths.sum())

    def rows(self) -> list[tuple[int, int, int]]:
        """(address, bytes, device) of each."""
        return [self[index] for index in range(len(self))]

    def take(self, indices: NDArray[numpy.int64]) -> Descriptors:
        """Those pieces, in that order; int64 [M], each below N."""
        return Descriptors(self.kind, self.addresses[indices], self.lengths[indices], self.devices[indices], owners=self.owners)


def kind_of(name: str) -> str:
    """The kind of memory that `name` means. Raises `InvalidArgumentError`."""
    found = _ALIASES.get(name, name)
    if found not in KINDS:
        raise InvalidArgumentError(f"memory of kind {name!r} is not known; it is one of {', '.join((*KINDS, *_ALIASES))}")
    return found


def _named(kind: str | None) -> str:
    if kind is None:
        raise InvalidArgumentError("tuples and arrays do not say what memory they are of; give its kind, such as 'DRAM'")
    return kind_of(kind)


def _same_kind(found: str, asked: str | None) -> None:
    if asked is not None and kind_of(asked) != found:
        raise InvalidArgumentError(f"the memory is {found}, {kind_of(asked)} was asked for")


def _columns(table: NDArray[numpy.uint64]) -> tuple[U64, U64, U64]:
    return (
        numpy.ascontiguousarray(table[:, 0]),
        numpy.ascontiguousarray(table[:, 1]),
        numpy.ascontiguousarray(table[:, 2]),
    )


def _not_negative(array: NDArray[Any]) -> None:
    if array.dtype == numpy.int64 and array.size and int(array.min()) < 0:
        row = int(numpy.argmin(array.min(axis=1)))
        raise InvalidArgumentError(f"descriptor {row} is {tuple(map(int, array[row]))}; no number of it may be negative")


def _strided(table: NDArray[numpy.uint64]) -> tuple[U64, U64, U64]:
    """Every piece of every row, in order."""
    addresses, lengths, devices, strides, counts = (table[:, column] for column in range(_STRIDED_COLUMNS))
    wrong = (counts == 0) | (strides < lengths)
    if wrong.any():
        row = int(numpy.argmax(wrong))
        raise InvalidArgumentError(
            f"strided descriptor {row} is {tuple(map(int, table[row]))}: (address, bytes, device, stride, count), whose count is at "
            "least 1 and whose stride at least its bytes"
        )
    pieces = sum(map(int, counts))
    if pieces > _PIECES_MAX:
        raise InvalidArgumentError(f"{len(table)} strided descriptors name {pieces} pieces, the limit is {_PIECES_MAX}; split them")
    last = (counts - numpy.uint64(1)) * strides
    beyond = (strides > numpy.iinfo(numpy.uint64).max // numpy.maximum(counts, 1)) | (last > ~addresses)
    if beyond.any():
        row = int(numpy.argmax(beyond))
        raise InvalidArgumentError(f"strided descriptor {row} is {tuple(map(int, table[row]))}: its last piece does not end below 2^64")
    times = counts.astype(numpy.int64)
    which = numpy.arange(pieces, dtype=numpy.uint64) - numpy.repeat(numpy.cumsum(counts) - counts, times)
    return numpy.repeat(addresses, times) + which * numpy.repeat(strides, times), numpy.repeat(lengths, times), numpy.repeat(devices, times)


def _whole_numbers(rows: Sequence[Any]) -> NDArray[numpy.uint64]:
    """uint64 [N, 3]. Told that dtype at once numpy would take "64", and 64.5 for 64."""
    try:
        found = numpy.array(rows)
        if found.dtype.kind not in "iu" or (found.dtype.kind == "i" and found.size and int(found.min()) < 0):
            if not all(_is_word(value) for row in rows for value in row):
                raise ValueError
            found = numpy.array(rows, dtype=numpy.uint64)
        return found.astype(numpy.uint64).reshape(len(rows), _COLUMNS)
    except (TypeError, ValueError, OverflowError):
        bad = next(number for number, row in enumerate(rows) if not all(_is_word(value) for value in row))
        raise InvalidArgumentError(f"descriptor {bad} is {rows[bad]}: three whole numbers from 0 to 2^64 - 1") from None


def _is_word(value: Any) -> bool:
    try:
        return 0 <= int(value) < 2**64 and int(value) == value
    except (TypeError, ValueError):
        return False


def _meta(number: int, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray):
        raise InvalidTypeError(f"the fourth entry of descriptor {number} is a {type(value).__name__}; it must be bytes or a string")
    return bytes(value)


def _check(addresses: U64, lengths: U64, devices: U64) -> None:
    if not addresses.shape == lengths.shape == devices.shape or addresses.ndim != 1:
        raise InvalidArgumentError(f"addresses, lengths and devices have shapes {addresses.shape}, {lengths.shape}, {devices.shape}")
    wrong = (addresses == 0) | (lengths == 0) | (lengths > ~addresses)
    if wrong.any():
        index = int(numpy.argmax(wrong))
        address, nbytes = int(addresses[index]), int(lengths[index])
        raise InvalidArgumentError(
            f"descriptor {index} is {nbytes} bytes at {address:#x}; a piece has at least one byte, an address, and ends below 2^64"
        )
