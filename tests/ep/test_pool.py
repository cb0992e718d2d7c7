"""The pool of extents: nothing is given twice, nothing is lost, and the reserve holds."""

from __future__ import annotations

import ctypes
import gc
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertwire.ep.cpu.pool import EXTENT_ALIGNMENT, Extent, Extents, Pool
from expertwire.errors import CapacityError

PAGE = EXTENT_ALIGNMENT


class ExtentsMachine(RuleBasedStateMachine):
    CAPACITY = 64

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(self.CAPACITY)
        self.taken: list[Extent] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if not self.extents.free:
            return
        free = data.draw(st.sampled_from(self.extents.free))
        start = data.draw(st.integers(free.offset, free.end - 1))
        length = data.draw(st.integers(1, free.end - start))
        self.extents.take(Extent(start, length))
        self.taken.append(Extent(start, length))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.extents.give(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def take_twice(self, data: st.DataObject) -> None:
        with pytest.raises(CapacityError, match="is not free"):
            self.extents.take(data.draw(st.sampled_from(self.taken)))

    @precondition(lambda self: self.extents.free)
    @rule(data=st.data())
    def give_twice(self, data: st.DataObject) -> None:
        with pytest.raises(CapacityError, match="was not taken"):
            self.extents.give(data.draw(st.sampled_from(self.extents.free)))

    @invariant()
    def tiles_exactly(self) -> None:
        pieces = sorted([*self.extents.free, *self.taken], key=lambda extent: extent.offset)
        assert [piece.offset for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == self.CAPACITY

    @invariant()
    def free_is_coalesced_and_largest_first_found(self) -> None:
        free = self.extents.free
        assert all(one.end < other.offset for one, other in itertools.pairwise(free))
        longest = max((extent.length for extent in free), default=0)
        assert self.extents.largest() == next((extent for extent in free if extent.length == longest), Extent(0, 0))


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Holder:
    """Stands for a handle: only its life matters."""


def pool_of(pages: int) -> tuple[Pool, ctypes.Array[ctypes.c_char]]:
    memory = ctypes.create_string_buffer(pages * PAGE)
    return Pool(ctypes.addressof(memory), pages * PAGE, memory), memory


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 24), st.booleans()), max_size=30))
def test_there_is_always_something_to_offer(steps: list[tuple[int, int, bool]]) -> None:
    pool, backing = pool_of(32)
    results: list[ctypes.Array[ctypes.c_char]] = []
    holders: list[Holder] = []
    for pages, need, drop in steps:
        offer = pool.offer()
        assert offer.length >= pool.reserve_bytes
        used = min(pages * PAGE, offer.length)
        if need:
            if len(holders) > 2:
                holders.pop(0)
            holder = Holder()
            # as a dispatch does: a handle asks for no more than one result can be large
            before = pool.reserve_bytes
            pool.reserve_for(holder, min(need * PAGE, before))
            holders.append(holder)
        kept = pool.keep(offer, used)
        if kept is None:
            pool.withdraw(offer)
        else:
            assert ctypes.addressof(kept) == ctypes.addressof(backing) + offer.offset
            assert len(kept) == used
            results.append(kept)
        del kept
        if drop and results:
            results.pop(0)
        starts = sorted((ctypes.addressof(result), len(result)) for result in results)
        assert all(start + length <= following for (start, length), (following, _) in itertools.pairwise(starts))
    results.clear()
    assert pool.free_bytes == 32 * PAGE


def test_a_result_that_would_eat_into_the_reserve_is_refused() -> None:
    pool, _ = pool_of(16)
    first = pool.keep(pool.offer(), 8 * PAGE)
    assert first is not None
    offer = pool.offer()
    assert offer == Extent(8 * PAGE, 8 * PAGE)
    assert pool.keep(offer, 5 * PAGE) is None  # 3 pages would be left, 4 are the reserve
    pool.withdraw(offer)
    again = pool.offer()
    assert again == offer
    assert pool.keep(again, 4 * PAGE) is not None


def test_a_living_handle_keeps_room_for_its_combine() -> None:
    pool, _ = pool_of(16)
    holder = Holder()
    pool.reserve_for(holder, 6 * PAGE)
    assert pool.reserve_bytes == 6 * PAGE
    offer = pool.offer()
    assert pool.keep(offer, 11 * PAGE) is None
    pool.withdraw(offer)
    del holder
    gc.collect()
    assert pool.reserve_bytes == 4 * PAGE
    assert pool.keep(pool.offer(), 11 * PAGE) is not None


def test_no_more_than_half_is_kept_for_a_combine_that_goes_in_rounds_anyway() -> None:
    pool, _ = pool_of(16)
    holder = Holder()
    pool.reserve_for(holder, 40 * PAGE)
    assert pool.reserve_bytes == 8 * PAGE
    assert pool.keep(pool.offer(), 8 * PAGE) is not None
    del holder


def test_memory_keeps_its_owner() -> None:
    pool, backing = pool_of(2)
    memory = pool.memory(Extent(PAGE, 8))
    memory[:8] = b"expertwi"
    assert backing.raw[PAGE : PAGE + 8] == b"expertwi"
    assert memory.owner is backing  # type: ignore[attr-defined]
