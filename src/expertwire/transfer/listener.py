"""Metadata by socket: a listener that takes and gives cards, and the visits of others to it.

A visit is one request and one answer. Listener: magic, version, 16 random bytes. Visitor: magic, version, verb, lengths of label and
payload, SHA-256 of both, HMAC-SHA256 of the random bytes and of all that. Listener: a reply, which is a refusal or says "go on"; then the
visitor sends label and payload, and a second reply ends the visit. A reply: magic, version, status, length, HMAC, text or record.

The key of the HMACs is the token, so it never crosses the wire, a recorded visit is of no use later, and either side knows that the other
has it; with no token, the default, they only guard against accidents. Nothing is encrypted: a card tells where its agent's memory is, and
how to knock. What a visitor claims is compared with the limits before anything of it is read, and its whole request has a deadline; each
visitor has a thread of its own, of which there are a few, so that one who dawdles holds up nobody else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol, TypeVar

from expertwire.errors import (
    CapacityError,
    DeadlineError,
    ExpertwireError,
    InvalidArgumentError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    PeerError,
    StateError,
    TransferError,
    UnavailableError,
)
from expertwire.transfer.metadata import CARD_BYTES_MAX

__all__ = ["Host", "Listener", "ListenerCounts", "fetch", "send", "withdraw"]

MAGIC = b"EWTL"
VERSION = 1
NONCE_BYTES = 16
LABEL_BYTES_MAX = 255
TEXT_BYTES_MAX = 1024
REQUEST_BYTES_MAX = CARD_BYTES_MAX + 64  # with a record's head
VISITORS_MAX = 16
VISIT_MS = 2000
RETRY_S = 0.05
_BACKLOG = 64

_HELLO = struct.Struct(f"<4sB{NONCE_BYTES}s")
_REQUEST = struct.Struct("<4sBBBI32s")
_REPLY = struct.Struct("<4sBBI")
_MAC_BYTES = 32
_INSTANCE = struct.Struct("<Q")
_SEND, _FETCH, _WITHDRAW = 1, 2, 3
T = TypeVar("T")
# What a refusal is on the other side, and the number that it travels as.
_ERRORS: tuple[type[ExpertwireError], ...] = (
    TransferError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    CapacityError,
    UnavailableError,
    PeerError,
    DeadlineError,
    InvalidArgumentError,
    StateError,
)
_DONE, _GO_ON = 0, 255


class Host(Protocol):
    """What a listener asks of whom it is for. Called in visitors' threads; an `ExpertwireError` raised here is raised at the visitor's."""

    def card_of(self, label: str) -> bytes:
        """The record to give; `label` is "" for everything."""

    def card_came(self, data: bytes) -> None:
        """A record that somebody has sent."""

    def card_withdrawn(self, name: str, instance: int) -> None:
        """That agent asks to be forgotten."""


@dataclass(frozen=True, slots=True)
class ListenerCounts:
    """What a listener has seen: visits that ended well, refused in words, that were no visits or too slow, and sent away as too many."""

    done: int = 0
    refused: int = 0
    broken: int = 0
    busy: int = 0


class Listener:
    """Listens on `hosts`, all at one port, until `close()`; `VISITORS_MAX` visitors at a time, `visit_ms` for each to say what it wants."""

    def __init__(self, hosts: Sequence[str], port: int, host: Host, token: bytes = b"", *, visit_ms: int = VISIT_MS) -> None:
        """`port` 0: the system chooses. Raises `UnavailableError` where it cannot listen there."""
        if not 0 <= port <= 65_535:
            raise InvalidArgumentError(f"a listener's port is {port}; it is 0 to 65535")
        self._host, self._token, self._visit_s = host, bytes(token), visit_ms / 1000
        self._pid = os.getpid()
        self._counts = {"done": 0, "refused": 0, "broken": 0, "busy": 0}
        self._lock = threading.Lock()
        self._visitors: set[threading.Thread] = set()
        self._sockets = _listen(list(dict.fromkeys(hosts)), port)
        self.port = int(self._sockets[0].getsockname()[1])
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="ew-metadata", daemon=True)
        self._thread.start()

    def counts(self) -> ListenerCounts:
        """A snapshot."""
        with self._lock:
            return ListenerCounts(**self._counts)

    def close(self) -> None:
        """No more visits; those under way have their deadline. Again, in a forked child, or when the interpreter ends: nothing."""
        if self._pid != os.getpid() or self._waker.fileno() < 0 or sys.is_finalizing():
            return
        self._waker.close()
        self._thread.join()
        ends = time.monotonic() + 2 * self._visit_s
        with self._lock:
            visitors = self._visitors - {threading.current_thread()}
        for visitor in visitors:
            visitor.join(max(0.0, ends - time.monotonic()))

    def _run(self) -> None:
        poll = select.poll()
        by_number = {each.fileno(): each for each in self._sockets}
        for number in (*by_number, self._wake.fileno()):
            poll.register(number, select.POLLIN)
        while True:
            ready = [number for number, _ in poll.poll()]
            if self._wake.fileno() in ready:
                break
            for number in ready:
                self._accept(by_number[number])
        for each in (*self._sockets, self._wake):
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            visitor, _ = listening.accept()
        except OSError:  # gone again before it was accepted, or no descriptor is left: the next poll asks again
            time.sleep(RETRY_S)
            return
        with self._lock:
            free = len(self._visitors) < VISITORS_MAX
            if free:
                thread = threading.Thread(target=self._visit, args=(visitor,), name="ew-visitor", daemon=True)
                self._visitors.add(thread)
            else:
                self._counts["busy"] += 1
        if free:
            thread.start()
        else:
            visitor.close()

    def _visit(self, visitor: socket.socket) -> None:
        outcome = "broken"
        try:
            with visitor:
                outcome = self._serve(_Line(visitor, self._visit_s, "the visitor"))
        except (ExpertwireError, OSError):
            pass  # counted: whoever cannot say what it wants, or does not read the answer, is told nothing
        finally:
            with self._lock:
                self._counts[outcome] += 1
                self._visitors.discard(threading.current_thread())

    def _serve(self, line: _Line) -> str:
        """Answer one visitor; how it ended. Its claims are checked here, before the rest of its request is asked for."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        line.put(_HELLO.pack(MAGIC, VERSION, nonce))
        head, mac = line.take(_REQUEST.size), line.take(_MAC_BYTES)
        try:
            sizes = _sizes(head, hmac.compare_digest(mac, _mac(self._token, nonce, head)))
            line.put(self._reply(nonce, _GO_ON, b""))
            status, answer = _DONE, self._answer(head, line.take(sizes[0]), line.take(sizes[1]))
        except (PeerError, DeadlineError) as error:
            if line.broken:
                raise
            status, answer = _refusal(error)
        except ExpertwireError as error:
            status, answer = _refusal(error)
        except Exception as error:  # a fault of the host's must reach its visitor as one, and end nothing here
            status, answer = _refusal(TransferError(f"{type(error).__name__}: {error}"))
        line.again(self._visit_s)
        line.put(self._reply(nonce, status, answer))
        return "done" if status == _DONE else "refused"

    def _reply(self, nonce: bytes, status: int, answer: bytes) -> bytes:
        reply = _REPLY.pack(MAGIC, VERSION, status, len(answer))
        return reply + _mac(self._token, nonce, reply, answer) + answer

    def _answer(self, head: bytes, label: bytes, payload: bytes) -> bytes:
        _, _, verb, _, _, digest = _REQUEST.unpack(head)
        if hashlib.sha256(label + payload).digest() != digest:
            raise MismatchError("a request has another digest than it says: it was altered on the way")
        if verb == _SEND:
            self._host.card_came(payload)
        elif verb == _FETCH:
            return self._host.card_of(label.decode(errors="replace"))
        elif verb == _WITHDRAW and len(payload) == _INSTANCE.size:
            self._host.card_withdrawn(label.decode(errors="replace"), _INSTANCE.unpack(payload)[0])
        else:
            raise MismatchError(f"a request of kind {verb} with {len(payload)} bytes is not known here")
        return b""


def _sizes(head: bytes, knows_token: bool) -> tuple[int, int]:
    """Bytes of label and payload that a request says will follow, once that is allowed to."""
    magic, version, _, label_bytes, payload_bytes, _ = _REQUEST.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise MismatchError(f"a request begins with {magic!r}, version {version}; {MAGIC!r}, version {VERSION} is read here")
    if not knows_token:
        raise NotAllowedError("the token is not the listener's")
    if payload_bytes > REQUEST_BYTES_MAX:
        raise CapacityError(f"a request of {payload_bytes} bytes is not read, the limit is {REQUEST_BYTES_MAX}")
    return label_bytes, payload_bytes


def send(host: str, port: int, data: bytes, token: bytes = b"", *, timeout_ms: int = 5000) -> None:
    """Give that listener a card's record; it has been added there when this returns.

    A listener that is not there yet is tried again until the deadline. Raises `PeerError` (nobody listens), `DeadlineError`,
    `NotAllowedError` (another token, or the agent there knows another process by this name), `MismatchError` (something else listens there,
    or that is no card), `CapacityError`.
    """
    _visit(host, port, _SEND, b"", data, token, timeout_ms)


def fetch(host: str, port: int, label: str = "", token: bytes = b"", *, timeout_ms: int = 5000) -> bytes:
    """The record of that listener's agent. Raises as `send` does, and `NotFoundError` where it has nothing of that label."""
    return _visit(host, port, _FETCH, label.encode(), b"", token, timeout_ms)


def withdraw(host: str, port: int, name: str, instance: int, token: bytes = b"", *, timeout_ms: int = 5000) -> None:
    """Ask that listener's agent to forget agent `name`, if it knows that instance of it. Raises as `send` does."""
    _visit(host, port, _WITHDRAW, name.encode(), _INSTANCE.pack(instance), token, timeout_ms)


def _visit(host: str, port: int, verb: int, label: bytes, payload: bytes, token: bytes, timeout_ms: int) -> bytes:
    where = f"the metadata listener at {host}:{port}"
    if not host or not 1 <= port <= 65_535:
        raise InvalidArgumentError(f"{where}: an address is a host and a port of 1 to 65535")
    if len(label) > LABEL_BYTES_MAX or len(payload) > REQUEST_BYTES_MAX:
        raise CapacityError(f"{len(label)} and {len(payload)} bytes are too many for {where}: {LABEL_BYTES_MAX} and {REQUEST_BYTES_MAX}")
    ends = time.monotonic() + timeout_ms / 1000
    with _reach(host, port, where, ends) as connected:
        line = _Line(connected, max(0.001, ends - time.monotonic()), where)
        magic, version, nonce = _HELLO.unpack(line.take(_HELLO.size))
        if magic != MAGIC or version != VERSION:
            raise MismatchError(
                f"{where} says {magic!r}, version {version}, not {MAGIC!r}, version {VERSION}: something else listens there"
            )
        head = _REQUEST.pack(MAGIC, VERSION, verb, len(label), len(payload), hashlib.sha256(label + payload).digest())
        line.put(head + _mac(token, nonce, head))
        status, answer = _replied(line, where, token, nonce)
        if status == _GO_ON:
            line.put(label + payload)
            status, answer = _replied(line, where, token, nonce)
    if status != _DONE:
        _raise(status, f"{where} refuses: {answer.decode(errors='replace')}")
    return answer


def _replied(line: _Line, where: str, token: bytes, nonce: bytes) -> tuple[int, bytes]:
    """(status, text or record) of one reply."""
    reply = line.take(_REPLY.size)
    magic, version, status, nbytes = _REPLY.unpack(reply)
    mac = line.take(_MAC_BYTES)
    if magic != MAGIC or version != VERSION or nbytes > (REQUEST_BYTES_MAX if status == _DONE else TEXT_BYTES_MAX):
        raise MismatchError(f"{where} answers {magic!r}, version {version}, status {status}, {nbytes} bytes: that is no answer")
    answer = line.take(nbytes)
    if not hmac.compare_digest(mac, _mac(token, nonce, reply, answer)):
        raise NotAllowedError(f"{where} has another token than was given here: give both agents the same")
    return status, answer


def _reach(host: str, port: int, where: str, ends: float) -> socket.socket:
    """A connection; who refuses may not have begun to listen yet, and is asked again until then."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.001, ends - time.monotonic()))
        except ConnectionRefusedError as error:
            if time.monotonic() + RETRY_S >= ends:
                raise PeerError(f"nobody listens: {where}: {error.strerror}") from error
        except TimeoutError as error:
            raise DeadlineError(f"{where} cannot be reached in time") from error
        except OSError as error:
            raise PeerError(f"{where} cannot be reached: {error}") from error
        time.sleep(RETRY_S)


class _Line:
    """A connection on which everything, as a whole, has one deadline. Raises `DeadlineError` and `PeerError`, and is `broken` then."""

    def __init__(self, connected: socket.socket, seconds: float, whose: str) -> None:
        self._socket, self._whose, self.broken = connected, whose, False
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.again(seconds)

    def again(self, seconds: float) -> None:
        """A new deadline, that many seconds from now."""
        self._ends = time.monotonic() + seconds

    def take(self, nbytes: int) -> bytes:
        """Exactly so many; memory is used for what has come, not for what was claimed."""
        parts, left = [], nbytes
        while left:
            part = self._step(partial(self._socket.recv, min(left, 1 << 16)))
            if not part:
                self.broken = True
                raise PeerError(f"{self._whose} has hung up, {left} of {nbytes} bytes before the end")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def put(self, data: bytes) -> None:
        """All of it."""
        view = memoryview(data)
        while view:
            view = view[self._step(partial(self._socket.send, view)) :]

    def _step(self, step: Callable[[], T]) -> T:
        left = self._ends - time.monotonic()
        try:
            self._socket.settimeout(max(left, 1e-6))
            return step()
        except (TimeoutError, BlockingIOError) as error:
            self.broken = True
            raise DeadlineError(f"{self._whose} has not answered in time") from error
        except OSError as error:
            self.broken = True
            raise PeerError(f"{self._whose} has hung up: {error.strerror}") from error


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """One listening socket a host, all at one port; with port 0 one that is free on all of them."""
    if not hosts:
        raise InvalidArgumentError("a listener needs at least one address to listen on")
    tries = 1 if port else 8
    for last in range(tries - 1, -1, -1):
        made: list[socket.socket] = []
        try:
            for host in hosts:
                found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
                one = socket.socket(found[0], socket.SOCK_STREAM)
                made.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((host, made[0].getsockname()[1] if len(made) > 1 else port))
                one.listen(_BACKLOG)
                one.setblocking(False)
            return made
        except OSError as error:
            for one in made:
                one.close()
            if not last:
                raise UnavailableError(
                    f"cannot listen for metadata on {', '.join(hosts)} at port {port}: {error.strerror}; give another port, or 0 for any"
                ) from error
    raise AssertionError("unreachable")


def _mac(token: bytes, nonce: bytes, *parts: bytes) -> bytes:
    made = hmac.new(token, nonce, hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


def _refusal(error: ExpertwireError) -> tuple[int, bytes]:
    """(status, text) that a visitor is answered with: the class that is nearest, and what was said."""
    number = next((index for index, kind in enumerate(_ERRORS) if isinstance(error, kind)), 0)
    return number + 1, str(error).encode()[:TEXT_BYTES_MAX]


def _raise(status: int, text: str) -> NoReturn:
    raise _ERRORS[status - 1 if 1 <= status <= len(_ERRORS) else 0](text)
