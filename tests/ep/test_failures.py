"""A rank that dies, stays away, calls something else or is interrupted: who says what, how soon, and what works afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from ep import failing
from harness import World

HEARTBEAT = {"EXPERTWIRE_LIVENESS": "heartbeat"}
LONG = pytest.mark.long
SEEN_S, DESTROYED_S = 20.0, 10.0  # 10 s and 2 s, on a machine that is busy with other tests


@pytest.fixture
def doomed() -> Iterator[World]:
    """A world of its own, for a test that loses a rank."""
    own = World(4)
    try:
        yield own
    finally:
        own.close()


def check_all_name(doomed: World, victims: Sequence[int]) -> None:
    """Every survivor of the run has a PeerError that names a victim, in time, and leaves cleanly."""
    answers = doomed.finish(60)
    for victim in victims:
        assert answers.pop(victim) == (False, "ended with exit code -9")
    for rank, (returned, what) in answers.items():
        assert returned, f"rank {rank}: {what}"
        kind, at_fault, message = what["error"]
        assert kind == "PeerError", f"rank {rank}: {what['error']}"
        assert at_fault in victims, f"rank {rank}: {what['error']}"
        assert f"rank {at_fault}" in message
        assert what["seen_s"] < SEEN_S
        assert what["later"][0] == "StateError"
        assert f"PeerError: {message}" in what["later"][2], "the first error is kept"
        assert what["destroy_s"] < DESTROYED_S
    codes = doomed.exit_codes()
    assert codes == [-9 if rank in victims else 0 for rank in range(doomed.size)]


@pytest.mark.parametrize(
    ("node_of", "victims", "environment", "provider"),
    [
        ((0, 0, 0, 0), (2,), {}, None),
        ((0, 0, 1, 1), (0,), {}, "tcp"),
        ((0, 0, 1, 1), (3,), HEARTBEAT, "tcp"),
        ((0, 1, 2, 3), (0,), HEARTBEAT, "local"),
        pytest.param((0, 0, 1, 1), (0,), HEARTBEAT, "tcp", marks=LONG),
        ((0, 0, 1, 1), (0, 3), HEARTBEAT, "tcp"),
        pytest.param((0, 1, 1, 1), (1, 2), {}, "tcp", marks=LONG),
    ],
    ids=[
        "one node",
        "rank 0 of two nodes",
        "two nodes by heartbeat",
        "rank 0 by heartbeat",
        "rank 0 of two nodes by heartbeat",
        "two at once by heartbeat",
        "two at once",
    ],
)
def test_a_killed_rank_is_named_by_all_others(
    doomed: World, node_of: tuple[int, ...], victims: tuple[int, ...], environment: dict[str, str], provider: str | None
) -> None:
    doomed.start(4, failing.die_in_dispatch, node_of, victims, environment, provider)
    check_all_name(doomed, victims)


@pytest.mark.parametrize("environment", [{}, pytest.param(HEARTBEAT, marks=LONG)], ids=["pidfd", "heartbeat"])
def test_a_rank_killed_in_combine_is_named_by_all_others(doomed: World, environment: dict[str, str]) -> None:
    doomed.start(4, failing.die_in_combine, (0, 0, 1, 1), (2,), environment)
    check_all_name(doomed, (2,))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_the_bootstrap_keeps_nobody(doomed: World, victim: int) -> None:
    doomed.start(4, failing.die_in_bootstrap, (0, 0, 1, 1), victim)
    answers = doomed.finish(60)
    assert answers.pop(victim) == (False, "ended with exit code -9")
    for rank, (returned, what) in answers.items():
        assert returned, f"rank {rank}: {what}"
        assert what["error"][0] in ("PeerError", "DeadlineError"), what["error"]
        assert f"rank {victim} has not come to it" in what["error"][2], what["error"]
        assert what["seen_s"] < SEEN_S


@pytest.mark.parametrize("absent", [(2,), (0, 3)], ids=str)
def test_who_does_not_come_to_a_construction_is_named(doomed: World, absent: tuple[int, ...]) -> None:
    doomed.start(4, failing.who_does_not_come, absent)
    for rank, (returned, what) in doomed.finish(60).items():
        assert returned, what
        if rank not in absent:
            assert what[0] == "DeadlineError"
            who = f"ranks {list(absent)} have" if len(absent) > 1 else f"rank {absent[0]} has"
            assert f"rank {rank}: making a Buffer, {who} not come to it within 1500 ms" in what[2]


def test_a_rank_that_leaves_is_not_named_for_one_that_is_silent() -> None:
    own = World(3)
    try:
        own.start(3, failing.leave_behind_a_stopped_rank)
        returned, what = own.finish(60, without=[2])[0]
        assert returned, what
        assert what["error"][:2] == ("PeerError", 2), what["error"]
        assert what["seen_s"] < SEEN_S
    finally:
        own.wake(2)
        own.close()


@pytest.mark.parametrize(
    ("node_of", "environment"),
    [
        ((0, 0, 0), {}),
        ((0, 0, 1), HEARTBEAT),
        pytest.param((0, 0, 0), HEARTBEAT, marks=LONG),
        pytest.param((0, 0, 1), {}, marks=LONG),
    ],
    ids=["one node", "two nodes by heartbeat", "one node by heartbeat", "two nodes"],
)
def test_a_rank_that_closes_its_buffer_before_a_call_keeps_nobody(node_of: tuple[int, ...], environment: dict[str, str]) -> None:
    own = World(3)
    try:
        own.start(3, failing.leave_before_a_call, node_of, 1, environment)
        for rank, (returned, what) in own.finish(60).items():
            assert returned, what
            if rank != 1:
                assert what["error"][:2] == ("PeerError", 1), what["error"]
                assert "has closed its Buffer" in what["error"][2]
                assert what["seen_s"] < SEEN_S
        assert own.exit_codes() == [0, 0, 0]
    finally:
        own.close()


@pytest.mark.parametrize("node_of", [(0, 0, 1)], ids=str)
def test_a_stopped_rank_is_missed_by_its_heartbeat(node_of: tuple[int, ...]) -> None:
    own = World(3)
    try:
        own.start(3, failing.stopped, node_of, 1)
        answers = own.finish(60, without=[1])
        for returned, what in answers.values():
            assert returned, what
            assert what["error"][:2] == ("PeerError", 1)
            assert what["seen_s"] < SEEN_S
    finally:
        own.wake(1)
        own.close()


@pytest.mark.parametrize("node_of", [pytest.param((0, 0, 0), marks=LONG), (0, 0, 1)], ids=str)
def test_a_deadline_says_who_is_missing(world: World, node_of: tuple[int, ...]) -> None:
    results = world.run(3, failing.deadline, node_of, 1)
    for rank in (0, 2):
        kind, _, message = results[rank]["error"]
        assert kind == "DeadlineError"
        assert f"rank {rank}" in message
        assert "rank 1" in message
        assert "notify" in message
        assert "not in this call" in message
        assert "5.0 s" in message
        assert 4.9 < results[rank]["waited_s"] < 15
        assert len(results[rank]["reports"]) == 1, "after 2 s, and then only every 5 s"
        assert re.search(r"nothing has moved for [234]\.", results[rank]["reports"][0]), results[rank]["reports"]
        assert "rank 1: waiting for its notify; it is not in this call: its last was call 2 (heartbeat " in results[rank]["reports"][0]
        assert results[rank]["later"][0] == "StateError"
        assert "DeadlineError" in results[rank]["later"][2]
    assert max(world.run(3, failing.end_of_deadline)) < DESTROYED_S


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_another_call_is_named_and_survived(world: World, node_of: tuple[int, ...]) -> None:
    for kind, _, message in world.run(3, failing.other_call, node_of):
        assert kind == "MismatchError"
        assert "rank 1" in message
        assert "dispatch" in message
        assert "combine" in message
    for kind, _, message in world.run(3, failing.other_handle, node_of):
        assert kind == "MismatchError"
        assert "the handle (number of its dispatch, 0: none) is 1 on rank 0 and 2 on rank 1" in message
    for kind, _, message in world.run(3, failing.other_shape, node_of):
        assert kind == "MismatchError"
        assert "rank 1" in message
        assert "64" in message
        assert "96" in message
    for kind, _, message in world.run(3, failing.other_type, node_of):
        assert kind == "MismatchError"
        assert "type of x is bfloat16 on rank 0 and float8_e4m3fn on rank 1" in message


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_too_many_rows_are_refused_by_all(world: World, node_of: tuple[int, ...]) -> None:
    for kind, _, message in world.run(3, failing.too_much, node_of):
        assert kind == "CapacityError"
        assert "rank 0" in message
        assert "1200" in message, "rows"
        assert str(64 << 10) in message, "capacity"


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_ctrl_c_is_answered_and_fails_the_buffer(world: World, node_of: tuple[int, ...]) -> None:
    out = world.run(2, failing.interrupted, node_of)[0]
    assert out["answered_s"] < 5  # 100 ms, on a machine that is busy with other tests; its deadline is 20 s
    assert out["later"][0] == "StateError"
    assert "KeyboardInterrupt" in out["later"][2]
    assert out["destroy_s"] < DESTROYED_S
    world.run(2, failing.end_of_interrupted)
