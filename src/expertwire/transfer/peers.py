"""Agents by name, by instance, and by the number that this one gave them. Pure: whoever owns it serialises the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from expertwire.errors import CapacityError, NotAllowedError, NotFoundError
from expertwire.transfer.card import Card

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint
    from expertwire.fabric.request import Request
    from expertwire.transfer.memory import RemoteMemory

__all__ = ["Peer", "PeerTable"]


@dataclass(eq=False, slots=True)
class Peer:
    """Another agent. `number`: under which the core knows it. `card`: None until it is added, and once it is removed.

    `reached`: the endpoints that know it; `path`: the one that this agent's transfers go over, None while it does not use that one.
    `visitor`: which visit it came in when it introduced itself, so that it may be using this agent; 0: it has parted, or never came.
    `visit`: our last one there; `parting`: the word that it is over, where it was not heard at once, and until when that is waited for.
    `untold`: how many of its messages were lost here that it has not been told of; `lost`: of ours there, that nobody here has been
    told of. `leaving`: why it is being let go, else "": nothing of it can be begun then. `ended`: why it is over, else "": then its
    number is another's, and so is its core's error.
    """

    number: int
    name: str
    instance: int
    card: Card | None = None
    memory: RemoteMemory | None = field(default=None, repr=False)
    reached: list[Endpoint] = field(default_factory=list, repr=False)
    path: Endpoint | None = field(default=None, repr=False)
    visitor: int = 0
    visit: int = 0
    parting: tuple[Request | None, float] | None = field(default=None, repr=False)
    untold: int = 0
    lost: int = 0
    leaving: str = ""
    ended: str = ""

    @property
    def over(self) -> Endpoint:
        """The endpoint that leads to it. Raises `NotFoundError` once it was removed."""
        if self.path is None:
            raise NotFoundError(f"agent {self.name!r} was removed; add it, and prepare its list again")
        return self.path


class PeerTable:
    """At most `peers_max` at one time, numbered from 1."""

    def __init__(self, peers_max: int) -> None:
        self._free = list(range(peers_max, 0, -1))
        self._by_instance: dict[tuple[str, int], Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._by_number: dict[int, Peer] = {}
        self.peers_max = peers_max

    def all(self) -> list[Peer]:
        """Whether their card is here or not."""
        return list(self._by_number.values())

    def names(self) -> list[str]:
        """Of those whose card is here."""
        return list(self._by_name)

    def meet(self, name: str, instance: int) -> Peer:
        """That agent, known or from now on. Raises `CapacityError`."""
        known = self._by_instance.get((name, instance))
        if known is not None:
            return known
        if not self._free:
            raise CapacityError(
                f"{self.peers_max} agents are known and agent {name!r} would be one more; remove some, or give a higher peers_max"
            )
        peer = Peer(self._free.pop(), name, instance)
        self._by_instance[name, instance] = self._by_number[peer.number] = peer
        return peer

    def add(self, peer: Peer, card: Card) -> None:
        """Its card is here."""
        peer.card = card
        self._by_name[peer.name] = peer

    def check(self, card: Card) -> Peer | None:
        """Who is known under that name. Raises `NotAllowedError` where that is another process, or one that has ended."""
        known = self._by_name.get(card.name)
        if known is not None and known.ended:
            raise NotAllowedError(f"agent {card.name!r} is known as one that has ended ({known.ended}); remove it first")
        if known is not None and known.instance != card.instance:
            raise NotAllowedError(
                f"agent {card.name!r} is known as another process or endpoint (instance {known.instance:#x}, the card says "
                f"{card.instance:#x}); remove it first"
            )
        return known

    def named(self, name: str) -> Peer:
        """Raises `NotFoundError`."""
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(repr(each) for each in sorted(self._by_name)[:8]) or "none"
            raise NotFoundError(f"agent {name!r} is not known here; known: {known}")
        return found

    def numbered(self, number: int) -> Peer | None:
        """Who has that number, if anybody."""
        return self._by_number.get(number)

    def remove(self, name: str) -> Peer:
        """It is not known by its name any more. Raises `NotFoundError`."""
        peer = self.named(name)
        del self._by_name[name]
        peer.card = peer.memory = None
        return peer

    def forget(self, peer: Peer, why: str) -> None:
        """The core has let it go: its number may be given to another. Its name stays until it is removed."""
        if peer.ended:
            return
        peer.ended, peer.leaving = why, ""
        peer.reached.clear()
        del self._by_instance[peer.name, peer.instance]
        del self._by_number[peer.number]
        self._free.append(peer.number)
