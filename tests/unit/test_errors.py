"""The tree of exceptions: callers catch by class, and by the builtin that they would expect."""

from __future__ import annotations

import inspect
import pickle

import pytest

from expertwire import errors

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


def test_every_class_is_below_the_root() -> None:
    assert len(CLASSES) >= 11
    assert all(issubclass(kind, errors.ExpertwireError) for kind in CLASSES)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidArgumentError, ValueError),
        (errors.InvalidTypeError, TypeError),
        (errors.InvalidTypeError, ValueError),
        (errors.StateError, RuntimeError),
        (errors.PeerError, ConnectionError),
        (errors.DeadlineError, TimeoutError),
    ],
)
def test_builtin_bases(kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise kind("why")


def test_classes_that_stand_for_different_things_do_not_catch_each_other() -> None:
    apart = [errors.CapacityError, errors.StateError, errors.MismatchError, errors.PeerError, errors.TransferError, errors.DeadlineError]
    for kind in apart:
        assert not any(issubclass(kind, other) for other in apart if other is not kind)


def test_peer_error_names_the_peer() -> None:
    assert errors.PeerError("rank 3 has died", rank=3).rank == 3
    assert errors.PeerError("somebody has died").rank == -1
    assert str(errors.PeerError("rank 3 has died", rank=3)) == "rank 3 has died"


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_cross_processes(kind: type[errors.ExpertwireError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("why")))
    assert type(copy) is kind
    assert str(copy) == "why"


def test_peer_error_keeps_its_rank_across_processes() -> None:
    assert pickle.loads(pickle.dumps(errors.PeerError("rank 3 has died", rank=3))).rank == 3
