"""Memory that this agent has registered, and what of a peer's it knows: addresses in, regions and offsets out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from expertwire.errors import ExpertwireError, NotFoundError, StateError, UnavailableError
from expertwire.transfer.areas import AreaTable
from expertwire.transfer.card import Area
from expertwire.transfer.descriptors import U64, Descriptors

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint, Region

Key = tuple[str, int, int]  # kind, address, bytes

__all__ = ["Found", "FoundThere", "Registry", "RemoteMemory", "require_host"]


def require_host(kind: str, what: str) -> None:
    """Raises `UnavailableError` for memory that no provider here takes."""
    if kind != "DRAM":
        raise UnavailableError(
            f"{what} is {kind} memory; no provider of this version reaches any but the host's (DRAM): copy it there first"
        )


@dataclass(slots=True)
class _Registered:
    regions: tuple[Region, ...]  # one for each endpoint
    area: Area
    times: int
    owner: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Where N pieces of an agent's own are: offsets uint64 [N], and by endpoint region numbers uint32 [N] and the regions themselves."""

    offsets: U64
    numbers: dict[Endpoint, NDArray[numpy.uint32]]
    regions: dict[Endpoint, tuple[Region, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class FoundThere:
    """Where N pieces of a peer's are: region numbers uint32 [N] of the endpoint that leads there, offsets uint64 [N]."""

    offsets: U64
    numbers: NDArray[numpy.uint32]


class Registry:
    """What is registered here. Registered again it counts: it is gone when it was deregistered as often. Its owner serialises the calls."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """`endpoints`: the one that leads to everybody, and behind it the one to agents of this host, where there is one."""
        self._endpoints = tuple(endpoints)
        self._held: dict[Key, _Registered] = {}
        self._table: AreaTable | None = None
        self._listed: list[_Registered] = []

    def __len__(self) -> int:
        return len(self._held)

    def register(self, memory: Descriptors) -> None:
        """All pieces, or none. Raises `UnavailableError` (device memory), `CapacityError` (no more regions)."""
        require_host(memory.kind, "this memory")
        done: list[Key] = []
        try:
            for index, (address, nbytes, device) in enumerate(memory.rows()):
                key = (memory.kind, address, nbytes)
                held = self._held.get(key)
                if held is None:
                    regions = self._register(address, nbytes)
                    keys = [region.key() for region in regions]
                    area = Area(memory.kind, address, nbytes, device, regions[0].name, *keys)
                    held = self._held[key] = _Registered(regions, area, 0, memory.owners[index : index + 1])
                held.times += 1
                done.append(key)
        except ExpertwireError:
            for key in reversed(done):
                self.give_up(key, 0)
            raise
        finally:
            self._table = None

    def _register(self, address: int, nbytes: int) -> tuple[Region, ...]:
        first = self._endpoints[0].register_address(address, nbytes)
        try:
            return first, *(endpoint.register_address(address, nbytes) for endpoint in self._endpoints[1:])
        except ExpertwireError:
            first.close(0)  # there are two at most
            raise

    def keys_of(self, memory: Descriptors) -> list[Key]:
        """Of pieces as they were registered. Raises `NotFoundError` (one was not)."""
        keys = [(memory.kind, address, nbytes) for address, nbytes, _ in memory.rows()]
        for index, key in enumerate(keys):
            if key not in self._held:
                raise NotFoundError(
                    f"descriptor {index} ({key[2]} bytes at {key[1]:#x}) was not registered as such; deregister what was, piece by piece"
                )
        return keys

    def give_up(self, key: Key, timeout_ms: int) -> None:
        """One registration less. Raises `StateError` (in use after `timeout_ms`: it is asked for again later, and new use is refused)."""
        self._table = None
        held = self._held[key]
        if held.times <= 1:
            in_use: list[StateError] = []
            for region in held.regions:
                try:
                    region.close(timeout_ms)
                except StateError as error:
                    in_use.append(error)
            if in_use:
                raise in_use[0]
            del self._held[key]
        held.times -= 1

    def covers(self, memory: Descriptors) -> NDArray[numpy.bool_]:
        """bool [N]: whether each piece lies within one registration."""
        return self._areas().covers(memory)

    def find(self, memory: Descriptors) -> Found:
        """Raises `NotFoundError` naming the first piece that is not registered."""
        require_host(memory.kind, "the local side")
        places, offsets = self._areas().find(memory, "this agent")
        used = [int(place) for place in numpy.unique(places)]
        found = Found(offsets, {}, {})
        for at, endpoint in enumerate(self._endpoints):
            regions = found.regions[endpoint] = tuple(self._listed[place].regions[at] for place in used)
            numbers = numpy.zeros(len(self._listed), dtype=numpy.uint32)
            numbers[used] = [region.number for region in regions]
            found.numbers[endpoint] = numbers[places]
        return found

    def areas(self, memory: Descriptors | None = None) -> tuple[Area, ...]:
        """Of everything, or of the registrations that hold `memory`. Raises `NotFoundError`."""
        if memory is None:
            return tuple(held.area for held in self._held.values())
        places, _ = self._areas().find(memory, "this agent")
        return tuple(self._listed[int(place)].area for place in numpy.unique(places))

    def _areas(self) -> AreaTable:
        if self._table is None:
            self._listed = list(self._held.values())
            self._table = AreaTable([held.area.address for held in self._listed], [held.area.nbytes for held in self._listed])
        return self._table


class RemoteMemory:
    """What a peer has said that it has registered, under the numbers that the core gave."""

    def __init__(self, endpoint: Endpoint, number: int, name: str, areas: Sequence[Area], provider: str) -> None:
        """Announces them to the core. `provider`: whose keys are the areas' first ones. Raises as `Endpoint.announce()`."""
        usable = [area for area in areas if area.kind == "DRAM"]
        keys = [area.key if endpoint.provider == provider else area.near for area in usable]
        self._whose = f"agent {name!r}"
        self._numbers = numpy.array(
            [endpoint.announce(number, area.name, area.nbytes, key) for area, key in zip(usable, keys, strict=True)], dtype=numpy.uint32
        )
        self._table = AreaTable([area.address for area in usable], [area.nbytes for area in usable])

    def covers(self, memory: Descriptors) -> NDArray[numpy.bool_]:
        """bool [N]: whether each piece lies within one of its areas."""
        return self._table.covers(memory)

    def find(self, memory: Descriptors) -> FoundThere:
        """Raises `NotFoundError` naming the first piece that it has not said to be registered."""
        require_host(memory.kind, "the remote side")
        places, offsets = self._table.find(memory, self._whose)
        return FoundThere(offsets, self._numbers[places])
