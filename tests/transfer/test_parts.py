"""Transfers of more pieces than the transport's tables hold: as any other, but for what they are made of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy
import pytest

from expertwire.errors import ActiveError, StateError, TransferError
from expertwire.fabric.lanes import BULK_CHUNK_BYTES
from expertwire.transfer import Agent, TransferState
from transfer.stale import Two
from transfer.world import BOTH

PIECES, EACH = 9000, 8
OPERATIONS_MAX = 4096
END = PIECES * 16


@pytest.fixture(params=list(BOTH))
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(*(stack.enter_context(Agent(name, BOTH[request.param], operations_max=OPERATIONS_MAX)) for name in "ab"))


def scattered(memory: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]) -> list[tuple[int, int, int]]:
    return [(int(memory.ctypes.data) + 16 * index, EACH, 0) for index in range(PIECES)]


def test_it_ends_once_and_its_word_comes_behind_all_of_it(two: Two) -> None:
    two.a.add_remote(two.card)
    two.here[:] = numpy.arange(len(two.here)) % 251
    transfer = two.a.initialize("WRITE", scattered(two.here), scattered(two.there), "b", b"all", kind="DRAM")
    assert transfer.run_count == PIECES
    for turn in range(3):
        two.there[:] = 1
        transfer.post(b"%d" % turn)
        with pytest.raises(ActiveError):
            transfer.post()
        if turn == 0:
            transfer.wait()
        elif turn == 1:
            while transfer.check() is TransferState.ACTIVE:
                pass
        else:
            asyncio.run(awaited(transfer))
        while not (said := two.b.notifications()):
            assert two.there[:END].reshape(-1, 16)[:, :EACH].tolist() == two.here[:END].reshape(-1, 16)[:, :EACH].tolist()
        assert said == {"a": [b"%d" % turn]}
        assert numpy.all(two.there[:END].reshape(-1, 16)[:, EACH:] == 1)
    transfer.release()
    assert "expertwire parts" not in {thread.name for thread in threading.enumerate()}


async def awaited(transfer: object) -> None:
    await transfer  # type: ignore[misc]


def test_one_piece_of_more_bytes_than_the_tables_have_chunks_for(two: Two) -> None:
    """With the tables of an agent's default that is what has more than 8 GiB."""
    with ExitStack() as stack:
        agents = [stack.enter_context(Agent(name, two.a._endpoint.settings, operations_max=16)) for name in "ab"]
        few = Two(agents[0], agents[1], 9 * BULK_CHUNK_BYTES + 5)
        few.a.add_remote(few.card)
        few.here[:] = numpy.arange(len(few.here)) % 251
        assert not few.move("WRITE", few.there, len(few.there))
        assert numpy.array_equal(few.here, few.there)


def test_where_one_part_fails_the_transfer_has_failed_and_none_follows(two: Two) -> None:
    two.a.add_remote(two.card)
    rows = [*scattered(two.there)[:4000], *([(int(two.always.ctypes.data) + 16 * i, EACH, 0) for i in range(200)] * 25)]
    transfer = two.a.initialize("WRITE", scattered(two.here), rows, "b", b"never", kind="DRAM")
    two.b.deregister([(int(two.always.ctypes.data), two.always.nbytes, 0)], "DRAM")
    for _ in range(2):
        transfer.post()
        with pytest.raises(TransferError, match="WRITE of 9000 descriptors, 72000 bytes, with agent 'b' failed: bad_key"):
            transfer.wait()
        assert transfer.state() is TransferState.FAILED
    transfer.release()
    assert not two.always.any()
    assert two.b.notifications() == {}
    assert not two.move("WRITE", two.there)


def test_an_agent_closes_with_one_on_its_way(two: Two) -> None:
    two.a.add_remote(two.card)
    transfer = two.a.initialize("READ", scattered(two.here), scattered(two.there), "b", kind="DRAM")
    transfer.post()
    two.a.close()
    until = time.monotonic() + 10
    while transfer.state() is TransferState.ACTIVE:
        assert time.monotonic() < until
    if transfer.state() is TransferState.FAILED:  # else it was done before
        assert isinstance(transfer.error, StateError)
    transfer.release()
