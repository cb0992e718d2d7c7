"""How two agents meet: what the one that knocks says, and what it is answered. Bounded binary, never pickle. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from expertwire.errors import MismatchError
from expertwire.transfer.card import KEY_BYTES_MAX, NAME_BYTES_MAX, TOKEN_BYTES

__all__ = ["LENGTH", "RECORD_BYTES_MAX", "Answer", "Elsewhere", "Knock", "Later", "Record", "Refusal", "decode", "encode"]

LENGTH = struct.Struct("<I")  # before each record on the socket
RECORD_BYTES_MAX = 65_536
_HEAD = struct.Struct("<4sHH")
_MAGIC, _VERSION = b"EWK\n", 2
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BLOB_BYTES_MAX = 32_768
_WHY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Knock:
    """`number`: the one that I give you; `blob`: where I am reached, over `path` (a provider).

    `look`: the key of a little memory of mine, for you to see whether it can be reached; b"": no need. `visit`: grows with each knock, so
    that a parting that is read late is known to be of an earlier one.
    """

    token: bytes
    name: str
    instance: int
    number: int
    path: str
    visit: int
    blob: bytes
    look: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """`number`: the one that I give you; `blob`: where I am reached; `look`: as of a knock."""

    instance: int
    number: int
    blob: bytes
    look: bytes = b""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not."""

    why: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Not by that path, and why; perhaps by another."""

    why: str


@dataclass(frozen=True, slots=True)
class Later:
    """What was between us before is being ended; knock again soon."""

    why: str


Record = Knock | Answer | Refusal | Elsewhere | Later
_KINDS: dict[type[Record], int] = {Knock: 1, Answer: 2, Refusal: 3, Elsewhere: 4, Later: 5}


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise MismatchError(f"an introduction of {len(self._data)} bytes breaks off: {count} more are needed at byte {self._at}")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, form: struct.Struct) -> int:
        return int(form.unpack(self.take(form.size))[0])

    def sized(self, most: int, what: str) -> bytes:
        count = self.number(_U32)
        if count > most:
            raise MismatchError(f"an introduction's {what} has {count} bytes, the limit is {most}")
        return self.take(count)

    def text(self, most: int, what: str) -> str:
        try:
            return self.sized(most, what).decode()
        except UnicodeDecodeError:
            raise MismatchError(f"an introduction's {what} is not UTF-8") from None

    def finish(self) -> None:
        if self._at != len(self._data):
            raise MismatchError(f"{len(self._data) - self._at} bytes follow the end of an introduction")


def encode(record: Record) -> bytes:
    """The record as bytes, without its length."""
    head = _HEAD.pack(_MAGIC, _VERSION, _KINDS[type(record)])
    if isinstance(record, Refusal | Elsewhere | Later):
        why = record.why.encode()[:_WHY_BYTES_MAX].decode(errors="ignore").encode()
        return head + _U32.pack(len(why)) + why
    body = _U64.pack(record.instance) + _U32.pack(record.number) + _sized(record.blob) + _sized(record.look)
    if isinstance(record, Answer):
        return head + body
    return head + record.token + _sized(record.name.encode()) + _sized(record.path.encode()) + _U64.pack(record.visit) + body


def _sized(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


_REASONS: dict[int, type[Refusal | Elsewhere | Later]] = {3: Refusal, 4: Elsewhere, 5: Later}


def _reached(reader: _Reader) -> dict[str, Any]:
    instance, number = reader.number(_U64), reader.number(_U32)
    blob, look = reader.sized(_BLOB_BYTES_MAX, "blob"), reader.sized(KEY_BYTES_MAX, "key")
    return {"instance": instance, "number": number, "blob": blob, "look": look}


def decode(data: bytes) -> Record:
    """What `encode()` made. Raises `MismatchError` for anything else: what, where, the limit."""
    reader = _Reader(data)
    magic, version, kind = _HEAD.unpack(reader.take(_HEAD.size))
    if magic != _MAGIC:
        raise MismatchError(f"an introduction begins with {magic!r}; this is not one of expertwire's")
    if version != _VERSION:
        raise MismatchError(f"an introduction is of version {version}, this agent speaks {_VERSION}: install the same expertwire on both")
    record: Record
    if kind == 1:
        token, name = reader.take(TOKEN_BYTES), reader.text(NAME_BYTES_MAX, "name")
        path, visit = reader.text(NAME_BYTES_MAX, "path"), reader.number(_U64)
        record = Knock(token, name, path=path, visit=visit, **_reached(reader))
    elif kind == 2:
        record = Answer(**_reached(reader))
    elif kind in _REASONS:
        record = _REASONS[kind](reader.text(_WHY_BYTES_MAX, "reason"))
    else:
        raise MismatchError(f"an introduction is of kind {kind}; there are 1 to 5")
    reader.finish()
    return record
