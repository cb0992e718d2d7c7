"""Cards and lists of descriptors as bytes: whatever goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zlib
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from expertwire.errors import InvalidArgumentError, MismatchError
from expertwire.transfer import metadata
from expertwire.transfer.card import AREAS_MAX, KEY_BYTES_MAX, TOKEN_BYTES, Area, Card, Door
from expertwire.transfer.descriptors import KINDS, Descriptors

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WORD = some.integers(0, 2**64 - 1)
NAME = some.text(some.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
AREA = some.builds(
    Area,
    some.sampled_from(KINDS),
    some.integers(1, 2**63),
    some.integers(1, 2**63 - 1),
    WORD,
    some.text(some.characters(exclude_categories=["Cs"]), min_size=1, max_size=16),
    some.binary(max_size=KEY_BYTES_MAX),
    some.binary(max_size=KEY_BYTES_MAX),
)
DOOR = some.builds(Door, NAME, some.integers(1, 65_535), some.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
CARD = some.builds(
    Card,
    NAME,
    some.integers(1, 2**64 - 1),
    NAME,
    some.none() | DOOR,
    some.lists(AREA, max_size=5).map(tuple),
    some.booleans(),
    some.just("") | NAME,
)
PIECE = some.tuples(some.integers(1, 2**63), some.integers(1, 2**63 - 1), WORD)
LIST = some.builds(lambda rows, kind: Descriptors.of(rows, kind), some.lists(PIECE, max_size=8), some.sampled_from(KINDS)) | some.builds(
    lambda rows, kind: Descriptors.of(rows, kind),
    some.lists(some.builds(lambda piece, meta: (*piece, meta), PIECE, some.binary(max_size=20)), min_size=1, max_size=8),
    some.sampled_from(KINDS),
)
EXAMPLE = Card(
    "prefill", 7, "tcp", Door("10.0.0.1", 4711, b"0123456789abcdef"), (Area("DRAM", 4096, 64, 0, "#1", b"key", b"near"),), True, "host"
)


@FEW
@given(CARD)
def test_a_card_comes_back(card: Card) -> None:
    assert metadata.decode(metadata.encode(card)) == card


@FEW
@given(LIST)
def test_a_list_comes_back(descriptors: Descriptors) -> None:
    back = metadata.decode_descriptors(metadata.encode_descriptors(descriptors))
    assert back == descriptors
    assert back.metas == descriptors.metas
    assert {array.dtype for array in (back.addresses, back.lengths, back.devices)} == {numpy.dtype(numpy.uint64)}


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (metadata.encode(EXAMPLE), metadata.decode),
        (metadata.encode_descriptors(Descriptors.of([(4096, 64, 0, b"ab"), (8192, 1, 3, b"")], "DRAM")), metadata.decode_descriptors),
    ],
    ids=["card", "descriptors"],
)
def test_every_truncation_flip_and_addition_is_seen(data: bytes, read: Any) -> None:
    for nbytes in range(len(data)):
        with pytest.raises(MismatchError):
            read(data[:nbytes])
    for bit in range(8 * len(data)):
        altered = bytearray(data)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MismatchError):
            read(bytes(altered))
    with pytest.raises(MismatchError, match="cut or grew"):
        read(data + b"\0")


@FEW
@given(some.binary(max_size=300), some.sampled_from([1, 2]))
def test_any_body_with_a_right_head_and_sum_is_read_or_refused(body: bytes, kind: int) -> None:
    """What gets past the sum is what somebody means to send: no other exception, nothing that is not a card."""
    head = struct.pack("<4sBBHI", metadata.MAGIC, metadata.VERSION, kind, 0, len(body))
    data = head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
    try:
        found: Any = metadata.decode(data) if kind == 1 else metadata.decode_descriptors(data)
    except MismatchError:
        return
    assert (metadata.encode(found) if kind == 1 else metadata.encode_descriptors(found)) == data


@FEW
@given(some.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for read in (metadata.decode, metadata.decode_descriptors):
        with pytest.raises(MismatchError):
            read(data)


def sealed(kind: int, body: bytes) -> bytes:
    head = struct.pack("<4sBBHI", metadata.MAGIC, metadata.VERSION, kind, 0, len(body))
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def test_what_a_record_claims_costs_no_memory() -> None:
    """Counts and lengths are compared with the bytes that are there before anything is made of them."""
    bodies = [
        (1, b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + struct.pack("<I", AREAS_MAX)),
        (1, b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + struct.pack("<I", 2**32 - 1)),
        (2, struct.pack("<BBI", 0, 0, metadata.DESCRIPTORS_MAX)),
        (2, struct.pack("<BBI", 0, 1, 2**32 - 1)),
    ]
    tracemalloc.start()
    try:
        for kind, body in bodies:
            with pytest.raises(MismatchError, match="follow; 0 bytes do"):
                (metadata.decode if kind == 1 else metadata.decode_descriptors)(sealed(kind, body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    claimed = struct.pack("<4sBBHI", metadata.MAGIC, metadata.VERSION, 1, 0, 2**32 - 1) + bytes(4)
    with pytest.raises(MismatchError, match="says that it has 4294967295 bytes, 0 are here"):
        metadata.decode(claimed)


def test_a_pickle_is_refused_unread() -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (pytest.fail, ("a pickle was run",))

    for read in (metadata.decode, metadata.decode_descriptors):
        with pytest.raises(MismatchError, match="both sides must use Expertwire"):
            read(pickle.dumps(Trap()))
    with pytest.raises(MismatchError, match="this is a str"):
        metadata.decode("text")  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="list of descriptors, not an agent's metadata"):
        metadata.decode(metadata.encode_descriptors(Descriptors.of([], "DRAM")))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\1a" + struct.pack("<QB", 0, 1) + b"p\0\0\1" + bytes(4), "instance is 0"),
        (b"\0" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + bytes(4), "name is ''"),
        (b"\1\xff" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + bytes(4), "the agent's name is not UTF-8"),
        (b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\2" + bytes(4), "whether there is a door is 2"),
        (b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\1\1h" + bytes(18) + bytes(4), "a door has a host, a port"),
        (b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + struct.pack("<IBQQQBHH", 1, 9, 1, 1, 0, 1, 0, 0) + b"#", "area 0 is of kind 9"),
        (
            b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + struct.pack("<IBQQQBHH", 1, 0, 0, 1, 0, 1, 0, 0) + b"#",
            "area 0: an area of 1 bytes at",
        ),
        (
            b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + struct.pack("<IBQQQBHH", 1, 0, 1, 1, 0, 1, 257, 0) + b"#" + bytes(257),
            "257 and 0 bytes, the limit is 256",
        ),
        (b"\1a" + struct.pack("<QB", 1, 1) + b"p\0\0\1" + bytes(5), "1 bytes too many"),
    ],
    ids=["instance", "name", "utf8", "flag", "door", "kind", "area", "key", "end"],
)
def test_a_refusal_says_where_and_what(body: bytes, says: str) -> None:
    with pytest.raises(MismatchError, match=rf"cannot be read, at byte \d+ of {len(body)}: .*{says}"):
        metadata.decode(sealed(1, body))


def test_limits_are_said() -> None:
    big = Card("n" * 255, 1, "p" * 255, None, (Area("DRAM", 1, 1, 0, "x" * 64, bytes(256), bytes(256)),) * AREAS_MAX)
    assert len(metadata.encode(big)) < metadata.CARD_BYTES_MAX
    many = Descriptors.of(numpy.ones((metadata.DESCRIPTORS_MAX + 1, 3), dtype=numpy.uint64), "DRAM")
    with pytest.raises(InvalidArgumentError, match="1048577 descriptors cannot be sent, the limit is 1048576"):
        metadata.encode_descriptors(many)
    with pytest.raises(InvalidArgumentError, match="descriptor 0 has 4097 bytes, the limit is 4096"):
        metadata.encode_descriptors(Descriptors.of([(1, 1, 1, bytes(4097))], "DRAM"))
