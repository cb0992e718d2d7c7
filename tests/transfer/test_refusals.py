"""What fails before anything is enqueued (SPEC X3): nothing is taken, what stands in the queue goes on, and no byte changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import pytest

from expertwire.errors import ExpertwireError
from expertwire.transfer import Agent, TransferState
from transfer.stale import NBYTES, Two
from transfer.world import BOTH


@pytest.fixture(scope="module", params=list(BOTH))
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with ExitStack() as stack:
        found = Two(*(stack.enter_context(Agent(name, BOTH[request.param])) for name in "ab"))
        found.a.add_remote(found.card)
        yield found


def rows_at(memory: numpy.ndarray[Any, Any], *pieces: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(int(memory.ctypes.data) + offset, nbytes, 0) for offset, nbytes in pieces]


def whole(two: Two) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    return rows_at(two.here, (0, 64), (128, 64)), rows_at(two.there, (0, 64), (128, 64))


REFUSED: dict[str, tuple[Any, str]] = {
    "no piece": (lambda here, there: ([], []), "^InvalidArgumentError: there are no descriptors"),
    "no byte": (lambda here, there: ([here[0], (here[1][0], 0, 0)], there), "^InvalidArgumentError: descriptor 1 is 0 bytes at"),
    "address 0": (lambda here, there: ([(0, 64, 0), here[1]], there), "^InvalidArgumentError: descriptor 0 is 64 bytes at 0x0"),
    "no number": (lambda here, there: ([here[0], (here[1][0], "64", 0)], there), "^InvalidArgumentError: descriptor 1 is"),
    "below 0": (lambda here, there: (here, [there[0], (there[1][0], -64, 0)]), "^InvalidArgumentError: descriptor 1 is"),
    "half a byte": (lambda here, there: (here, [there[0], (there[1][0], 64.5, 0)]), "^InvalidArgumentError: descriptor 1 is"),
    "above 2^63": (lambda here, there: ([(here[0][0], 2**63 + 8, 0)], [(there[0][0], 2**63 + 8, 0)]), "^NotFoundError: descriptor 0"),
    "above 2^64": (lambda here, there: ([(here[0][0], 2**64, 0)], [(there[0][0], 2**64, 0)]), "^InvalidArgumentError: descriptor 0 is"),
    "round the end": (lambda here, there: ([(here[0][0], 2**64 - 8, 0)], there), "^InvalidArgumentError: descriptor 0 is .* ends below 2"),
    "other lengths": (
        lambda here, there: (here, [there[0], (there[1][0], 63, 0)]),
        "^InvalidArgumentError: descriptor 1 has 64 bytes here and 63",
    ),
    "other counts": (lambda here, there: (here, there[:1]), "^InvalidArgumentError: 2 local and 1 remote"),
    "not registered here": (
        lambda here, there: ([here[0], (64, 64, 0)], there),
        "^NotFoundError: descriptor 1 .* this agent has",
    ),
    "not registered there": (
        lambda here, there: (here, [(64, 64, 0), there[1]]),
        "^NotFoundError: descriptor 0 .* agent 'b' has registered",
    ),
    "one byte beyond": (
        lambda here, there: ([here[0]], [(there[0][0] + NBYTES - 63, 64, 0)]),
        "^NotFoundError: descriptor 0 .* agent 'b' has registered",
    ),
}


def post_of(two: Two, here: Any, there: Any, name: str = "b", kind: str = "DRAM") -> None:
    two.a.initialize("WRITE", here, there, name, kind=kind).post()


def said_by(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except ExpertwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_cannot_be_moved_is_refused_and_work_before_and_behind_it_is_done(two: Two) -> None:
    here, there = whole(two)
    first = two.a.initialize("WRITE", here, there, "b", b"first", kind="DRAM")
    last = two.a.initialize("READ", here, there, "b", b"last", kind="DRAM")
    two.here[:], two.there[:] = 7, 1
    first.post()
    for name, (change, says) in REFUSED.items():
        said = said_by(post_of, two, *change(list(here), list(there)))
        assert re.match(says, said), f"{name}: {said}"
    for kind in ("VRAM", "FILE", "OBJ", "BLOCK"):
        assert said_by(post_of, two, here, there, "b", kind).startswith("UnavailableError: ")
    assert "'nobody' is not known here" in said_by(post_of, two, here, there, "nobody")
    last.post()
    for transfer in (first, last):
        transfer.wait()
        transfer.release()
    heard: list[bytes] = []
    while len(heard) < 2:
        heard += two.b.notifications().get("a", [])
    assert heard == [b"first", b"last"]
    assert numpy.count_nonzero(two.there == 7) == 128
    assert numpy.count_nonzero(two.there == 1) == NBYTES - 128


def test_a_notification_that_cannot_be_sent_leaves_the_transfer_as_it_was(two: Two) -> None:
    two.there[:] = 1
    transfer = two.a.initialize("WRITE", rows_at(two.here, (0, 64)), rows_at(two.there, (0, 64)), "b", b"kept", kind="DRAM")
    for bad in (bytes(9000), "text"):
        said = said_by(transfer.post, bad)
        assert said.startswith("InvalidArgumentError: a notification "), said
        assert transfer.state() is TransferState.READY
    assert said_by(two.a.notify, "b", bytes(9000)).startswith("InvalidArgumentError: a notification has 9000 bytes")
    assert two.b.notifications() == {}
    assert numpy.all(two.there == 1)
    transfer.post()
    transfer.wait()
    transfer.release()
    while not (said_there := two.b.notifications()):
        pass
    assert said_there == {"a": [b"kept"]}


def test_pieces_that_overlap_are_moved_each_for_itself(two: Two) -> None:
    """Not refused: what lies twice at one place is there as one of those that went there."""
    two.here[:] = numpy.arange(NBYTES) % 251
    two.there[:] = 0
    here, there = rows_at(two.here, (0, 64), (32, 64), (200, 8)), rows_at(two.there, (0, 64), (32, 64), (0, 8))
    transfer = two.a.initialize("WRITE", here, there, "b", kind="DRAM")
    transfer.post()
    transfer.wait()
    transfer.release()
    assert two.there[8:96].tolist() == two.here[8:96].tolist()
    assert two.there[:8].tolist() in (two.here[:8].tolist(), two.here[200:208].tolist())
