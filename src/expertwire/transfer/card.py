"""What an agent tells others about itself, as plain data: `metadata` turns it into bytes and back. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertwire.errors import InvalidArgumentError
from expertwire.transfer.descriptors import kind_of

__all__ = ["AREAS_MAX", "KEY_BYTES_MAX", "NAME_BYTES_MAX", "TOKEN_BYTES", "Area", "Card", "Door", "check_name"]

NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 256
TOKEN_BYTES = 16
AREAS_MAX = 65_536
_REGION_NAME_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Area:
    """Registered memory: `nbytes` at `address` of its owner.

    `name`: of the owner's region in its core; `key`: what its provider wants from whoever reaches for it; `near`: the same of the provider
    between agents of one host, b"" where that is the only one, or there is none.
    """

    kind: str
    address: int
    nbytes: int
    device: int
    name: str
    key: bytes
    near: bytes = b""

    def __post_init__(self) -> None:
        kind_of(self.kind)
        if not 0 < self.address < 2**64 or not 0 < self.nbytes < 2**64 - self.address or not 0 <= self.device < 2**64:
            raise InvalidArgumentError(f"an area of {self.nbytes} bytes at {self.address:#x} on device {self.device} cannot be")
        if not 1 <= len(self.name.encode()) <= _REGION_NAME_BYTES_MAX:
            raise InvalidArgumentError(f"an area's name has {len(self.name.encode())} bytes; it has 1 to {_REGION_NAME_BYTES_MAX}")
        if max(len(self.key), len(self.near)) > KEY_BYTES_MAX:
            raise InvalidArgumentError(f"an area's keys have {len(self.key)} and {len(self.near)} bytes, the limit is {KEY_BYTES_MAX}")


@dataclass(frozen=True, slots=True)
class Door:
    """Where an agent is introduced to: a TCP listener. `token`: only who was given the card may knock."""

    host: str
    port: int
    token: bytes

    def __post_init__(self) -> None:
        if not 1 <= len(self.host.encode()) <= NAME_BYTES_MAX or not 1 <= self.port <= 65_535 or len(self.token) != TOKEN_BYTES:
            raise InvalidArgumentError(
                f"a door has a host, a port of 1 to 65535 and a token of {TOKEN_BYTES} bytes; "
                f"this is {self.host!r}, {self.port}, {len(self.token)} bytes"
            )


@dataclass(frozen=True, slots=True)
class Card:
    """An agent as others know it. `instance`: of its process and making, never 0; `door`: None where it says nothing about connections.

    `complete`: all that is registered is on it; else there may be more. `host`: which one it is on, where agents of the same host may reach
    it otherwise than by `provider`, which is for all; "": by that alone.
    """

    name: str
    instance: int
    provider: str
    door: Door | None
    areas: tuple[Area, ...]
    complete: bool = True
    host: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 0 < self.instance < 2**64:
            raise InvalidArgumentError(f"an agent's instance is {self.instance}; it is 1 to 2^64 - 1")
        if not 1 <= len(self.provider.encode()) <= NAME_BYTES_MAX:
            raise InvalidArgumentError(f"a provider's name has {len(self.provider.encode())} bytes; it has 1 to {NAME_BYTES_MAX}")
        if len(self.host.encode()) > NAME_BYTES_MAX:
            raise InvalidArgumentError(f"the name of a host has {len(self.host.encode())} bytes, the limit is {NAME_BYTES_MAX}")
        if len(self.areas) > AREAS_MAX:
            raise InvalidArgumentError(f"a card lists {len(self.areas)} areas, the limit is {AREAS_MAX}")

    def merged(self, newer: Card) -> Card:
        """What is known after a newer card of the same instance: what a complete one says, else its areas beside those it is silent of.

        An area of the same name, or of the same memory, is the newer one's: the older was deregistered.
        """
        kept: tuple[Area, ...] = ()
        if not newer.complete:
            names = {area.name for area in newer.areas}
            places = {(area.kind, area.address, area.nbytes) for area in newer.areas}
            kept = tuple(each for each in self.areas if each.name not in names and (each.kind, each.address, each.nbytes) not in places)
        return replace(newer, door=newer.door or self.door, areas=(*kept, *newer.areas), complete=newer.complete or self.complete)


def check_name(name: str) -> str:
    """The name, if an agent may have it. Raises `InvalidArgumentError`."""
    if not isinstance(name, str) or not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise InvalidArgumentError(f"an agent's name is {name!r}; it must be a string of 1 to {NAME_BYTES_MAX} bytes")
    return name
