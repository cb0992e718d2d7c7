"""How two agents meet: what the one that knocks says, and what it is answered. Bounded binary, never pickle. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from expertwire.errors import MismatchError
from expertwire.transfer.card import NAME_BYTES_MAX, TOKEN_BYTES

__all__ = ["LENGTH", "RECORD_BYTES_MAX", "Answer", "Knock", "Record", "Refusal", "decode", "encode"]

LENGTH = struct.Struct("<I")  # before each record on the socket
RECORD_BYTES_MAX = 65_536
_HEAD = struct.Struct("<4sHH")
_MAGIC, _VERSION = b"EWK\n", 1
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BLOB_BYTES_MAX = 32_768
_WHY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Knock:
    """`number`: the one that I give you; `blob`: where I am reached."""

    token: bytes
    name: str
    instance: int
    number: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """`number`: the one that I give you; `blob`: where I am reached."""

    instance: int
    number: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not."""

    why: str


Record = Knock | Answer | Refusal


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
    kinds = {Knock: 1, Answer: 2, Refusal: 3}
    head = _HEAD.pack(_MAGIC, _VERSION, kinds[type(record)])
    if isinstance(record, Refusal):
        why = record.why.encode()[:_WHY_BYTES_MAX].decode(errors="ignore").encode()
        return head + _U32.pack(len(why)) + why
    body = _U64.pack(record.instance) + _U32.pack(record.number) + _U32.pack(len(record.blob)) + record.blob
    if isinstance(record, Answer):
        return head + body
    name = record.name.encode()
    return head + record.token + _U32.pack(len(name)) + name + body


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
        record = Knock(token, name, reader.number(_U64), reader.number(_U32), reader.sized(_BLOB_BYTES_MAX, "blob"))
    elif kind == 2:
        record = Answer(reader.number(_U64), reader.number(_U32), reader.sized(_BLOB_BYTES_MAX, "blob"))
    elif kind == 3:
        record = Refusal(reader.text(_WHY_BYTES_MAX, "reason"))
    else:
        raise MismatchError(f"an introduction is of kind {kind}; there are 1 to 3")
    reader.finish()
    return record
