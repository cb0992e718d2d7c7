"""Endpoints of agents over the simulated network: the real engine and virtual time, and no thread, no socket, no clock.

A `SimulatedGround` is what `expertwire.transfer.Agent(ground=…)` stands on in place of an endpoint and a door of its own. Nothing moves by
itself: every wait, and `SimulatedNetwork.step()`, lets virtual time go on. The same seed and the same calls give the same run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
from numpy.typing import NDArray

from expertwire.errors import (
    CapacityError,
    DeadlineError,
    InvalidArgumentError,
    MismatchError,
    PeerError,
    StateError,
    TransferError,
)
from expertwire.fabric import Status
from expertwire.testing.cluster import simulation
from expertwire.testing.faults import NetworkFaults

__all__ = ["SimulatedGround", "SimulatedNetwork"]

_REGIONS_MAX = 512
_PATIENCE = 20_000  # steps that a wait takes at most
_BLOB = struct.Struct("<8sI")
_MAGIC = b"EWSIMUL\n"
_EMPTY = numpy.zeros(0, dtype=numpy.uint64), numpy.zeros(0, dtype=numpy.uint32)


class SimulatedNetwork:
    """Room for `places` endpoints, one after the other: who comes back after its death takes a new one.

    `broken`: the first of the engine's rules that did not hold, "" while all do.
    """

    def __init__(self, seed: int, places: int, faults: NetworkFaults, *, peers_max: int = 8, operations_max: int = 600) -> None:
        self.native = simulation().TransferNetwork(seed, places, peers_max + 1, operations_max, _REGIONS_MAX, faults.as_options())
        self.peers_max, self.operations_max = peers_max, operations_max
        self.endpoints: list[_Endpoint] = []
        self.doors: dict[int, _Door] = {}
        self.places, self.broken = places, ""

    def ground(self) -> SimulatedGround:
        """For one more agent."""
        return SimulatedGround(self)

    def step(self) -> None:
        """One turn of all who live, and some virtual time."""
        self.broken = self.broken or self.native.step()
        for endpoint in self.endpoints:
            endpoint.release_ended()

    def kill(self, place: int) -> None:
        """Its process is gone, without a word. Others learn of it by `bury()`."""
        self.native.kill(place, False)
        self.endpoints[place].killed = True
        self.doors.pop(place + 1, None)

    def bury(self, place: int) -> None:
        """Everybody who knows it holds it dead from here on."""
        for endpoint in self.endpoints:
            number = endpoint.numbers.get(place)
            if number is not None and not endpoint.killed:
                endpoint.dead[number] = "its process was killed"
                self.native.declare_dead(endpoint.place, number)


@dataclass
class SimulatedGround:
    """See the module."""

    network: SimulatedNetwork

    def endpoint(self, _: Any, **options: Any) -> _Endpoint:
        """The agent's. Of what an `Endpoint` is told `lanes` is looked at."""
        network = self.network
        if len(network.endpoints) >= network.places:
            raise CapacityError(f"a simulated network of {network.places} places has no room for one more agent")
        made = _Endpoint(network, len(network.endpoints), int(options["lanes"]))
        network.endpoints.append(made)
        return made

    def near(self, *_: Any, **__: Any) -> None:
        """There is one network, and no host."""

    def host(self, *_: Any) -> str:
        """Where its door is."""
        return "simulated"

    def door(self, _: str, answer: Callable[[Any], Any], tick: Callable[[], bool]) -> _Door:
        """Who is knocked at is asked at once, in the caller's thread."""
        port = len(self.network.endpoints)
        self.network.doors[port] = made = _Door(self.network, port, answer, tick)
        return made

    def knock(self, door: Any, record: Any, whose: str, _: float) -> Any:
        """As `transfer.door.knock()`."""
        found = self.network.doors.get(door.port)
        reply = found.answer(record) if found else None
        if reply is None:
            raise PeerError(f"agent {whose!r} at {door.host}:{door.port} cannot be reached")
        if hasattr(reply, "why"):
            raise MismatchError(f"agent {whose!r} refuses the introduction: {reply.why}")
        return reply


@dataclass
class _Door:
    network: SimulatedNetwork
    port: int
    answer: Callable[[Any], Any]
    tick: Callable[[], bool]

    def close(self) -> None:
        self.network.doors.pop(self.port, None)


@dataclass
class _Region:
    """As `fabric.Region`, of memory of the caller's own."""

    endpoint: _Endpoint
    number: int
    address: int
    nbytes: int
    closed: bool = False

    @property
    def name(self) -> str:
        return f"#{self.number}"

    def key(self) -> bytes:
        found: bytes = self.endpoint.network.native.region_key(self.endpoint.place, self.number)
        return found

    @property
    def bytes(self) -> int:
        return self.nbytes

    def close(self, timeout_ms: int | None = None) -> None:
        network = self.endpoint.network
        if self.closed or self.endpoint.closed:
            self.closed = True
            return
        for _ in range(1 if timeout_ms == 0 else _PATIENCE):
            if network.native.deregister_region(self.endpoint.place, self.number):
                self.closed = True
                return
            network.step()
        raise StateError(f"region {self.name} is in use")


class _Request:
    """As `fabric.Request`."""

    def __init__(self, endpoint: _Endpoint, peer: int, ticket: int) -> None:
        self._endpoint, self.peer, self._ticket = endpoint, peer, ticket
        self._released = False

    @property
    def code(self) -> int:
        found: int = self._endpoint.network.native.error_code(self._endpoint.place, self._ticket)
        return found

    def status(self) -> Status:
        if self._endpoint.closed:
            return Status.CLOSED
        return Status(self._endpoint.network.native.status(self._endpoint.place, self._ticket))

    def poll(self) -> Status:
        if self.status() is Status.PENDING:
            self._endpoint.network.step()
        return self.status()

    def wait(self, timeout_ms: int | None = None) -> None:
        for _ in range(_PATIENCE):
            if self.poll() is not Status.PENDING:
                return
        raise DeadlineError(f"a request has not ended after {_PATIENCE} turns; it keeps its memory")

    def __await__(self) -> Iterator[None]:
        self.wait()
        return iter(())

    def cancel(self) -> bool:
        found: bool = self._endpoint.network.native.cancel(self._endpoint.place, self._ticket)
        return found

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        if not self._endpoint.network.native.release(self._endpoint.place, self._ticket):
            self._endpoint.ending.append(self._ticket)


class _Prepared:
    """As `fabric.request.PreparedRequest`, and as what is native in it."""

    def __init__(self, endpoint: _Endpoint, peer: int, read: bool, columns: tuple[NDArray[Any], ...], lane: int) -> None:
        self._endpoint, self._peer, self._read, self._columns, self._lane = endpoint, peer, read, columns, lane
        self._request: _Request | None = None
        self._released = False
        self.times = (0, 0, 0, 0)

    @property
    def native(self) -> _Prepared:
        return self

    @property
    def code(self) -> int:
        return self._request.code if self._request else 0

    async def ended(self) -> None:
        self.wait(0)

    def late(self, _: int) -> DeadlineError:
        return DeadlineError(f"a request has not ended after {_PATIENCE} turns; it keeps its memory")

    def submit(self, notification: bytes | None, timeout_ms: int, later: bool) -> int | None:
        if self._released or self.status() == Status.PENDING:
            return None
        fresh = self._endpoint.submit(self._peer, self._read, self._columns, notification or b"", self._lane)
        if self._request:
            self._request.release()
        self._request = fresh
        now = self._endpoint.network.native.now
        self.times = (now + 1, 0, now + 1, 0)
        return self.status()

    def status(self) -> int:
        if self._released:
            return -2
        return -1 if self._request is None else int(self._request.status())

    def turn(self) -> int:
        if self.status() == Status.PENDING:
            self._endpoint.network.step()
        return self.status()

    def wait(self, timeout_ms: int) -> int:
        for _ in range(_PATIENCE):
            if self.turn() != Status.PENDING:
                break
        return self.status()

    def cancel(self) -> None:
        if self._request:
            self._request.cancel()

    def release(self) -> bool:
        if self.status() == Status.PENDING:
            return False
        if self._request and not self._released:
            self._request.release()
        self._released = True
        return True


@dataclass(eq=False)
class _Endpoint:
    """As `fabric.Endpoint(independent=True)`, as far as agents use one."""

    network: SimulatedNetwork
    place: int
    lanes: int
    provider: str = "simulated"
    timeout_ms: int = 1000
    bulk_chunk_bytes: int = 1 << 30
    closed: bool = False
    killed: bool = False
    numbers: dict[int, int] = field(default_factory=dict)  # by place: under which the core knows it
    dead: dict[int, str] = field(default_factory=dict)
    ending: list[int] = field(default_factory=list)  # tickets that were given up before they had ended
    _regions: int = 0
    _remotes: dict[tuple[int, str], tuple[int, bytes]] = field(default_factory=dict)

    @property
    def native(self) -> Any:
        return SimpleNamespace(
            turn=lambda: False,
            closed=self.closed,
            capabilities={"notification_bytes_max": 8192},
            pulse=lambda number: (0, 0, 0, 0, self._left(number)),
        )

    @property
    def operations_max(self) -> int:
        return self.network.operations_max

    def _left(self, number: int) -> int:
        return int(any(self.network.endpoints[place].closed for place, known in self.numbers.items() if known == number))

    def start(self) -> None:
        """There is no thread."""

    def blob(self, *, own_only: bool = False) -> bytes:
        return _BLOB.pack(_MAGIC, self.place)

    def add_peer(self, number: int, blob: bytes, place: int | None = None) -> None:
        magic, there = _BLOB.unpack(blob)
        if magic != _MAGIC or not self.network.native.add_peer(self.place, number, there):
            raise InvalidArgumentError(f"a simulated endpoint cannot reach peer {number} by {blob!r}")
        self.numbers[there] = number

    def remove_peer(self, number: int) -> None:
        for _ in range(_PATIENCE):
            if self.network.native.remove_peer(self.place, number):
                break
            self.network.step()
        else:
            raise StateError(f"peer {number} has operations that do not end")
        self.numbers = {place: known for place, known in self.numbers.items() if known != number}
        self._remotes = {key: value for key, value in self._remotes.items() if key[0] != number}
        self.dead.pop(number, None)

    def fault(self, number: int) -> tuple[int, str] | None:
        why = self.dead.get(number)
        return (number, why) if why else None

    def register_address(self, address: int, nbytes: int) -> _Region:
        made = _Region(self, self._regions, address, nbytes)
        if not self.network.native.register_region(self.place, self._regions, address, nbytes):
            raise CapacityError(f"a simulated endpoint registers {_REGIONS_MAX} regions in its life")
        self._regions += 1
        return made

    def announce(self, number: int, name: str, nbytes: int, key: bytes) -> int:
        known = self._remotes.get((number, name))
        if known and known[1] == key:
            return known[0]
        made = 1 + max((value[0] for value in self._remotes.values()), default=0) if self._remotes else 0
        if not self.network.native.announce(self.place, number, made, key):
            raise InvalidArgumentError(f"region {name!r} of peer {number} cannot be announced")
        self._remotes[number, name] = made, key
        return made

    def prepare_arrays(
        self,
        kind: str,
        peer: int,
        locals_: NDArray[Any],
        offsets: NDArray[Any],
        remotes: NDArray[Any],
        remote_offsets: NDArray[Any],
        lengths: NDArray[Any],
        *,
        lane: int = 0,
    ) -> _Prepared:
        return _Prepared(self, peer, kind == "read", (locals_, offsets, remotes, remote_offsets, lengths), lane)

    def submit(self, peer: int, read: bool, columns: tuple[NDArray[Any], ...], notification: bytes, lane: int) -> _Request:
        self.require_open()
        for _ in range(_PATIENCE):
            number, ticket = self.network.native.submit(self.place, peer, read, *columns, notification, lane)
            status = Status(number)
            if status is Status.OK:
                return _Request(self, peer, ticket)
            if status is Status.PEER_DEAD:
                raise PeerError(f"peer {peer} is dead", peer)
            if status is Status.INVALID:
                raise CapacityError("a request of more operations than the tables can ever hold")
            if status is not Status.WOULD_BLOCK:
                raise TransferError(f"{status.name.lower()} is latched; remove the peer and add it again")
            self.network.step()
        raise DeadlineError("the tables are full")

    def notify(self, peer: int, payload: bytes) -> _Request:
        wide, narrow = _EMPTY
        return self.submit(peer, False, (narrow, wide, narrow, wide, wide), payload, 0)

    def notifications(self) -> list[tuple[int, bytes]]:
        taken = self.network.native.take_notifications(self.place)
        return [(self.numbers[place], payload) for place, payload in taken if place in self.numbers]

    def statistics(self) -> Any:
        return SimpleNamespace(notifications_dropped=0)

    def close(self, timeout_ms: int = 2000) -> None:
        if not self.closed:
            self.closed = True
            self.network.native.kill(self.place, False)

    def require_open(self) -> None:
        if self.closed:
            raise StateError("the endpoint is closed")

    def release_ended(self) -> None:
        """Tickets that were given up, and have ended since."""
        self.ending = [ticket for ticket in self.ending if not self.network.native.release(self.place, ticket)]
