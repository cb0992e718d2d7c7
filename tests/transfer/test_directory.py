"""A directory's own rules; what goes by socket and by store between agents is in test_nixl_calls.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from expertwire.errors import InvalidArgumentError, MismatchError, NotAllowedError, NotFoundError, StateError, UnavailableError
from expertwire.transfer import Agent, Directory, metadata
from expertwire.transfer.listener import fetch, send, withdraw

HOST = "127.0.0.1"


@pytest.fixture
def pair() -> Iterator[tuple[Directory, Agent]]:
    """A directory that listens, of agent "one", and agent "two"."""
    with Agent("one") as one, Agent("two") as two:
        directory = Directory(one)
        directory.listen([HOST], 0)
        yield directory, two
        directory.close()


def test_who_visits_is_added_and_forgotten(pair: tuple[Directory, Agent]) -> None:
    directory, two = pair
    assert metadata.decode(fetch(HOST, directory.port)).name == "one"
    send(HOST, directory.port, metadata.encode(two.card()))
    assert directory.check("two")
    with pytest.raises(NotAllowedError, match="agent 'two' is known here as another process than the one that withdraws it"):
        withdraw(HOST, directory.port, "two", two.instance ^ 1)
    withdraw(HOST, directory.port, "nobody", 1)
    assert directory.check("two")
    withdraw(HOST, directory.port, "two", two.instance)
    assert not directory.check("two")
    withdraw(HOST, directory.port, "two", two.instance)
    with pytest.raises(NotFoundError, match="'two'"):
        directory.remove("two")


def test_what_a_listener_does_not_take(pair: tuple[Directory, Agent]) -> None:
    directory, two = pair
    own = metadata.encode(directory._agent.card())
    with pytest.raises(MismatchError, match="are not an agent's metadata of Expertwire"):
        send(HOST, directory.port, b"garbage")
    with pytest.raises(InvalidArgumentError, match="'one' needs no card"):
        directory.add(own)
    with pytest.raises(InvalidArgumentError, match=r"refuses: .*'one' needs no card"):
        send(HOST, directory.port, own)
    with pytest.raises(InvalidArgumentError, match="label 'layer 1' is for a store"):
        fetch(HOST, directory.port, "layer 1")
    assert directory._agent.remotes() == []
    assert two.remotes() == []


def test_one_listener_a_directory(pair: tuple[Directory, Agent]) -> None:
    directory, two = pair
    with pytest.raises(StateError, match=f"agent 'one' listens at port {directory.port} already"):
        directory.listen([HOST], 0)
    other = Directory(two)
    with pytest.raises(StateError, match="agent 'two' does not listen"):
        _ = other.port
    with pytest.raises(UnavailableError, match="no store for metadata, and no address was given"):
        other.send(two.card())
    other.close()


def test_visitors_of_an_agent_that_has_ended_are_told(pair: tuple[Directory, Agent]) -> None:
    directory, two = pair
    directory._agent.close()
    with pytest.raises(StateError, match="refuses: the agent that listened here is closed"):
        send(HOST, directory.port, metadata.encode(two.card()))


def test_a_listener_keeps_nobody_alive() -> None:
    with Agent("short") as agent:
        directory = Directory(agent)
        directory.listen([HOST], 0)
        listener = directory._listener
        assert listener is not None
        del directory
        gc.collect()
        with pytest.raises(StateError, match="closed"):
            fetch(HOST, listener.port)
        listener.close()
