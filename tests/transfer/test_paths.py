"""One agent with two paths: to agents of its own host by their memory, to others by the network; and how it is settled which."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import pytest

from expertwire.errors import InvalidArgumentError, MismatchError, NotFoundError, TransferError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from expertwire.testing.oracle import payload, payload_seed
from expertwire.transfer import Agent
from expertwire.transfer.ground import Ground
from expertwire.transfer.telemetry import Telemetry
from transfer import bodies
from transfer.world import LOCAL, TCP, agents

NBYTES = 1 << 16
DEFAULT = Settings(timeout_ms=20_000, interface="lo", liveness="auto")


class Blind(Ground):
    """Of an agent that may not look at others' memory, as in another container or under another user."""

    def near(self, settings: Settings, endpoint: Endpoint, **options: Any) -> Endpoint | None:
        made = super().near(settings, endpoint, **options)
        assert made is not None

        def refused(rank: int, name: str, nbytes: int, key: bytes) -> int:
            raise TransferError(f"region {name!r} of peer {rank} cannot be attached to: Operation not permitted")

        made.announce = refused  # type: ignore[method-assign]
        return made


class Side:
    """An agent and a piece of memory that it has registered."""

    def __init__(self, name: str, settings: Settings = DEFAULT, ground: Ground | None = None) -> None:
        self.agent = Agent(name, settings, ground=ground)
        self.memory = numpy.zeros(NBYTES, dtype=numpy.uint8)
        self.rows = [(int(self.memory.ctypes.data), NBYTES, 0)]
        self.agent.register(self.rows, "DRAM")

    def write(self, other: Side, seed: int, note: bytes = b"") -> str:
        """Its path."""
        self.memory[:] = payload(payload_seed(seed, 0), 0, NBYTES)
        transfer = self.agent.initialize("WRITE", self.rows, other.rows, other.agent.name, note, kind="DRAM")
        transfer.post()
        transfer.wait()
        assert (other.memory == self.memory).all()
        other.memory[:] = 0
        transfer.release()
        return transfer.path

    def waits_for(self, expected: dict[str, list[bytes]]) -> None:
        found: dict[str, list[bytes]] = {}
        while found != expected:
            for name, notes in self.agent.notifications().items():
                found.setdefault(name, []).extend(notes)
            assert sum(map(len, found.values())) <= sum(map(len, expected.values()))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def side(stack: ExitStack, name: str, settings: Settings = DEFAULT, ground: Ground | None = None) -> Side:
    made = Side(name, settings, ground)
    stack.callback(made.agent.close)
    return made


def test_processes_of_one_host_move_bytes_by_their_memory_and_come_back_under_their_name() -> None:
    with agents(["a", "b"], DEFAULT) as group:
        group["a"].call(bodies.register)
        for turn in range(2):
            group["a"].call(bodies.add, group["b"].call(bodies.register))
            assert group["a"].call(path_to, "b") == "local"
            group["a"].call(bodies.prepare, "b", group["b"].call(bodies.base_of), 32, 1040)
            assert group["a"].call(bodies.move, "WRITE", turn + 1, b"word") == (32, 32, "released")
            found, wrong = group["b"].call(bodies.written_with_word, 0, turn + 1, 32, 1040)
            assert found == {"a": [b"word"]}
            assert not wrong
            if turn == 0:
                group.kill("b")
                group["a"].call(remove, "b")
                group.restart("b")


def path_to(here: Any, name: str) -> str:
    return str(here.agent.path_to(name))


def remove(here: Any, name: str) -> None:
    here.agent.remove_remote(name)


def test_one_agent_reaches_some_by_memory_and_others_by_the_network(stack: ExitStack) -> None:
    a, b, far = side(stack, "a"), side(stack, "b"), side(stack, "far", TCP)
    assert a.agent.paths == ("tcp;ofi_rxm", "local")
    assert far.agent.paths == ("tcp;ofi_rxm",), "a provider that was asked for by name is the only one"
    for other in (b, far):
        a.agent.add_remote(other.agent.card())
        other.agent.add_remote(a.agent.card())
    assert [a.agent.path_to(name) for name in ("b", "far")] == ["local", "tcp;ofi_rxm"]
    assert far.agent.path_to("a") == "tcp;ofi_rxm"
    assert [a.write(b, 1, b"near"), a.write(far, 2, b"wide")] == ["local", "tcp;ofi_rxm"]
    assert [b.write(a, 3, b"near"), far.write(a, 4, b"wide")] == ["local", "tcp;ofi_rxm"]
    b.waits_for({"a": [b"near"]})
    far.waits_for({"a": [b"wide"]})
    a.waits_for({"b": [b"near"], "far": [b"wide"]})
    assert [a.agent.statistics(path).peers for path in a.agent.paths] == [1, 1], "each peer is known to one of them"
    with pytest.raises(InvalidArgumentError, match="agent 'a' has no path 'shm'; it has tcp;ofi_rxm, local"):
        a.agent.statistics("shm")
    a.agent.remove_remote("b")
    with pytest.raises(NotFoundError):
        a.agent.path_to("b")
    a.write(far, 5)
    a.agent.add_remote(b.agent.card())
    assert a.write(b, 6) == "local"


@pytest.mark.parametrize("blind", ["a", "b"])
def test_where_one_may_not_look_both_take_the_network(blind: str, stack: ExitStack) -> None:
    a, b = (side(stack, name, ground=Blind() if name == blind else None) for name in "ab")
    a.agent.add_remote(b.agent.card())
    b.agent.add_remote(a.agent.card())
    assert a.write(b, 1, b"to b") == b.write(a, 2, b"to a") == "tcp;ofi_rxm"
    b.waits_for({"a": [b"to b"]})
    a.waits_for({"b": [b"to a"]})
    assert [each.agent.statistics("local").peers for each in (a, b)] == [0, 0]


def test_another_host_is_not_tried(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    a.agent.add_remote(dataclasses.replace(b.agent.card(), host="another"))
    assert a.write(b, 1) == "tcp;ofi_rxm"
    assert b.agent.statistics("local").peers == 0


def test_who_has_one_path_is_met_on_it(stack: ExitStack) -> None:
    a, near, far = side(stack, "a"), side(stack, "near", LOCAL), side(stack, "far", TCP)
    near.agent.add_remote(a.agent.card())
    a.agent.add_remote(near.agent.card())
    assert near.write(a, 1) == a.write(near, 2) == "local"
    with pytest.raises(MismatchError, match="agent 'far' speaks 'tcp;ofi_rxm', this agent 'local'"):
        near.agent.add_remote(far.agent.card())


def test_memory_is_given_up_on_both_paths(stack: ExitStack) -> None:
    a, b, far = side(stack, "a"), side(stack, "b"), side(stack, "far", TCP)
    for other in (b, far):
        other.agent.add_remote(a.agent.card())
    waiting = [other.agent.initialize("WRITE", other.rows, a.rows, "a", kind="DRAM") for other in (b, far)]
    a.agent.deregister(a.rows, "DRAM")
    for transfer in waiting:
        transfer.post()
        with pytest.raises(TransferError, match="bad_key; the memory there is not registered any more"):
            transfer.wait()
        transfer.release()
    a.agent.register(a.rows, "DRAM")
    for other in (b, far):
        other.agent.add_remote(a.agent.card())
        other.write(a, 7)


def test_a_counter_names_the_path(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    a.agent.add_remote(b.agent.card())
    transfer = a.agent.initialize("WRITE", a.rows, b.rows, "b", kind="DRAM")
    transfer.post()
    transfer.wait()
    telemetry = Telemetry("a")
    telemetry.ended(transfer)
    assert f'expertwire_transfer_path_bytes_total{{agent="a",path="local"}} {NBYTES}' in telemetry.prometheus()
