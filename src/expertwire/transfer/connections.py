"""Who is connected to whom: introductions made and received, cards taken, agents let go, and their messages."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertwire.errors import (
    CapacityError,
    DeadlineError,
    ExpertwireError,
    InvalidArgumentError,
    MismatchError,
    NotAllowedError,
    PeerError,
    TransferError,
    UnavailableError,
)
from expertwire.fabric import Status
from expertwire.transfer.card import Card, Door
from expertwire.transfer.ground import NEAR
from expertwire.transfer.introduction import Answer, Elsewhere, Knock, Later, Refusal
from expertwire.transfer.memory import RemoteMemory
from expertwire.transfer.peers import Peer, PeerTable
from expertwire.transfer.requests import NOTIFICATION

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint

__all__ = ["Connections", "Identity"]

_WORD = struct.Struct("<BQ")  # the kind of message, and …
_PARTS, _LOSES = 2, 3  # … the visit that it ends: I do not use you any more; … how many of your messages were lost here
_PARTING_MS, _PARTING_S = 500, 10.0  # it is waited for here, and by who looks around
_LOOK, _LOOK_BYTES = "#look", 64  # memory that is there to be looked at: whether this process may


@dataclass(frozen=True, slots=True)
class Identity:
    """What an agent says of itself when it knocks. `host`: "" where it does not reach others of the same host by their memory."""

    name: str
    instance: int
    token: bytes
    host: str


def _says_farewell(peer: Peer) -> bool:
    """Its word of parting is on its way: what is let go before it has left is never told."""
    if peer.parting is None:
        return False
    word, until = peer.parting
    if time.monotonic() < until and (word is None or word.status() is Status.PENDING):
        return True
    peer.parting = None
    if word is not None:
        word.release()
    return False


class Connections:
    """Of one agent. Serialised by the agent's lock, which is never held while another agent is waited for: it may be knocking here.

    `endpoints`: the one that leads to everybody, and behind it the one to agents of this host, if there is one. An agent is known to one of
    them, under one number at all; over the second only where each can reach the other's memory, which both try when they are introduced.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        knock: Callable[[Door, Knock, str, float], Answer],
        lock: threading.RLock,
        own: Identity,
        *,
        peers_max: int,
        connect_timeout_ms: int,
        notifications_max: int,
    ) -> None:
        self.peers = PeerTable(peers_max)
        self._endpoints, self._knock, self._lock, self._own = tuple(endpoints), knock, lock, own
        self._gone = threading.Condition(lock)  # somebody is not being let go any more
        self._going: set[Peer] = set()
        self._connect_timeout_ms = connect_timeout_ms
        self._visits = 0
        self._messages: dict[str, list[bytes]] = {}
        self._held, self._held_max = 0, 2 * notifications_max
        self._core_max = notifications_max
        self._lost: Counter[str] = Counter()  # by whose they were; "": not known
        self._told = 0
        self._parting: threading.Thread | None = None
        self._look = bytearray(_LOOK_BYTES)
        self._look_key = endpoints[1].register(self._look).key() if len(endpoints) > 1 else b""

    # ---- the way out

    def add(self, card: Card) -> None:
        """See `Agent.add_remote`."""
        if not self._paths(card):
            raise MismatchError(
                f"agent {card.name!r} speaks {card.provider!r}, this agent {self._endpoints[0].provider!r}: "
                "both must be made with the same EXPERTWIRE_PROVIDER"
            )
        while True:
            with self._lock:
                known = self.peers.check(card)
                if known is None and card.door is None:
                    raise InvalidArgumentError(f"the card of agent {card.name!r} says nothing of its connection; add one that does first")
                peer = known or self.peers.meet(card.name, card.instance)
                merged = peer.card.merged(card) if peer.card else card
            # Though it has knocked here: it has to know that it is used.
            if not peer.leaving and (peer.path is not None or self._introduce(peer, merged, self._connect_timeout_ms)):
                break
            self._await_going(peer)
        with self._lock:
            try:
                self.peers.check(card)  # another thread's card may have come first
                peer.memory = RemoteMemory(peer.over, peer.number, peer.name, merged.areas, merged.provider)
                self.peers.add(peer, merged)
            except ExpertwireError:
                if peer.card is None:
                    peer.path = None  # the next tick lets it go
                raise

    def connect(self, name: str, timeout_ms: int | None) -> None:
        """See `Agent.connect`."""
        with self._lock:
            peer = self.peers.named(name)
            card = peer.card
        assert card is not None
        if not peer.reached and not peer.ended:
            self._introduce(peer, card, self._connect_timeout_ms if timeout_ms is None else timeout_ms)
        why = peer.ended or peer.leaving or self._end_of(peer)
        if why:
            raise PeerError(f"agent {name!r} has ended: {why}; remove it, and add it again once it is back", peer.number)

    def loopback(self, card: Card) -> Peer:
        """This agent as a peer of its own, with what is registered now."""
        with self._lock:
            peer = self.peers.meet(self._own.name, self._own.instance)
            if peer.path is None:
                endpoint = self._endpoints[-1]
                self._reach(peer, endpoint, endpoint.blob(own_only=True), peer.number, b"")
                peer.path = endpoint
            if peer.card is None or peer.card.areas != card.areas:
                peer.memory = RemoteMemory(peer.path, peer.number, self._own.name, card.areas, card.provider)
                peer.card = card  # not by its name: it is nobody's remote
            return peer

    def _paths(self, card: Card) -> list[Endpoint]:
        """What may lead to it, the best one first: the same host is no proof that its memory can be reached."""
        offered = {card.provider, NEAR} if card.host and card.host == self._own.host else {card.provider}
        return [endpoint for endpoint in reversed(self._endpoints) if endpoint.provider in offered]

    def _introduce(self, peer: Peer, card: Card, timeout_ms: int) -> bool:
        """False: it is being let go, and was not taken up again."""
        paths = self._paths(card)
        try:
            for path in paths:
                try:
                    return self._introduce_over(path, peer, card, timeout_ms)
                except (UnavailableError, TransferError):
                    if path is paths[-1]:
                        raise
            raise MismatchError(f"agent {peer.name!r} cannot be reached as its card says: it speaks {card.provider!r}")
        except ExpertwireError:
            with self._lock:
                self._forget_stranger(peer)
            raise

    def _introduce_over(self, path: Endpoint, peer: Peer, card: Card, timeout_ms: int) -> bool:
        assert card.door is not None
        own = self._own
        with self._lock:
            if peer.leaving:
                return False
            self._visits += 1
            visit = peer.visit = self._visits
        knock = Knock(
            card.door.token, own.name, own.instance, peer.number, path.provider, visit, path.blob(own_only=True), self._look_of(path)
        )
        answer = self._knock(card.door, knock, peer.name, timeout_ms / 1000)
        if answer.instance != card.instance:
            raise NotAllowedError(
                f"agent {peer.name!r} answers as instance {answer.instance:#x}, its card is of {card.instance:#x}; get its newer card"
            )
        with self._lock:
            if peer.leaving or peer.ended:
                return False
            self._reach(peer, path, answer.blob, answer.number, answer.look)
            peer.path = path
        return True

    def _look_of(self, path: Endpoint) -> bytes:
        return self._look_key if path is not self._endpoints[0] else b""

    def _reach(self, peer: Peer, endpoint: Endpoint, blob: bytes, number: int, look: bytes) -> None:
        """The core knows it. Raises where its memory is to be looked at, and cannot be reached; then it does not."""
        endpoint.add_peer(peer.number, blob, number)
        if endpoint in peer.reached:
            return
        try:
            if look:
                endpoint.announce(peer.number, _LOOK, _LOOK_BYTES, look)
        except ExpertwireError:
            endpoint.remove_peer(peer.number)
            raise
        peer.reached.append(endpoint)

    # ---- the way in; on the doorkeeper's thread

    def welcome(self, visitor: Knock) -> Answer | Refusal | Elsewhere | Later:
        """Somebody has our card."""
        own = self._own
        if not hmac.compare_digest(visitor.token, own.token):
            return Refusal("the token is not that of this agent: the card is of another process, or an older one")
        if visitor.name == own.name:
            return Refusal(f"it is called {own.name!r}, as the visitor is; agents that meet need different names")
        path = next((endpoint for endpoint in self._endpoints if endpoint.provider == visitor.path), None)
        if path is None:
            return Elsewhere(f"this agent speaks {' and '.join(repr(endpoint.provider) for endpoint in self._endpoints)}")
        with self._lock:
            peer = self.peers.meet(visitor.name, visitor.instance)
            if peer.leaving:
                return Later(peer.leaving)
            try:
                self._reach(peer, path, visitor.blob, visitor.number, visitor.look)
            except ExpertwireError as error:
                self._forget_stranger(peer)
                if path is self._endpoints[0]:
                    raise
                return Elsewhere(str(error))
            peer.visitor = visitor.visit
            for other in [each for each in peer.reached if each not in (path, peer.path)]:
                other.remove_peer(peer.number)  # it has tried that before, and could not reach us
                peer.reached.remove(other)
        return Answer(own.instance, peer.number, path.blob(own_only=True), self._look_of(path))

    def look_around(self) -> bool:
        """Once a second: whoever has ended, or is neither a remote nor a visitor any more, is let go. False once the endpoint is closed."""
        if self._endpoints[0].native.closed:
            return False
        with self._lock:
            self._collect()
            self._tell_losses()
            if self._parting is not None and self._parting.is_alive():
                return True
            for peer in self.peers.all():
                if peer.reached and not peer.leaving and peer.instance != self._own.instance:
                    used = peer.card is not None or peer.path is not None or peer.visitor > 0 or _says_farewell(peer)
                    peer.leaving = self._end_of(peer) or ("" if used else "nobody uses it")
            ended = [peer for peer in self.peers.all() if peer.leaving]
            if ended:
                # Beside the door: work that does not end takes its time, and others may knock meanwhile.
                self._parting = threading.Thread(target=self._part, args=(ended,), name="expertwire parting", daemon=True)
                self._parting.start()
        return True

    def _part(self, ended: list[Peer]) -> None:
        for peer in ended:
            self._let_go(peer)

    def part(self, timeout_ms: int) -> None:
        """Before the endpoints close: let go whoever has parted, for over some paths it does not hear the farewell, which is waited for."""
        self.look_around()
        self.join(timeout_ms / 1000)

    def join(self, timeout_s: float | None = None) -> None:
        """The endpoint is closed: whoever was being let go is. Or for at most so long."""
        if self._parting is not None and threading.current_thread() is not self._parting:
            self._parting.join(timeout_s)

    # ---- letting go

    def remove(self, name: str) -> None:
        """See `Agent.remove_remote`."""
        with self._lock:
            peer = self.peers.remove(name)
            path, peer.path = peer.path, None
            if path is None or not peer.reached or peer.leaving or self._end_of(peer):
                return  # the doorkeeper lets it go, which may take a while
            until = time.monotonic() + _PARTING_S
            peer.parting = None, until
        # Whoever has introduced itself may be writing here: its connection is its own until it parts too.
        try:
            word = path.notify(peer.number, _WORD.pack(_PARTS, peer.visit))
            peer.parting = word, until
            word.wait(_PARTING_MS)
        except DeadlineError:
            return  # it was not heard yet; the next ticks look
        except ExpertwireError:
            peer.parting = None
            return
        peer.parting = None
        with self._lock:
            if peer.card is not None or peer.path is not None or peer.visitor or peer.leaving:
                return  # or it was added again meanwhile
            peer.leaving = "it was removed"
        self._let_go(peer)

    def _end_of(self, peer: Peer) -> str:
        """Why it is over, as the core sees it; "" while it is not."""
        for endpoint in peer.reached:
            fault = endpoint.fault(peer.number)
            if fault is not None:
                return fault[1]
            if endpoint.native.pulse(peer.number)[4]:
                return "it has closed its agent"
        return ""

    def _let_go(self, peer: Peer) -> None:
        """The core forgets it, which may take a while where its work does not end: then the next tick tries again."""
        with self._lock:
            if peer in self._going or peer.ended:
                return
            self._going.add(peer)
        try:
            while peer.reached:
                peer.reached[0].remove_peer(peer.number)
                with self._lock:
                    self._collect()  # what it has said is its own, whoever has its number next
                    del peer.reached[0]
            with self._lock:
                self.peers.forget(peer, peer.leaving)
        except ExpertwireError:
            return  # or the endpoint was closed meanwhile, and everybody is let go
        finally:
            with self._gone:
                self._going.discard(peer)
                self._gone.notify_all()

    def _await_going(self, peer: Peer) -> None:
        """Until it is gone. Raises `PeerError` where that takes too long."""
        with self._gone:
            if self._gone.wait_for(lambda: not peer.leaving, self._connect_timeout_ms / 1000):
                return
            raise PeerError(
                f"agent {peer.name!r} is being let go ({peer.leaving}), and what it had under way has not ended within "
                f"{self._connect_timeout_ms} ms; add it again later",
                peer.number,
            )

    def _forget_stranger(self, peer: Peer) -> None:
        if not peer.reached and peer.card is None and not peer.leaving:
            self.peers.forget(peer, "it was never met")

    # ---- messages

    def take_messages(self) -> dict[str, list[bytes]]:
        """By name of who sent them. Raises `CapacityError`, once, where some were lost."""
        with self._lock:
            self._collect()
            if sum(self._lost.values()) > self._told:
                lost, self._told = sum(self._lost.values()) - self._told, sum(self._lost.values())
                whose = ", ".join(f"{name or 'not known'}: {count}" for name, count in self._lost.items())
                raise CapacityError(
                    f"{lost} notifications were lost, since {self._held_max} waited to be taken, which is the limit; call notifications() "
                    f"more often, or give a higher notifications_max. {self._held} that came before are given by the next call. Lost so "
                    f"far, by their sender: {whose}"
                )
            taken, self._messages, self._held = self._messages, {}, 0
            return taken

    def check_heard(self, peer: Peer) -> None:
        """Raises `CapacityError`, once, where it has lost messages of ours."""
        if not peer.lost:
            return
        with self._lock:
            lost, peer.lost = peer.lost, 0
        if lost:
            raise CapacityError(
                f"agent {peer.name!r} has lost {lost} notifications of this agent, because too many wait there to be taken; this one was "
                "not sent. Send fewer, or let it take them more often"
            )

    def _collect(self) -> None:
        """Always all, so that what is lost is lost here, where it is known whose it was; unless the core was full before."""
        arrived = [endpoint.notifications() for endpoint in self._endpoints]
        if max(map(len, arrived)) >= self._core_max:
            self._lost[""] = sum(endpoint.statistics().notifications_dropped for endpoint in self._endpoints)
        for number, frame in itertools.chain(*arrived):
            peer = self.peers.numbered(number)
            if peer is None or not frame:
                continue
            if frame[:1] == NOTIFICATION:
                self._keep(peer, frame[1:])
            elif len(frame) == _WORD.size:
                self._heed(peer, *_WORD.unpack(frame))

    def _keep(self, peer: Peer, message: bytes) -> None:
        if self._held >= self._held_max:
            self._lost[peer.name] += 1
            peer.untold += 1
            return
        self._messages.setdefault(peer.name, []).append(message)
        self._held += 1

    def _heed(self, peer: Peer, kind: int, value: int) -> None:
        if kind == _PARTS and peer.visitor <= value:  # else it has come again since
            peer.visitor = 0
        elif kind == _LOSES:
            peer.lost += value

    def _tell_losses(self) -> None:
        """To each agent how many of its messages were lost here since it was told. What has no room now is told later."""
        for peer in self.peers.all():
            if peer.untold and peer.reached and not peer.leaving:
                path = peer.path or peer.reached[0]
                with contextlib.suppress(ExpertwireError):
                    path.submit("write", peer.number, [], [], _WORD.pack(_LOSES, peer.untold), timeout_ms=0).release()
                    peer.untold = 0
