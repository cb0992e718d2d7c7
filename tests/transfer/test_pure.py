"""The pure parts: descriptor lists, areas, merging of neighbours, the table of states, cards."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import pytest
import torch

from expertwire.errors import InvalidArgumentError, InvalidTypeError, NotFoundError
from expertwire.fabric import Status
from expertwire.transfer.areas import AreaTable
from expertwire.transfer.card import Area, Card, Door
from expertwire.transfer.descriptors import Descriptors
from expertwire.transfer.runs import Runs, indices_of, same_lengths
from expertwire.transfer.states import NEVER_POSTED, RELEASED, TransferState, state_of

ROWS = [(4096, 64, 0), (8192, 128, 3), (1, 1, 0)]


def strided(*rows: tuple[int, int, int, int, int]) -> numpy.ndarray[Any, Any]:
    return numpy.array(rows, dtype=numpy.uint64)


def test_tuples_and_arrays_of_any_layout_say_the_same() -> None:
    wide = numpy.zeros((3, 6), dtype=numpy.int64)
    wide[:, ::2] = ROWS
    forms: list[Any] = [ROWS, tuple(ROWS), numpy.array(ROWS, dtype=numpy.uint64), numpy.array(ROWS, dtype=numpy.int64), wide[:, ::2]]
    lists = [Descriptors.of(form, kind) for form, kind in zip(forms, itertools.cycle(("DRAM", "cpu")), strict=False)]
    assert all(each == lists[0] for each in lists)
    assert lists[0].rows() == ROWS
    assert (len(lists[0]), lists[0].nbytes, lists[0][1]) == (3, 193, (8192, 128, 3))
    assert Descriptors.of(lists[0]) is lists[0]
    assert lists[0].take(numpy.array([2, 0, 2])).rows() == [ROWS[2], ROWS[0], ROWS[2]]
    assert lists[0] != Descriptors.of(ROWS, "VRAM")
    with pytest.raises(ValueError, match="read-only"):
        lists[0].addresses[0] = 7


def test_a_strided_row_stands_for_its_pieces_in_order() -> None:
    found = Descriptors.of(strided((4096, 8, 1, 64, 3), (100, 4, 0, 4, 2), (2**64 - 17, 16, 0, 2**63, 1)), "DRAM")
    assert found.rows() == [(4096, 8, 1), (4160, 8, 1), (4224, 8, 1), (100, 4, 0), (104, 4, 0), (2**64 - 17, 16, 0)]
    assert len(Descriptors.of(strided()[:0].reshape(0, 5), "DRAM")) == 0


def test_what_comes_with_tuples_is_kept() -> None:
    tagged = Descriptors.of([(4096, 64, 0, b"\0a"), (8192, 64, 0, "b")], "DRAM")
    assert tagged.metas == (b"\0a", b"b")
    assert len(Descriptors.of([], "DRAM")) == 0
    assert Descriptors.of([(2**64 - 2, 1, 2**64 - 1)], "DRAM").rows() == [(2**64 - 2, 1, 2**64 - 1)]


def test_tensors_say_where_they_are_and_are_kept() -> None:
    first, second = torch.zeros(4, 5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
    both = Descriptors.of([first, second])
    assert both.rows() == [(first.data_ptr(), 40, 0), (second.data_ptr(), 24, 0)]
    assert both.kind == "DRAM"
    assert both.owners == (first, second)
    assert Descriptors.of(second, "DRAM").rows() == both.rows()[1:]


@pytest.mark.parametrize(
    ("given", "kind", "error", "says"),
    [
        (ROWS, None, InvalidArgumentError, "do not say what memory"),
        (ROWS, "RAM", InvalidArgumentError, "'RAM' is not known"),
        (torch.zeros(4), "VRAM", InvalidArgumentError, "the memory is DRAM, VRAM was asked for"),
        (torch.zeros(4, 4).t()[1:], None, InvalidArgumentError, "not contiguous"),
        ([torch.zeros(4), 3], None, InvalidTypeError, "entry 1"),
        (torch.zeros(0), None, InvalidArgumentError, "descriptor 0 is 0 bytes"),
        ("abc", "DRAM", InvalidTypeError, "are a str"),
        ([(1, 2)], "DRAM", InvalidTypeError, "tuples"),
        ([(1, 2, 3), (1, 2, 3, b"")], "DRAM", InvalidTypeError, "tuples"),
        ([(4096, 64, 0), 5], "DRAM", InvalidTypeError, "tuples"),
        ([(4096, 64, 0), (1, -2, 3)], "DRAM", InvalidArgumentError, "descriptor 1"),
        ([(4096, 64, "x")], "DRAM", InvalidArgumentError, "descriptor 0"),
        ([(4096, 64, 0), (4096, "64", 0)], "DRAM", InvalidArgumentError, "descriptor 1"),
        ([(4096, 64, 0), (4096, 64.5, 0)], "DRAM", InvalidArgumentError, "descriptor 1"),
        ([(4096, 64, 0, 7)], "DRAM", InvalidTypeError, "fourth entry of descriptor 0"),
        ([(4096, 64, 0), (0, 5, 0)], "DRAM", InvalidArgumentError, "descriptor 1 is 5 bytes at 0x0"),
        ([(2**64 - 8, 8, 0)], "DRAM", InvalidArgumentError, "ends below"),
        (numpy.zeros((2, 3), dtype=numpy.float64), "DRAM", InvalidTypeError, "float64"),
        (numpy.zeros((2, 4), dtype=numpy.int64), "DRAM", InvalidArgumentError, "shape"),
        (
            strided((4096, 8, 0, 8, 1), (4096, 8, 0, 7, 2)),
            "DRAM",
            InvalidArgumentError,
            "descriptor 1 is .4096, 8, 0, 7, 2.: .*stride at least",
        ),
        (strided((4096, 8, 0, 8, 0)), "DRAM", InvalidArgumentError, "count is at least 1"),
        (strided((4096, 8, 0, 8, 2**40)), "DRAM", InvalidArgumentError, "name 1099511627776 pieces, the limit is 16777216"),
        (strided((2**64 - 64, 8, 0, 32, 3)), "DRAM", InvalidArgumentError, "last piece does not end below"),
        (strided((4096, 8, 0, 2**63, 4)), "DRAM", InvalidArgumentError, "last piece does not end below"),
        (strided((4096, 0, 0, 8, 2)), "DRAM", InvalidArgumentError, "descriptor 0 is 0 bytes"),
        (strided((4096, 8, 0, 8, 1)), None, InvalidArgumentError, "do not say what memory"),
        (strided((4096, 8, 0, 8, 1)).astype(numpy.int64) * -1, "DRAM", InvalidArgumentError, "no number of it may be negative"),
        (numpy.array([(4096, 64, 0), (4096, -1, 0)]), "DRAM", InvalidArgumentError, "descriptor 1"),
    ],
)
def test_what_cannot_be_a_descriptor_is_refused_in_words(given: Any, kind: str | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Descriptors.of(given, kind)


def test_areas_are_found_as_by_looking_at_each() -> None:
    draw = random.Random(5)
    for _ in range(60):
        areas = [(draw.randrange(1, 400), draw.randrange(1, 120)) for _ in range(draw.randrange(1, 9))]
        table = AreaTable(*zip(*areas, strict=True))
        pieces = [(draw.randrange(1, 500), draw.randrange(1, 60), 0) for _ in range(60)]
        asked = Descriptors.of(pieces, "DRAM")
        inside = [any(start <= at and at + size <= start + length for start, length in areas) for at, size, _ in pieces]
        assert table.covers(asked).tolist() == inside
        good = asked.take(numpy.flatnonzero(inside))
        numbers, offsets = table.find(good, "this agent")
        for (at, size, _), number, offset in zip(good.rows(), numbers, offsets, strict=True):
            start, length = areas[int(number)]
            assert start + int(offset) == at
            assert int(offset) + size <= length
        if not all(inside):
            with pytest.raises(NotFoundError, match=rf"descriptor {inside.index(False)} .* 'b' has registered"):
                table.find(asked, "agent 'b'")


def test_no_areas_hold_nothing() -> None:
    table = AreaTable([], [])
    assert not table.covers(Descriptors.of(ROWS, "DRAM")).any()
    with pytest.raises(NotFoundError, match="0 areas"):
        table.find(Descriptors.of(ROWS, "DRAM"), "this agent")


def runs_of(rows: list[tuple[int, int, int, int, int]]) -> Runs:
    table = numpy.array(rows, dtype=numpy.uint64).reshape(len(rows), 5).T
    return Runs(table[0].astype(numpy.uint32), table[1], table[2].astype(numpy.uint32), table[3], table[4])


def rows_of(runs: Runs) -> list[tuple[int, ...]]:
    return [
        tuple(map(int, row)) for row in zip(runs.locals_, runs.local_offsets, runs.remotes, runs.remote_offsets, runs.lengths, strict=True)
    ]


def test_neighbours_on_both_sides_become_one_run() -> None:
    rows = [
        (0, 0, 1, 100, 10),
        (0, 10, 1, 110, 20),
        (0, 30, 1, 130, 5),
        (0, 35, 1, 136, 5),
        (1, 40, 1, 141, 5),
        (1, 45, 2, 146, 1),
        (1, 46, 2, 147, 2),
    ]
    assert rows_of(runs_of(rows).merged()) == [(0, 0, 1, 100, 35), (0, 35, 1, 136, 5), (1, 40, 1, 141, 5), (1, 45, 2, 146, 3)]
    assert rows_of(runs_of(rows[:1]).merged()) == rows[:1]
    assert rows_of(runs_of(rows[3:5]).merged()) == rows[3:5]


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_the_same_bytes_in_order_and_none_is_too_large(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 40)
    rows = [(index % 3, 10_000 * index, 7, 20_000 * index, draw.choice((1, 3, 16, 17, 160, 999))) for index in range(count)]
    operations, chunk_bytes = draw.randrange(1, 20), draw.choice((16, 100, 2**63))
    runs = runs_of(rows)
    parts = runs.parts(operations, chunk_bytes)
    for part in parts:
        assert 0 < sum(-(-int(length) // chunk_bytes) for length in part.lengths) <= operations
    moved = [(row[0], row[1] + at, row[2], row[3] + at) for part in parts for row in rows_of(part) for at in range(row[4])]
    assert moved == [(row[0], row[1] + at, row[2], row[3] + at) for row in rows for at in range(row[4])]
    assert runs.parts(10**6, chunk_bytes) == [runs]


def test_merging_moves_the_same_bytes() -> None:
    draw = random.Random(11)
    for _ in range(40):
        rows, here, there = [], 0, 0
        for _ in range(draw.randrange(1, 30)):
            here += draw.choice((0, 0, 0, 3))
            there += draw.choice((0, 0, 0, 7))
            size = draw.randrange(1, 6)
            rows.append((draw.choice((0, 0, 0, 1)), here, draw.choice((0, 0, 0, 1)), there, size))
            here, there = here + size, there + size

        def moved(given: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            return [(a, ao + i, b, bo + i) for a, ao, b, bo, size in given for i in range(size)]

        merged = rows_of(runs_of(rows).merged())
        assert moved(merged) == moved(rows)
        for (a, ao, b, bo, size), (c, co, d, do, _) in itertools.pairwise(merged):
            assert (a, ao + size, b, bo + size) != (c, co, d, do)


def test_indices_are_whole_numbers_below_the_count() -> None:
    assert indices_of(None, 3, "local").tolist() == [0, 1, 2]
    for given in (2, [2], (2,), numpy.array([2], dtype=numpy.uint32), torch.tensor([2])):
        assert indices_of(given, 3, "local").tolist() == [2]
    for wrong, says in (([0, 3], "local index 1 is 3; .* 3 desc"), ([-1], "index 0 is -1"), ([], "no local indices")):
        with pytest.raises(InvalidArgumentError, match=says):
            indices_of(wrong, 3, "local")
    for odd in ([0.5], [[0, 1]], ["a"], [[0], [1, 2]]):
        with pytest.raises(InvalidTypeError):
            indices_of(odd, 3, "local")


def test_two_sides_have_to_pair() -> None:
    def lengths(*values: int) -> numpy.ndarray[Any, Any]:
        return numpy.array(values, dtype=numpy.uint64)

    same_lengths(lengths(4, 5), lengths(4, 5))
    for mine, theirs, says in (
        ((4, 5), (4,), "2 local and 1 remote"),
        ((4, 5), (4, 6), "descriptor 1 has 5 bytes here and 6"),
        ((), (), "no desc"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            same_lengths(lengths(*mine), lengths(*theirs))


def test_every_status_of_the_core_is_a_state() -> None:
    failures = set(Status) - {Status.OK, Status.PENDING}
    assert {state_of(status) for status in failures} == {TransferState.FAILED}
    assert state_of(Status.OK) is TransferState.DONE
    assert state_of(Status.PENDING) is TransferState.ACTIVE
    assert state_of(NEVER_POSTED) is TransferState.READY
    assert state_of(RELEASED) is TransferState.RELEASED


def test_cards_hold_what_they_may_and_merge() -> None:
    door = Door("127.0.0.1", 7, b"t" * 16)
    first = Area("DRAM", 4096, 64, 0, "#3", b"k")
    card = Card("a", 5, "local", door, (first,))
    anew, more = Area("DRAM", 4096, 64, 0, "#3", b"other"), Area("DRAM", 8192, 64, 0, "#4", b"k")
    both = card.merged(Card("a", 5, "local", None, (anew, more)))
    assert both.areas == (anew, more)
    assert both.door == door
    for wrong in (
        lambda: Card("", 5, "local", door, ()),
        lambda: Card("n" * 256, 5, "local", door, ()),
        lambda: Card("a", 0, "local", door, ()),
        lambda: Card("a", 5, "", door, ()),
        lambda: Card("a", 5, "local", door, (first,) * 65_537),
        lambda: Area("DRAM", 0, 64, 0, "#3", b""),
        lambda: Area("DRAM", 2**64 - 64, 64, 0, "#3", b""),
        lambda: Area("RAM", 4096, 64, 0, "#3", b""),
        lambda: Area("DRAM", 4096, 64, 0, "", b""),
        lambda: Area("DRAM", 4096, 64, 0, "#3", b"k" * 257),
        lambda: Door("", 7, b"t" * 16),
        lambda: Door("h", 0, b"t" * 16),
        lambda: Door("h", 7, b"t"),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()
