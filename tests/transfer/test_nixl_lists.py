"""NIXL's lists of descriptors and its exceptions, of which nothing needs an agent."""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import pytest
import torch

from expertwire import errors
from expertwire.compat.nixl import _bindings as bindings
from expertwire.compat.nixl._bindings import (
    DRAM_SEG,
    EXCEPTIONS,
    VRAM_SEG,
    as_nixl,
    nixl_mem_t,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlRegDList,
    nixlUnknownError,
    nixlXferDList,
    translated,
)
from expertwire.transfer import Descriptors

ROWS = [(4096, 64, 0), (8192, 128, 3)]
TAGGED = [(4096, 64, 0, b"a"), (8192, 128, 3, b"")]


@pytest.mark.parametrize("given", [ROWS, tuple(ROWS), numpy.array(ROWS, dtype=numpy.uint64), numpy.array(ROWS, dtype=numpy.int64)])
def test_what_a_list_to_move_says(given: Any) -> None:
    made = nixlXferDList(DRAM_SEG, given)
    assert (made.getType(), made.descCount(), made.isEmpty(), len(made)) == (nixl_mem_t.DRAM_SEG, 2, False, 2)
    assert list(made) == ROWS
    assert made[-1] == ROWS[1]
    assert made == nixlXferDList(DRAM_SEG, ROWS)
    assert made != nixlXferDList(VRAM_SEG, ROWS)
    assert made != nixlRegDList(DRAM_SEG, ROWS)
    assert made.index(ROWS[1]) == 1
    with pytest.raises(nixlNotFoundError, match=r"\(1, 2, 3\) is not in this list of 2"):
        made.index((1, 2, 3))
    with pytest.raises(IndexError, match="descriptor 2 of 2"):
        made[2]


def test_a_list_changes() -> None:
    made = nixlXferDList(DRAM_SEG, 2)
    assert made.isEmpty()
    made.addDesc(ROWS[0])
    made.append(ROWS[1])
    assert made.descriptors() == Descriptors.of(ROWS, "DRAM")
    made[0] = (1, 2, 3)
    assert list(made) == [(1, 2, 3), ROWS[1]]
    made.remDesc(0)
    assert list(made) == [ROWS[1]]
    with pytest.raises(nixlInvalidParamError, match="descriptor 0 is 0 bytes"):
        made.append((1, 0, 0))
    with pytest.raises(IndexError):
        made.remDesc(1)
    made.clear()
    assert (len(made), len(made.descriptors())) == (0, 0)


def test_a_list_to_register_keeps_what_came_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = nixlRegDList(DRAM_SEG, TAGGED)
    assert list(made) == TAGGED
    assert made.trim() == nixlXferDList(DRAM_SEG, ROWS)
    assert made == nixlRegDList(DRAM_SEG, [(*ROWS[0], "a"), (*ROWS[1], "")])
    plain = nixlRegDList(DRAM_SEG, numpy.array(ROWS))
    assert list(plain) == [(*row, b"") for row in ROWS]
    assert plain != made
    assert plain == nixlRegDList(DRAM_SEG, [(*row, b"") for row in ROWS])
    plain.append((1, 2, 3))
    plain.append((1, 2, 4, "x"))
    assert list(plain)[2:] == [(1, 2, 3, b""), (1, 2, 4, b"x")]
    made.print()
    assert capsys.readouterr().out.splitlines() == ["nixlRegDList(DRAM, 2 descriptors)", *map(str, TAGGED)]
    assert pickle.loads(pickle.dumps(made)) == made


def test_tensors_stay_alive_in_a_list() -> None:
    tensor = torch.zeros(4, 5)
    made = nixlXferDList.of(Descriptors.of(tensor))
    assert made[0] == (tensor.data_ptr(), 80, 0)
    assert made.descriptors().owners == (tensor,)


@pytest.mark.parametrize("given", [[(1, 2)], [1, 2], "ab", numpy.zeros((2, 4)), numpy.zeros((2, 5), dtype=numpy.int64)])
def test_what_cannot_be_a_list_is_refused_in_words(given: Any) -> None:
    with pytest.raises(nixlInvalidParamError):
        nixlXferDList(DRAM_SEG, given)


def every_error(kind: type[errors.ExpertwireError] = errors.ExpertwireError) -> list[type[errors.ExpertwireError]]:
    found = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [kind, *(below for each in found for below in every_error(each))]


WANTED = {
    "NotFoundError": "nixlNotFoundError",
    "NotAllowedError": "nixlNotAllowedError",
    "ActiveError": "nixlRepostActiveError",
    "NotPostedError": "nixlNotPostedError",
    "NoTelemetryError": "nixlNoTelemetryError",
    "InvalidArgumentError": "nixlInvalidParamError",
    "InvalidTypeError": "nixlInvalidParamError",
    "MismatchError": "nixlMismatchError",
    "PeerError": "nixlRemoteDisconnectError",
    "CancelledRequestError": "nixlCancelledError",
    "TransferError": "nixlBackendError",
    "CapacityError": "nixlBackendError",
    "DeadlineError": "nixlBackendError",
    "UnavailableError": "nixlNotSupportedError",
    "StateError": "nixlUnknownError",
}


def test_every_error_has_its_exception() -> None:
    assert {theirs.__name__ for _, theirs in EXCEPTIONS} == {name for name in bindings.__all__ if name.endswith("Error")}
    for kind in every_error():
        theirs = as_nixl(kind("which peer, which descriptor"))
        named = next((WANTED[base.__name__] for base in kind.__mro__ if base.__name__ in WANTED), "nixlUnknownError")
        assert type(theirs).__name__ == named
        assert str(theirs) == "which peer, which descriptor"


def test_what_an_exception_stands_for_is_its_cause() -> None:
    @translated
    def fails() -> None:
        raise errors.StateError("closed")

    with pytest.raises(nixlUnknownError, match="closed") as caught:
        fails()
    assert isinstance(caught.value.__cause__, errors.StateError)

    @translated
    def fails_otherwise() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        fails_otherwise()
