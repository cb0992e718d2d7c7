"""Where an agent is knocked at: a listening socket and one thread. And how one knocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from expertwire.errors import ExpertwireError, MismatchError, PeerError, StateError, UnavailableError
from expertwire.transfer.card import Door
from expertwire.transfer.introduction import LENGTH, RECORD_BYTES_MAX, Answer, Elsewhere, Knock, Later, Record, Refusal, decode, encode

__all__ = ["Doorkeeper", "knock"]

VISITORS_MAX = 64
VISIT_S = 2.0  # whoever has not said all by then is sent away
TICK_S = 1.0
AGAIN_S = 0.02  # between knocks where it is said that one comes too early


@dataclass
class _Visitor:
    socket: socket.socket
    until: float
    heard: bytearray = field(default_factory=bytearray)


class Doorkeeper:
    """Listens on `host` at a port of the system's choice. `answer(knock)` is called on its thread, and `tick()` once a second.

    `answer` returns None once nobody lives here any more: then the thread ends by itself.
    """

    def __init__(self, host: str, answer: Callable[[Knock], Record | None], tick: Callable[[], bool]) -> None:
        self._answer, self._tick = answer, tick
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(VISITORS_MAX)
            self._listener.setblocking(False)
        except OSError as error:
            self._listener.close()
            raise StateError(f"the door cannot listen at {host}: {error}; EXPERTWIRE_INTERFACE names another interface") from None
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._bell, self._button = socket.socketpair()
        self._ending = threading.Lock()  # of the button, which the thread closes, too, where it ends by itself
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._thread = threading.Thread(target=self._live, name="expertwire door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the door. Idempotent."""
        with self._ending:
            if self._button.fileno() >= 0:
                self._button.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _live(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            next_tick = time.monotonic() + TICK_S
            alive = True
            while alive:
                for key, _ in selector.select(TICK_S):
                    if key.fileobj is self._bell:
                        alive = False
                    elif key.fileobj is self._listener:
                        self._welcome(selector)
                    elif isinstance(key.data, _Visitor):
                        self._hear(selector, key.data)
                now = time.monotonic()
                for visitor in [each for each in self._visitors.values() if now >= each.until]:
                    self._dismiss(selector, visitor)
                if now >= next_tick:
                    alive = self._tick() and alive
                    next_tick = now + TICK_S
            for visitor in list(self._visitors.values()):
                self._dismiss(selector, visitor)
        self._listener.close()
        with self._ending:
            self._bell.close()
            self._button.close()

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            guest, _ = self._listener.accept()
            if len(self._visitors) >= VISITORS_MAX:
                guest.close()
                return
            guest.setblocking(False)
            self._visitors[guest] = _Visitor(guest, time.monotonic() + VISIT_S)
            selector.register(guest, selectors.EVENT_READ, self._visitors[guest])

    def _dismiss(self, selector: selectors.BaseSelector, visitor: _Visitor) -> None:
        selector.unregister(visitor.socket)
        del self._visitors[visitor.socket]
        visitor.socket.close()

    def _hear(self, selector: selectors.BaseSelector, visitor: _Visitor) -> None:
        try:
            more = visitor.socket.recv(RECORD_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        visitor.heard += more
        said = _whole(visitor.heard)
        if said is None and more:
            return
        if said:
            with contextlib.suppress(OSError):  # a record fits the socket's buffer; who does not listen has gone
                visitor.socket.sendall(_framed(self._reply(said)))
        self._dismiss(selector, visitor)

    def _reply(self, said: bytes) -> Record:
        try:
            record = decode(said)
            if not isinstance(record, Knock):
                return Refusal("this is no knock")
            return self._answer(record) or Refusal("nobody lives here any more")
        except ExpertwireError as error:
            return Refusal(f"{type(error).__name__}: {error}")


def _framed(record: Record) -> bytes:
    data = encode(record)
    return LENGTH.pack(len(data)) + data


def _whole(heard: bytes | bytearray) -> bytes | None:
    """The record, once all of it is here; b"" where it is longer than one may be."""
    if len(heard) < LENGTH.size:
        return None
    (count,) = LENGTH.unpack_from(heard)
    if count > RECORD_BYTES_MAX:
        return b""
    return bytes(heard[LENGTH.size : LENGTH.size + count]) if len(heard) >= LENGTH.size + count else None


def knock(door: Door, record: Knock, whose: str, timeout_s: float) -> Answer:
    """Introduce oneself to agent `whose`.

    Raises `PeerError` (nobody answers within `timeout_s`), `MismatchError` (refused, and why), `UnavailableError` (not over that path).
    """
    where = f"agent {whose!r} at {door.host}:{door.port}"
    deadline = time.monotonic() + timeout_s
    while isinstance(reply := _ask(door, record, where, timeout_s, deadline), Later):
        if time.monotonic() + AGAIN_S >= deadline:
            raise PeerError(f"{where} has not let go of what was between us within {timeout_s:g} s: {reply.why}")
        time.sleep(AGAIN_S)
    if isinstance(reply, Elsewhere):
        raise UnavailableError(f"{where} is not reached over {record.path!r}: {reply.why}")
    if isinstance(reply, Refusal):
        raise MismatchError(f"{where} refuses the introduction: {reply.why}")
    if not isinstance(reply, Answer):
        raise MismatchError(f"{where} answers a knock with a {type(reply).__name__}")
    return reply


def _ask(door: Door, record: Knock, where: str, timeout_s: float, deadline: float) -> Record:
    try:
        with socket.create_connection((door.host, door.port), timeout=max(0.001, deadline - time.monotonic())) as line:
            line.sendall(_framed(record))
            heard = bytearray()
            while (said := _whole(heard)) is None:
                line.settimeout(max(0.001, deadline - time.monotonic()))
                more = line.recv(RECORD_BYTES_MAX)
                if not more:
                    raise PeerError(f"{where} closed its door without an answer; it has ended, or too many knock at once")
                heard += more
    except TimeoutError:
        raise PeerError(f"{where} has not answered within {timeout_s:g} s; does its process live, and can this port be reached?") from None
    except PeerError:
        raise
    except OSError as error:
        raise PeerError(f"{where} cannot be reached: {error}; has it ended?") from None
    return decode(said)
