"""Cards and lists of descriptors as bytes, and back: versioned, every length bounded, never code. Pure.

A record, little-endian: magic "EWTM", version, what it is, flags, bytes of the body, CRC-32 of all that and of the body; then the body. The
sum is against accidents: a flipped bit, or a burst of up to 32, is always seen. It is no signature: who alters a record can alter its sum.
"""

from __future__ import annotations

import struct
import zlib
from typing import NoReturn

import numpy

from expertwire.errors import InvalidArgumentError, MismatchError
from expertwire.transfer.card import AREAS_MAX, TOKEN_BYTES, Area, Card, Door
from expertwire.transfer.descriptors import KINDS, Descriptors

__all__ = ["CARD_BYTES_MAX", "DESCRIPTORS_MAX", "VERSION", "decode", "decode_descriptors", "encode", "encode_descriptors"]

MAGIC = b"EWTM"
VERSION = 2
DESCRIPTORS_MAX = 1 << 20
META_BYTES_MAX = 4096
CARD_BYTES_MAX = 40 << 20  # the largest card that there can be: 65,536 areas with names and keys as long as they may be
DESCRIPTOR_BYTES_MAX = 64 << 20

_HEAD = struct.Struct("<4sBBHI")
_SUM = struct.Struct("<I")
_AREA = struct.Struct("<BQQQBHH")
_LIST = struct.Struct("<BBI")
_CARD, _DESCRIPTORS = 1, 2
_NAMES = {_CARD: "an agent's metadata", _DESCRIPTORS: "a list of descriptors"}
_TAGGED = 1
_COLUMN_BYTES = 8


def encode(card: Card) -> bytes:
    """The card as a record; at most `CARD_BYTES_MAX` bytes, since a card bounds what is in it."""
    name, provider = card.name.encode(), card.provider.encode()
    host = card.host.encode()
    body = bytearray(struct.pack("<B", len(name)) + name + struct.pack("<QB", card.instance, len(provider)) + provider)
    body += struct.pack("<B", len(host)) + host
    if card.door is None:
        body += b"\0"
    else:
        door = card.door.host.encode()
        body += struct.pack("<BB", 1, len(door)) + door + struct.pack("<H", card.door.port) + card.door.token
    body += struct.pack("<BI", card.complete, len(card.areas))
    for area in card.areas:
        region = area.name.encode()
        sizes = len(region), len(area.key), len(area.near)
        body += _AREA.pack(KINDS.index(area.kind), area.address, area.nbytes, area.device, *sizes) + region + area.key + area.near
    return _record(_CARD, body)


def decode(data: bytes) -> Card:
    """The card that `encode` made a record of. Anything else, by a bit or a byte, is a `MismatchError` that says where it went wrong."""
    reader = _Reader(_body(_CARD, data, CARD_BYTES_MAX), _CARD)
    name = reader.text("the agent's name", reader.byte("the length of the agent's name"))
    instance = reader.unpack(struct.Struct("<Q"), "the instance")[0]
    provider = reader.text("the provider", reader.byte("the length of the provider"))
    host = reader.text("the host", reader.byte("the length of the host"))
    door = _door(reader)
    complete = reader.byte("whether all is on it")
    if complete > 1:
        reader.fail(f"whether all is on it is {complete}; it must be 0 or 1")
    count = reader.unpack(struct.Struct("<I"), "the number of areas")[0]
    if count > AREAS_MAX or count * _AREA.size > reader.left:
        reader.fail(f"it says that {count} areas follow; {reader.left} bytes do, and the limit is {AREAS_MAX}")
    rows = [_area(reader, index) for index in range(count)]
    reader.end()
    try:
        return Card(name, instance, provider, door, tuple(rows), bool(complete), host)
    except InvalidArgumentError as error:
        reader.fail(str(error))


def encode_descriptors(descriptors: Descriptors) -> bytes:
    """The list as a record, with its metas. Raises `InvalidArgumentError` above `DESCRIPTORS_MAX` descriptors or 4,096 bytes of a meta."""
    count, metas = len(descriptors), descriptors.metas
    if count > DESCRIPTORS_MAX:
        raise InvalidArgumentError(f"a list of {count} descriptors cannot be sent, the limit is {DESCRIPTORS_MAX}; send it in parts")
    body = bytearray(_LIST.pack(KINDS.index(descriptors.kind), 0 if metas is None else _TAGGED, count))
    for column in (descriptors.addresses, descriptors.lengths, descriptors.devices):
        body += column.astype("<u8").tobytes()
    for index, meta in enumerate(metas or ()):
        if len(meta) > META_BYTES_MAX:
            raise InvalidArgumentError(f"the fourth entry of descriptor {index} has {len(meta)} bytes, the limit is {META_BYTES_MAX}")
        body += struct.pack("<H", len(meta)) + meta
    if len(body) > DESCRIPTOR_BYTES_MAX:
        raise InvalidArgumentError(f"a list of {len(body)} bytes cannot be sent, the limit is {DESCRIPTOR_BYTES_MAX}; send it in parts")
    return _record(_DESCRIPTORS, body)


def decode_descriptors(data: bytes) -> Descriptors:
    """The list that `encode_descriptors` made a record of. Raises `MismatchError`."""
    reader = _Reader(_body(_DESCRIPTORS, data, DESCRIPTOR_BYTES_MAX), _DESCRIPTORS)
    kind, flags, count = reader.unpack(_LIST, "the kind of memory and the number of descriptors")
    if kind >= len(KINDS) or flags not in (0, _TAGGED):
        reader.fail(f"memory of kind {kind} with flags {flags:#x} is not known")
    if count > DESCRIPTORS_MAX or 3 * _COLUMN_BYTES * count > reader.left:
        reader.fail(f"it says that {count} descriptors follow; {reader.left} bytes do, and the limit is {DESCRIPTORS_MAX}")
    addresses, lengths, devices = (
        numpy.frombuffer(reader.take(_COLUMN_BYTES * count, what), dtype="<u8").astype(numpy.uint64)
        for what in ("the addresses", "the lengths", "the devices")
    )
    metas = tuple(_meta(reader, index) for index in range(count)) if flags == _TAGGED else None
    reader.end()
    try:
        return Descriptors(KINDS[kind], addresses, lengths, devices, metas)
    except InvalidArgumentError as error:
        reader.fail(str(error))


def _record(what: int, body: bytes | bytearray) -> bytes:
    head = _HEAD.pack(MAGIC, VERSION, what, 0, len(body))
    return b"".join((head, _SUM.pack(zlib.crc32(body, zlib.crc32(head))), body))


def _body(what: int, data: bytes, bytes_max: int) -> memoryview:
    """The body of a record that says it is `what`, once its head and its sum are right."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MismatchError(f"{_NAMES[what]} is bytes; this is a {type(data).__name__}")
    view = memoryview(data).cast("B")
    first = _HEAD.size + _SUM.size
    if len(view) < first:
        raise MismatchError(f"{len(view)} bytes are not {_NAMES[what]} of Expertwire: that has at least {first}")
    magic, version, found, flags, nbytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise MismatchError(
            f"this is not {_NAMES[what]} of Expertwire: it begins with {magic!r}, not {MAGIC!r}; both sides must use Expertwire"
        )
    if version != VERSION or flags != 0:
        raise MismatchError(
            f"{_NAMES[what]} is of version {version}, flags {flags:#x}; version {VERSION} is read here: use one release on both"
        )
    if found != what:
        raise MismatchError(f"this is {_NAMES.get(found, f'a record of kind {found}')}, not {_NAMES[what]}")
    if nbytes > bytes_max or nbytes != len(view) - first:
        raise MismatchError(
            f"{_NAMES[what]} says that it has {nbytes} bytes, {len(view) - first} are here, the limit is {bytes_max}: it was cut or grew"
        )
    if zlib.crc32(view[first:], zlib.crc32(view[: _HEAD.size])) != _SUM.unpack_from(view, _HEAD.size)[0]:
        raise MismatchError(f"{_NAMES[what]} has another check sum than it says: its {nbytes} bytes were altered on the way")
    return view[first:]


class _Reader:
    """Takes fields off the front of a body, none beyond its end."""

    def __init__(self, body: memoryview, what: int) -> None:
        self._body, self._what, self._at = body, what, 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, nbytes: int, field: str) -> memoryview:
        if nbytes > self.left:
            self.fail(f"{field} needs {nbytes} bytes, {self.left} are left")
        self._at += nbytes
        return self._body[self._at - nbytes : self._at]

    def unpack(self, form: struct.Struct, field: str) -> tuple[int, ...]:
        return form.unpack(self.take(form.size, field))

    def byte(self, field: str) -> int:
        return self.take(1, field)[0]

    def text(self, field: str, nbytes: int) -> str:
        try:
            return bytes(self.take(nbytes, field)).decode()
        except UnicodeDecodeError:
            self.fail(f"{field} is not UTF-8")

    def end(self) -> None:
        if self.left:
            self.fail(f"{self.left} bytes too many")

    def fail(self, why: str) -> NoReturn:
        raise MismatchError(f"{_NAMES[self._what]} cannot be read, at byte {self._at} of {len(self._body)}: {why}") from None


def _door(reader: _Reader) -> Door | None:
    there = reader.byte("whether there is a door")
    if there > 1:
        reader.fail(f"whether there is a door is {there}; it is 0 or 1")
    if not there:
        return None
    host = reader.text("the door's host", reader.byte("the length of the door's host"))
    port = reader.unpack(struct.Struct("<H"), "the door's port")[0]
    token = bytes(reader.take(TOKEN_BYTES, "the door's token"))
    try:
        return Door(host, port, token)
    except InvalidArgumentError as error:
        reader.fail(str(error))


def _area(reader: _Reader, index: int) -> Area:
    kind, address, nbytes, device, name_bytes, key_bytes, near_bytes = reader.unpack(_AREA, f"area {index}")
    if kind >= len(KINDS):
        reader.fail(f"area {index} is of kind {kind}, which is not known")
    name = reader.text(f"the name of area {index}", name_bytes)
    key = bytes(reader.take(key_bytes, f"the key of area {index}"))
    near = bytes(reader.take(near_bytes, f"the near key of area {index}"))
    try:
        return Area(KINDS[kind], address, nbytes, device, name, key, near)
    except InvalidArgumentError as error:
        reader.fail(f"area {index}: {error}")


def _meta(reader: _Reader, index: int) -> bytes:
    nbytes = reader.unpack(struct.Struct("<H"), f"the length of meta {index}")[0]
    if nbytes > META_BYTES_MAX:
        reader.fail(f"meta {index} has {nbytes} bytes, the limit is {META_BYTES_MAX}")
    return bytes(reader.take(nbytes, f"meta {index}"))
