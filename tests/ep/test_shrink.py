"""`Buffer.shrink` over real processes: killed and stopped in the middle of a dispatch, and in the middle of a shrink."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ep import shrinking
from harness import World

HEARTBEAT = {"EXPERTWIRE_LIVENESS": "heartbeat"}
LONG = pytest.mark.long
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)


@pytest.fixture
def doomed() -> Iterator[World]:
    """A world of its own, for a test that loses a rank."""
    own = World(4)
    try:
        yield own
    finally:
        own.close()


@pytest.mark.parametrize(
    ("node_of", "victims", "provider", "environment", "nodes_after"),
    [
        ((0, 0, 0, 0), (2,), "local", {}, (0, 0, 0)),
        pytest.param((0, 0, 1, 1), (0,), "tcp", {}, (0, 1, 1), marks=LONG),
        ((0, 1, 1, 2), (0, 3), "tcp", {}, (0, 0)),
        ((0, 0, 1, 1), (3,), "tcp", HEARTBEAT, (0, 0, 1)),
    ],
    ids=["one node", "a node becomes uneven", "two at once, two nodes end", "by heartbeat"],
)
def test_a_killed_rank_is_left_behind(
    doomed: World,
    node_of: tuple[int, ...],
    victims: tuple[int, ...],
    provider: str,
    environment: dict[str, str],
    nodes_after: tuple[int, ...],
) -> None:
    doomed.start(4, shrinking.die_in_dispatch, node_of, victims, provider, environment)
    answers = doomed.finish(60)
    for victim in victims:
        assert answers.pop(victim) == (False, "ended with exit code -9")
    left = tuple(sorted(answers))
    for rank, (returned, what) in answers.items():
        assert returned, f"rank {rank}: {what}"
        assert what["error"][:2][0] == "PeerError"
        first, second = what["first"], what["second"]
        assert first["members"] == first["began_as"] == left
        assert (first["rank"], first["size"], first["node_of"]) == (left.index(rank), len(left), nodes_after)
        assert second["members"] == tuple(range(len(left)))
        assert second["began_as"] == left
        kind, _, message = what["old handle"]
        assert kind == "InvalidArgumentError"
        assert "handle was made by this Buffer before shrink 1" in message
    assert doomed.exit_codes() == [-9 if rank in victims else 0 for rank in range(4)]


@pytest.mark.parametrize(("node_of", "provider"), [((0, 0, 0, 0), "local"), ((0, 0, 1, 1), "tcp")], ids=["local", "tcp"])
def test_a_stopped_rank_is_left_behind_and_learns_of_it(doomed: World, node_of: tuple[int, ...], provider: str) -> None:
    doomed.start(4, shrinking.stop_in_dispatch, node_of, 2, provider)
    for rank, (returned, what) in doomed.finish(60, without=[2]).items():
        assert returned, f"rank {rank}: {what}"
        assert what["error"][0] in ("DeadlineError", "PeerError")
        assert what["first"]["members"] == (0, 1, 3)
    doomed.wake(2)
    returned, what = doomed._collect(60, without=[0, 1, 3])[2]
    assert returned, what
    for name in ("error", "shrink"):
        kind, _, message = what[name]
        assert kind == "ExcludedError", what[name]
        assert "ranks [0, 1, 3] have agreed by shrink to go on without this one" in message
    assert what["later"][0] == "StateError"
    assert "ExcludedError" in what["later"][2]
    for returned, what in doomed_run(doomed, shrinking.after_it_woke):
        assert returned, what


def doomed_run(doomed: World, function: object) -> list[tuple[bool, object]]:
    """On the three that are left, while the fourth has nothing to do."""
    for rank, connection in enumerate(doomed._connections):
        connection.send((4, None if rank == 2 else function, ()))
    return list(doomed.finish(60).values())


def test_who_shrinks_alone_is_told_who_did_not_come(world: World) -> None:
    first = world.run(3, shrinking.alone, (0, 0, 1))[0]
    kind, _, message = first["alone"]
    assert kind == "DeadlineError"
    assert "shrink did not end within 1000 ms" in message
    for rank in (1, 2):
        assert f"rank {rank} has not called shrink (heartbeat " in message
    assert 0.9 < first["waited_s"] < 9
    assert first["later"][0] == "StateError"
    for rank, (one, two) in enumerate(world.run(3, shrinking.together)):
        assert one["members"] == two["members"] == (0, 1, 2)
        assert (two["rank"], two["node_of"]) == (rank, (0, 0, 1))


def test_a_buffer_of_both_modes(world: World) -> None:
    for what in world.run(4, shrinking.both_modes, (0, 0, 1, 1)):
        assert what["members"] == (0, 1, 2, 3)
        assert what["hook"][0] == "StateError"
        assert what["handle"][0] == "InvalidArgumentError"
        assert "after shrink 1>" in what["handle"][2]
        assert what["mask"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("node_of", "provider"), [pytest.param((0, 0, 0, 0), None, marks=LONG), ((0, 1, 1, 2), "tcp")], ids=["local", "tcp"]
)
def test_down_to_one_rank(doomed: World, node_of: tuple[int, ...], provider: str | None) -> None:
    doomed.start(4, shrinking.one_by_one, node_of, provider)
    answers = doomed.finish(60)
    returned, rows = answers[0]
    assert returned, rows
    assert [row["members"] for row in rows] == [(0, 1, 2), (0, 1), (0,)]
    assert rows[-1]["node_of"] == (0,)


# Each on one provider by default, and on the other with --long.
STRUCK = [
    ("killed as it begins, and as it makes", "tcp", {1: ("begin", KILL), 2: ("make", KILL)}),
    ("stopped as it makes", "local", {0: ("make", STOP)}),
    ("killed at any time", "local", {0: ("15", KILL), 3: ("40", KILL)}),
    ("stopped at any time", "tcp", {1: ("25", STOP)}),
]


@pytest.mark.parametrize(
    ("node_of", "provider", "victims"),
    [
        pytest.param(node_of, provider, victims, marks=[LONG] if provider != by_default else [], id=f"{name}-{provider}")
        for name, by_default, victims in STRUCK
        for node_of, provider in (((0, 0, 0, 0), "local"), ((0, 0, 1, 1), "tcp"))
    ],
)
def test_struck_in_the_middle_of_a_shrink(
    doomed: World, node_of: tuple[int, ...], provider: str, victims: dict[int, tuple[str, int]]
) -> None:
    doomed.start(4, shrinking.strike_in_shrink, node_of, provider, victims)
    left = tuple(rank for rank in range(4) if rank not in victims)
    answers = doomed.finish(60, without=list(victims))
    for rank, (_, how) in victims.items():
        if how == STOP:
            doomed.wake(rank)  # so that it ends with the others
    for rank, (returned, what) in answers.items():
        assert returned, f"rank {rank}: {what}"
        assert "error" not in what, what
        assert what["began_as"] == left
