"""How an agent learns of others, and they of it, without a channel of the caller's own: by a listener's socket, or by a store."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertwire.errors import InvalidArgumentError, MismatchError, NotAllowedError, StateError, UnavailableError
from expertwire.transfer import listener as by_socket
from expertwire.transfer import metadata
from expertwire.transfer.card import Card
from expertwire.transfer.store import MetadataStore

if TYPE_CHECKING:
    from expertwire.transfer.agent import Agent
    from expertwire.transfer.descriptors import Descriptors

__all__ = ["Directory"]


class Directory:
    """Cards of one agent, and to it: with an address by socket, without one by `store`. Both ends of a socket have the same `token`."""

    def __init__(self, agent: Agent, *, store: MetadataStore | None = None, token: bytes = b"", timeout_ms: int = 5000) -> None:
        self._agent, self._store, self._token, self._timeout_ms = agent, store, token, timeout_ms
        self._known: dict[str, int] = {}  # the instance of each remote that was added here
        self._stored: set[tuple[str, str]] = set()  # (name, label) that came from the store
        self._lock = threading.Lock()
        self._listener: by_socket.Listener | None = None

    @property
    def port(self) -> int:
        """Where others reach this agent. Raises `StateError` where it does not listen."""
        if self._listener is None:
            raise StateError(f"agent {self._agent.name!r} does not listen for metadata")
        return self._listener.port

    def listen(self, hosts: Sequence[str], port: int) -> None:
        """Take and give cards there; `port` 0: the system chooses. Raises `UnavailableError`."""
        if self._listener is not None:
            raise StateError(f"agent {self._agent.name!r} listens at port {self._listener.port} already")
        self._listener = by_socket.Listener(hosts, port, _Answers(self), self._token)

    def add(self, data: bytes) -> str:
        """Add the agent whose card that is, as bytes; its name. Raises what `decode` and `Agent.add_remote` do."""
        card = metadata.decode(data)
        name = self._agent.add_remote(card)  # which may take a while: whoever asks about others meanwhile does not wait
        with self._lock:
            self._known[name] = card.instance
        return name

    def remove(self, name: str) -> None:
        """Forget an agent. Raises what `Agent.remove_remote` does."""
        self._agent.remove_remote(name)
        with self._lock:
            self._known.pop(name, None)
            self._stored = {pair for pair in self._stored if pair[0] != name}

    def send(self, card: Card, host: str = "", port: int = 0, label: str = "") -> None:
        """To the listener there, which has added it when this returns; without a host into the store, under a label.

        Raises what `listener.send` and `MetadataStore.publish` do, and `UnavailableError` without a host and a store.
        """
        data = metadata.encode(card)
        if host:
            by_socket.send(host, port, data, self._token, timeout_ms=self._timeout_ms)
        else:
            self._needed_store().publish(card.name, data, label)

    def fetch(self, name: str, host: str = "", port: int = 0, label: str = "") -> None:
        """Add agent `name`, from its listener or the store; waits for either up to the deadline. Raises what these do."""
        if host:
            data = by_socket.fetch(host, port, label, self._token, timeout_ms=self._timeout_ms)
        else:
            data = self._needed_store().fetch(name, label, timeout_ms=self._timeout_ms)
        found = metadata.decode(data).name
        if found != name:
            raise MismatchError(f"agent {name!r} was asked for at {host or 'the store'}, and {found!r} is what was found there")
        self.add(data)
        if not host:
            with self._lock:
                self._stored.add((name, label))

    def withdraw(self, host: str = "", port: int = 0) -> None:
        """Be forgotten by the agent that listens there; without a host by the store, and by who fetched from it once it looks again."""
        if host:
            by_socket.withdraw(host, port, self._agent.name, self._agent.instance, self._token, timeout_ms=self._timeout_ms)
        else:
            self._needed_store().withdraw(self._agent.name)

    def check(self, name: str, memory: Descriptors | None = None) -> bool:
        """Whether that agent is known, with those pieces of memory. Who was fetched from the store and has withdrawn is forgotten here."""
        with self._lock:
            labels = [label for stored, label in self._stored if stored == name]
        if any(self._needed_store().withdrawn(name, label) for label in labels) and self._agent.knows(name):
            self.remove(name)
        return self._agent.knows(name, memory)

    def close(self) -> None:
        """Listen no more. Again: nothing."""
        if self._listener is not None:
            self._listener.close()

    def _needed_store(self) -> MetadataStore:
        if self._store is None:
            raise UnavailableError("there is no store for metadata, and no address was given: give a listener's host and port, or a store")
        return self._store


class _Answers:
    """What a listener asks; it keeps neither directory nor agent alive."""

    def __init__(self, directory: Directory) -> None:
        self._directory = weakref.ref(directory)

    def _here(self) -> Directory:
        found = self._directory()
        if found is None or found._agent.closed:
            raise StateError("the agent that listened here is closed")
        return found

    def card_of(self, label: str) -> bytes:
        if label:
            raise InvalidArgumentError(f"an agent gives all of its metadata by socket; label {label!r} is for a store")
        return metadata.encode(self._here()._agent.card())

    def card_came(self, data: bytes) -> None:
        self._here().add(data)

    def card_withdrawn(self, name: str, instance: int) -> None:
        directory = self._here()
        with directory._lock:
            known = directory._known.get(name)
        if known is None or not directory._agent.knows(name):
            return
        if known != instance:
            raise NotAllowedError(f"agent {name!r} is known here as another process than the one that withdraws it")
        directory.remove(name)
