"""An agent: registers memory, knows other agents by name, moves bytes between theirs and its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from types import TracebackType
from typing import Any

from expertwire.errors import InvalidArgumentError, StateError
from expertwire.fabric import Endpoint, Statistics
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import boot_id
from expertwire.transfer.card import TOKEN_BYTES, Card, Door, check_name
from expertwire.transfer.connections import Connections, Identity
from expertwire.transfer.descriptors import Descriptors
from expertwire.transfer.ground import NEAR, Ground
from expertwire.transfer.memory import Registry
from expertwire.transfer.requests import LANES, NOTIFICATION, Prepared, Transfer, check_notification
from expertwire.transfer.runs import Runs, indices_of, same_lengths
from expertwire.transfer.states import TransferState

__all__ = ["Agent"]

_OPERATIONS = ("READ", "WRITE")
_SLICE_MS = 20  # the agent's lock is not held for longer


class Agent:
    """Known to others by `name`. A context manager; `close()` ends it. Calls may come from several threads, not from a forked child.

    Whom it is to reach it is told by their `card()`, which goes from one to the other by whatever means there are. Then it reads and writes
    memory that they have registered, while they need do nothing; they learn of it by notifications.
    """

    def __init__(
        self,
        name: str,
        settings: Settings | None = None,
        *,
        peers_max: int = 128,
        regions_max: int = 4096,
        requests_max: int = 4096,
        operations_max: int = 65_536,
        notifications_max: int = 65_536,
        connect_timeout_ms: int = 5000,
        hosts: int = 2,
        lanes: int = LANES,
        ground: Ground | None = None,
    ) -> None:
        """`regions_max`: registrations at one time. `requests_max`: transfers on their way. `operations_max`: pieces of all of them, once
        neighbours are merged and what is large is cut; a transfer of more goes in parts. `notifications_max`: that wait here for
        `notifications()`, and as many again in the transport. `hosts`: 1 where all agents are on this host (chooses the interface, as
        `EXPERTWIRE_INTERFACE` does). `lanes`: 1 sends small and large to a peer over one queue pair, in order, which is for comparisons;
        the same at all agents that meet. `ground`: what it stands on, for simulations.

        Raises `InvalidArgumentError`, `UnavailableError` (no such provider here, no interface), `CapacityError` (no memory).
        """
        self.name = check_name(name)
        if lanes not in (1, LANES):
            raise InvalidArgumentError(f"lanes is {lanes}; an agent has 1 or {LANES} to each peer")
        self.instance = secrets.randbits(63) + 1
        settings = Settings.from_environment() if settings is None else settings
        ground = Ground() if ground is None else ground
        options: dict[str, Any] = {
            "size": peers_max + 1,
            "lanes": lanes,
            "endpoints": lanes,
            "hosts": hosts,
            "requests_max": requests_max,
            "operations_max": operations_max,
            "regions_max": min(regions_max + 2, 65_536),  # its own, and one to look at
            "notifications_max": notifications_max,
            "independent": True,
        }
        self._endpoint = ground.endpoint(settings, **options)
        near = ground.near(settings, self._endpoint, **options)
        self._endpoints: tuple[Endpoint, ...] = (self._endpoint,) if near is None else (self._endpoint, near)
        self.provider = self._endpoint.provider
        self._host = boot_id() if NEAR in self.paths else ""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._registry = Registry(self._endpoints)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._connections = Connections(
            self._endpoints,
            ground.knock,
            self._lock,
            Identity(self.name, self.instance, token, self._host),
            peers_max=peers_max,
            connect_timeout_ms=connect_timeout_ms,
            notifications_max=notifications_max,
        )
        try:
            for endpoint in self._endpoints:
                endpoint.start()
            host = ground.host(self._endpoint, settings, hosts)
            lives = weakref.WeakMethod(self._connections.welcome), weakref.WeakMethod(self._connections.look_around)
            self._keeper = ground.door(
                host,
                lambda knock: welcome(knock) if (welcome := lives[0]()) else None,
                lambda: look() if (look := lives[1]()) else False,
            )
        except BaseException:
            for endpoint in self._endpoints:
                endpoint.close(0)
            raise
        self._door = Door(host, self._keeper.port, token)

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, {' and '.join(self.paths)}{', closed' if self.closed else ''})"

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._endpoint.native.closed

    @property
    def paths(self) -> tuple[str, ...]:
        """The providers that lead to others: `provider`, which leads to all, and the one between agents of this host where there is one."""
        return tuple(endpoint.provider for endpoint in self._endpoints)

    def path_to(self, name: str) -> str:
        """Which of them leads to that agent. Raises `NotFoundError` (it was not added)."""
        with self._lock:
            return self._connections.peers.named(name).over.provider

    # ---- memory

    def register(self, memory: Any, kind: str | None = None) -> Descriptors:
        """Let other agents reach it, once they have a card made after this call. `memory`, `kind`: as of `Descriptors.of()`.

        Tensors are kept alive; memory given by its address is the caller's to keep until it is deregistered. All pieces, or none.
        Registered twice it is to be deregistered twice. Raises `InvalidArgumentError`, `UnavailableError` (device memory), `CapacityError`.
        """
        self._require_usable()
        descriptors = Descriptors.of(memory, kind)
        with self._lock:
            self._registry.register(descriptors)
        return descriptors

    def deregister(self, memory: Any, kind: str | None = None, timeout_ms: int | None = None) -> None:
        """What was registered, piece by piece. From here on transfers of others to it fail, at their side.

        Raises `NotFoundError` (not registered as such: nothing is done), `StateError` (a transfer still uses it after `timeout_ms`).
        """
        self._require_usable()
        limit_ms = self._endpoint.timeout_ms if timeout_ms is None else timeout_ms
        until = time.monotonic() + limit_ms / 1000
        with self._lock:
            keys = self._registry.keys_of(Descriptors.of(memory, kind))
        for key in keys:
            while True:
                try:
                    with self._lock:
                        self._registry.give_up(key, min(limit_ms, _SLICE_MS))
                    break
                except StateError as error:
                    if time.monotonic() >= until:
                        raise StateError(f"{error} (it was asked for again and again for {limit_ms} ms)") from None
                self._connections.look_around()  # one that has ended, or left, does not say that it is through with it

    def registered(self, memory: Any, kind: str | None = None) -> list[bool]:
        """Of each piece whether it lies within memory that is registered."""
        self._require_usable()
        with self._lock:
            return [bool(each) for each in self._registry.covers(Descriptors.of(memory, kind))]

    # ---- other agents

    def card(self, memory: Descriptors | None = None, *, connection: bool = True) -> Card:
        """What others need in order to reach this agent, as things are: everything that is registered, or what holds `memory` alone.

        `connection=False`: only the memory, for those who know this agent. Who has a card can write to the memory on it. Raises
        `NotFoundError` (memory that is not registered).
        """
        self._require_usable()
        with self._lock:
            areas = self._registry.areas(memory)
        door, host = self._door if connection else None, self._host if len(self._endpoints) > 1 else ""
        return Card(self.name, self.instance, self.provider, door, areas, complete=memory is None, host=host)

    def add_remote(self, card: Card) -> str:
        """Know that agent, and connect to it. Again with a newer card: its memory as it is then, or what more a partial card says.

        Returns its name. Raises `InvalidArgumentError` (this agent's own card), `MismatchError` (another provider, or it refuses),
        `NotAllowedError` (another process is known by that name), `PeerError` (it does not answer), `CapacityError`, `TransferError` (its
        memory cannot be reached).
        """
        self._require_usable()
        if card.name == self.name:
            raise InvalidArgumentError(f"agent {self.name!r} needs no card of an agent of its own name; it reaches its own memory as it is")
        self._connections.add(card)
        return card.name

    def remove_remote(self, name: str) -> None:
        """Forget that agent: its transfers fail where they have not ended, its notifications still come while it sends them.

        Raises `NotFoundError`.
        """
        self._require_usable()
        self._connections.remove(name)

    def remotes(self) -> list[str]:
        """The names of the agents that were added."""
        with self._lock:
            return self._connections.peers.names()

    def knows(self, name: str, memory: Descriptors | None = None) -> bool:
        """Whether that agent was added, and has said that all of `memory` is registered."""
        with self._lock:
            if name not in self._connections.peers.names():
                return False
            remote = self._connections.peers.named(name).memory
            return memory is None or (remote is not None and bool(remote.covers(memory).all()))

    def connect(self, name: str, timeout_ms: int | None = None) -> None:
        """Nothing where it is connected, as after `add_remote()`. Raises `NotFoundError`, `PeerError` (it is dead, and why)."""
        self._require_usable()
        self._connections.connect(name, timeout_ms)

    # ---- transfers

    def prepare(self, agent: str, memory: Any, kind: str | None = None) -> Prepared:
        """Descriptors for `make()`, looked up once. `agent`: "" for this agent's own side, else whose they are; its own name: loopback.

        Raises `NotFoundError` (an unknown agent, or memory that is not registered: which), `InvalidArgumentError`, `UnavailableError`.
        """
        self._require_usable()
        descriptors = Descriptors.of(memory, kind)
        with self._lock:
            if not agent:
                return Prepared("", descriptors, self._registry.find(descriptors), None)
            peer = self._connections.loopback(self.card()) if agent == self.name else self._connections.peers.named(agent)
            assert peer.memory is not None
            return Prepared(agent, descriptors, peer.memory.find(descriptors), peer)

    def make(
        self,
        operation: str,
        local: Prepared,
        local_indices: Any,
        remote: Prepared,
        remote_indices: Any,
        notification: bytes = b"",
        *,
        merge: bool = True,
    ) -> Transfer:
        """A transfer between prepared lists: "WRITE" to the other agent or "READ" from it; index i here goes with index i there.

        Indices: a sequence or an integer array; None: all. `notification`: reaches the other agent once all bytes are where they go; b"":
        none. `merge=False` leaves neighbours apart. Raises `InvalidArgumentError` (an index, counts or lengths that do not pair).
        """
        self._require_usable()
        if operation not in _OPERATIONS:
            raise InvalidArgumentError(f"operation is {operation!r}; it must be 'READ' or 'WRITE'")
        if local.agent:
            raise InvalidArgumentError(f"the local side is a list of agent {local.agent!r}; prepare it with agent ''")
        peer = remote.peer()
        endpoint = peer.over
        check_notification(endpoint, notification)
        mine, theirs = local.here(), remote.there()
        here = indices_of(local_indices, len(local), "local")
        there = indices_of(remote_indices, len(remote), "remote")
        lengths = local.descriptors.lengths[here]
        same_lengths(lengths, remote.descriptors.lengths[there])
        runs = Runs(mine.numbers[endpoint][here], mine.offsets[here], theirs.numbers[there], theirs.offsets[there], lengths)
        if merge:
            runs = runs.merged()
        return Transfer(endpoint, operation, peer, runs, mine.regions[endpoint], len(here), bytes(notification))

    def initialize(
        self, operation: str, local: Any, remote: Any, agent: str, notification: bytes = b"", kind: str | None = None
    ) -> Transfer:
        """The same of descriptors that were not prepared: all of them, in order. Raises as `prepare()` and `make()`."""
        return self.make(operation, self.prepare("", local, kind), None, self.prepare(agent, remote, kind), None, notification)

    def post(self, transfer: Transfer, notification: bytes = b"", timeout_ms: int | None = None) -> TransferState:
        """`transfer.post(…)`."""
        self._require_usable()
        return transfer.post(notification, timeout_ms)

    # ---- notifications

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a message that the agent takes by `notifications()`: any bytes, none too. In order among those of this agent to it.

        Raises `NotFoundError`, `InvalidArgumentError` (too long), `PeerError`, `DeadlineError` (no room within the endpoint's timeout),
        `CapacityError` (once: the agent has lost some that were sent before, because too many wait there; this one was not sent).
        """
        self._require_usable()
        with self._lock:
            peer = self._connections.loopback(self.card()) if agent == self.name else self._connections.peers.named(agent)
            endpoint = peer.over
        check_notification(endpoint, payload)
        self._connections.check_heard(peer)
        endpoint.notify(peer.number, NOTIFICATION + payload).release()

    def notifications(self) -> dict[str, list[bytes]]:
        """What has come since the last call: by the sender's name, in order of arrival. A sender need not have been added here.

        Raises `CapacityError`, once, where some were lost because more than twice `notifications_max` waited to be taken: how many; what
        was kept is given by the next call. Their senders are told, by their next `notify()`.
        """
        self._require_usable()
        return self._connections.take_messages()

    # ---- the end

    def statistics(self, path: str | None = None) -> Statistics:
        """A snapshot of everything that the transport counts, on that one of its `paths`, or on the first.

        Raises `InvalidArgumentError` (no such path).
        """
        self._require_usable()
        found = [endpoint for endpoint in self._endpoints if path in (None, endpoint.provider)]
        if not found:
            raise InvalidArgumentError(f"agent {self.name!r} has no path {path!r}; it has {', '.join(self.paths)}")
        return found[0].statistics()

    def close(self, timeout_ms: int = 2000) -> None:
        """Let transfers end for at most `timeout_ms`, tell the others, release everything. Idempotent; nothing in a forked child."""
        if os.getpid() != self._process:
            return
        self._keeper.close()
        until = time.monotonic() + timeout_ms / 1000
        if timeout_ms > 0:
            self._connections.part(timeout_ms)
        for endpoint in self._endpoints:
            endpoint.close(max(0, int(1000 * (until - time.monotonic()))))
        self._connections.join()

    def __del__(self) -> None:
        if hasattr(self, "_door") and not self.closed:
            self.close(0)

    def _require_usable(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"agent {self.name!r} belongs to process {self._process}, the parent of this forked one ({os.getpid()}); "
                "make a new agent here, or start children by spawn or forkserver"
            )
        if self.closed:
            raise StateError(f"agent {self.name!r} is closed")
