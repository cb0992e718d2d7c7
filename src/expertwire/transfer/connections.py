"""Who is connected to whom: introductions made and received, cards taken, agents let go, and their messages."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from expertwire.errors import CapacityError, ExpertwireError, InvalidArgumentError, MismatchError, NotAllowedError, PeerError
from expertwire.transfer.card import Card, Door
from expertwire.transfer.introduction import Answer, Knock, Refusal
from expertwire.transfer.memory import RemoteMemory
from expertwire.transfer.peers import Peer, PeerTable
from expertwire.transfer.requests import NOTIFICATION

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint

__all__ = ["Connections"]

_PARTING = b"\x02"  # the kind of message: I do not use you any more
_PARTING_MS = 500


class Connections:
    """Of one agent. Serialised by the agent's lock, which is never held while another agent is waited for: it may be knocking here."""

    def __init__(
        self,
        endpoint: Endpoint,
        knock: Callable[[Door, Knock, str, float], Answer],
        lock: threading.RLock,
        name: str,
        instance: int,
        token: bytes,
        peers_max: int,
        connect_timeout_ms: int,
        notifications_max: int,
    ) -> None:
        self.peers = PeerTable(peers_max)
        self._endpoint, self._knock, self._lock = endpoint, knock, lock
        self._name, self._instance, self._token = name, instance, token
        self._connect_timeout_ms = connect_timeout_ms
        self._messages: dict[str, list[bytes]] = {}
        self._held, self._held_max = 0, notifications_max  # here; beyond that they wait in the core, which keeps as many and drops the rest
        self._dropped = self._told = 0
        self._parting: threading.Thread | None = None

    # ---- the way out

    def add(self, card: Card) -> None:
        """See `Agent.add_remote`."""
        if card.provider != self._endpoint.provider:
            raise MismatchError(
                f"agent {card.name!r} speaks {card.provider!r}, this agent {self._endpoint.provider!r}: both must be made with the same "
                "EXPERTWIRE_PROVIDER"
            )
        with self._lock:
            known = self.peers.check(card)
            if known is None and card.door is None:
                raise InvalidArgumentError(f"the card of agent {card.name!r} says nothing of its connection; add one that does first")
            peer = known or self.peers.meet(card.name, card.instance)
            merged = peer.card.merged(card) if peer.card else card
        if not peer.introduced:  # though it has knocked here: it has to know that it is used
            self._introduce(peer, merged, self._connect_timeout_ms)
        with self._lock:
            self.peers.check(card)  # another thread's card may have come first
            peer.memory = RemoteMemory(self._endpoint, peer.number, peer.name, merged.areas)
            self.peers.add(peer, merged)

    def connect(self, name: str, timeout_ms: int | None) -> None:
        """See `Agent.connect`."""
        with self._lock:
            peer = self.peers.named(name)
            card = peer.card
        assert card is not None
        if not peer.connected and not peer.ended:
            self._introduce(peer, card, self._connect_timeout_ms if timeout_ms is None else timeout_ms)
        why = peer.ended or self._end_of(peer)
        if why:
            raise PeerError(f"agent {name!r} has ended: {why}; remove it, and add it again once it is back", peer.number)

    def loopback(self, card: Card) -> Peer:
        """This agent as a peer of its own, with what is registered now."""
        with self._lock:
            peer = self.peers.meet(self._name, self._instance)
            if not peer.connected:
                self._endpoint.add_peer(peer.number, self._endpoint.blob(own_only=True), peer.number)
                peer.connected = True
            if peer.card is None or peer.card.areas != card.areas:
                peer.memory = RemoteMemory(self._endpoint, peer.number, self._name, card.areas)
                peer.card = card  # not by its name: it is nobody's remote
            return peer

    def _introduce(self, peer: Peer, card: Card, timeout_ms: int) -> None:
        assert card.door is not None
        blob = self._endpoint.blob(own_only=True)
        try:
            answer = self._knock(
                card.door, Knock(card.door.token, self._name, self._instance, peer.number, blob), peer.name, timeout_ms / 1000
            )
            if answer.instance != card.instance:
                raise NotAllowedError(
                    f"agent {peer.name!r} answers as instance {answer.instance:#x}, its card is of {card.instance:#x}; get its newer card"
                )
            with self._lock:
                self._endpoint.add_peer(peer.number, answer.blob, answer.number)
                peer.connected = peer.introduced = True
        except ExpertwireError:
            with self._lock:
                self._forget_stranger(peer)
            raise

    # ---- the way in; on the doorkeeper's thread

    def welcome(self, visitor: Knock) -> Answer | Refusal:
        """Somebody has our card."""
        if not hmac.compare_digest(visitor.token, self._token):
            return Refusal("the token is not that of this agent: the card is of another process, or an older one")
        if visitor.name == self._name:
            return Refusal(f"it is called {self._name!r}, as the visitor is; agents that meet need different names")
        self._endpoint.native.turn()
        with self._lock:
            if self._held < self._held_max:
                self._collect()  # its parting, where it has been here before: read later it would count against this introduction
            peer = self.peers.meet(visitor.name, visitor.instance)
            try:
                self._endpoint.add_peer(peer.number, visitor.blob, visitor.number)
            except ExpertwireError:
                self._forget_stranger(peer)
                raise
            peer.connected = peer.visitor = True
        return Answer(self._instance, peer.number, self._endpoint.blob(own_only=True))

    def look_around(self) -> bool:
        """Once a second: whoever has ended, or is neither a remote nor a visitor any more, is let go. False once the endpoint is closed."""
        if self._endpoint.native.closed:
            return False
        with self._lock:
            if self._held < self._held_max:
                self._collect()
            known = [peer for peer in self.peers.all() if peer.connected and peer.instance != self._instance]
            over = [(peer, self._end_of(peer) or ("" if peer.card or peer.visitor else "nobody uses it")) for peer in known]
            ended = [(peer, why) for peer, why in over if why]
            if ended and (self._parting is None or not self._parting.is_alive()):
                # Beside the door: work that does not end takes its time, and others may knock meanwhile.
                self._parting = threading.Thread(target=self._part, args=(ended,), name="expertwire parting", daemon=True)
                self._parting.start()
        return True

    def _part(self, ended: list[tuple[Peer, str]]) -> None:
        for peer, why in ended:
            self._let_go(peer, why)

    def join(self) -> None:
        """The endpoint is closed: whoever was being let go is."""
        if self._parting is not None and threading.current_thread() is not self._parting:
            self._parting.join()

    # ---- letting go

    def remove(self, name: str) -> None:
        """See `Agent.remove_remote`."""
        with self._lock:
            peer = self.peers.remove(name)
            peer.introduced = False
            alive = peer.connected and not self._end_of(peer)
        if not alive:
            return  # the doorkeeper lets it go, which may take a while
        # Whoever has introduced itself may be writing here: its connection is its own until it parts too.
        try:
            self._endpoint.notify(peer.number, _PARTING).wait(_PARTING_MS)
        except ExpertwireError:
            return
        if not peer.visitor:
            self._let_go(peer, "it was removed")

    def _end_of(self, peer: Peer) -> str:
        """Why it is over, as the core sees it; "" while it is not."""
        fault = self._endpoint.fault(peer.number)
        if fault is not None:
            return fault[1]
        return "it has closed its agent" if self._endpoint.native.pulse(peer.number)[4] else ""

    def _let_go(self, peer: Peer, why: str) -> None:
        """The core forgets it, which may take a while where its work does not end: then the next tick tries again."""
        try:
            self._endpoint.remove_peer(peer.number)
            with self._lock:
                self._collect()  # what it has said is its own, whoever has its number next
                self.peers.forget(peer, why)
        except ExpertwireError:
            return  # or the endpoint was closed meanwhile, and everybody is let go

    def _forget_stranger(self, peer: Peer) -> None:
        if not peer.connected and peer.card is None:
            self.peers.forget(peer, "it was never met")

    # ---- messages

    def take_messages(self) -> dict[str, list[bytes]]:
        """By name of who sent them. Raises `CapacityError`, once, where some were lost."""
        with self._lock:
            self._collect()
            if self._dropped > self._told:
                lost, self._told = self._dropped - self._told, self._dropped
                raise CapacityError(
                    f"{lost} notifications were lost: {self._held_max} waited to be taken and as many in the transport, which is the "
                    "limit; call notifications() more often, or give a higher notifications_max. "
                    f"{self._held} that came before are given by the next call"
                )
            taken, self._messages, self._held = self._messages, {}, 0
            return taken

    def _collect(self) -> None:
        arrived = self._endpoint.notifications()
        if len(arrived) >= self._held_max:  # it was full, so that some may have been lost
            self._dropped = self._endpoint.statistics().notifications_dropped
        for number, frame in arrived:
            peer = self.peers.numbered(number)
            if peer is not None and frame == _PARTING:
                peer.visitor = False
            elif peer is not None and frame[:1] == NOTIFICATION:
                self._messages.setdefault(peer.name, []).append(frame[1:])
                self._held += 1
