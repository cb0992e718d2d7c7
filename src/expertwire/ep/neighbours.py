"""Whether two ranks share memory, proved by mapping; and descriptors of regions passed between those that do.

Each rank opens a door: an abstract unix socket of a random name (nothing to clean up, nothing to collide with), which answers those who
know its secret. The secret travels through the group, so only members have it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from expertwire.ep.processes import Process
from expertwire.errors import DeadlineError, UnavailableError

_SECRET_BYTES = 32
STEP_S = 30.0  # for all neighbours to answer at their doors
_LEAST_S = 0.001  # 0 would not wait at all, which is another error
_PROBE_BYTES = mmap.PAGESIZE
_WORD = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_PROVE, _REGIONS = b"P", b"R"
_DESCRIPTORS_MAX = 64
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_MORE_FILES = "raise the limit of open files (ulimit -n)"


@dataclass(frozen=True)
class Neighbour:
    """How to knock at a rank's door."""

    rank: int
    process: Process
    door: str
    secret: bytes


class Door:
    """Serves this rank's descriptors while the ranks find each other, and knocks at the doors of others."""

    def __init__(self, patience_s: float = STEP_S) -> None:
        """`patience_s`: how long one visitor may take, and, unless told otherwise, a neighbour to answer."""
        self._patience_s = patience_s
        self.name = f"expertwire-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._regions: dict[str, int] = {}
        self._regions_open = threading.Event()
        self._lock = threading.Lock()  # of the two below
        self._visitor: socket.socket | None = None
        self._closing = False
        with ExitStack() as undone:
            try:
                self._probe = os.memfd_create("expertwire probe", os.MFD_CLOEXEC)
                undone.callback(os.close, self._probe)
                os.ftruncate(self._probe, _PROBE_BYTES)
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                undone.callback(os.close, self._spare)
                self._socket = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._socket.bind("\0" + self.name)
                self._socket.listen(1024)
            except OSError as error:
                raise UnavailableError(f"no door for the ranks of this node: {error}{_advice(error)}") from error
            undone.pop_all()
        self._thread = threading.Thread(target=self._serve, name="expertwire door", daemon=True)
        self._thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        with self._lock:
            self._closing = True
            if self._visitor is not None:
                _hang_up(self._visitor)  # it may be stopped, and would be waited for
        self._regions_open.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._thread.join()
        self._socket.close()
        os.close(self._probe)
        if self._spare >= 0:
            os.close(self._spare)

    def open_regions(self, descriptors: Mapping[str, int]) -> None:
        """From now on, give these descriptors to neighbours. They stay the caller's."""
        self._regions.update(descriptors)
        self._regions_open.set()

    # ---- knocking

    def prove(self, neighbour: Neighbour, until_s: float | None = None) -> bool:
        """Whether this rank and the neighbour see the same bytes in a region of the neighbour's; on the monotonic clock by `until_s`.

        Raises `UnavailableError` where only the want of a descriptor, here or there, keeps them from it, and `DeadlineError` where it has a
        door and does not answer: such a rank would go by the network, and nobody would know why.
        """
        mark = secrets.randbits(64)
        until_s = self._until(until_s)
        try:
            knocked = self._knock(neighbour, _PROVE, until_s)
        except OSError as error:
            return _not_near(neighbour, error)
        with closing(knocked) as door:
            try:
                _limit(door, until_s)
                word, descriptors, flags, _ = socket.recv_fds(door, 1, 1)
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "its descriptor was cut off")
                if not word:
                    raise ConnectionError("closed before a descriptor came")
                try:
                    with mmap.mmap(descriptors[0], _PROBE_BYTES) as probe:
                        _WORD.pack_into(probe, 0, mark)
                        door.sendall(_WORD.pack(mark))
                        return _receive(door, 1, until_s) == b"Y"
                finally:
                    os.close(descriptors[0])
            except ConnectionError as error:
                raise UnavailableError(
                    f"rank {neighbour.rank} shut its door without an answer: it has no descriptor left, or has ended ({error})"
                ) from error
            except OSError as error:
                return _not_near(neighbour, error)

    @contextmanager
    def regions_of(self, neighbour: Neighbour, until_s: float | None = None) -> Iterator[dict[str, int]]:
        """Descriptors of a neighbour's regions by name, closed afterwards."""
        until_s = self._until(until_s)
        try:
            with closing(self._knock(neighbour, _REGIONS, until_s)) as door:
                (length,) = _LENGTH.unpack(_receive(door, _LENGTH.size, until_s))
                names = json.loads(_receive(door, length, until_s))
                _, descriptors, _, _ = socket.recv_fds(door, 1, _DESCRIPTORS_MAX)
        except OSError as error:
            raise UnavailableError(
                f"rank {neighbour.rank} did not pass its memory's descriptors, though it is in this node: {error}"
            ) from error
        try:
            if len(names) != len(descriptors):
                raise UnavailableError(
                    f"rank {neighbour.rank} passed {len(names)} regions and {len(descriptors)} descriptors arrived: {_MORE_FILES}"
                )
            yield dict(zip(names, descriptors, strict=True))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _until(self, given_s: float | None = None) -> float:
        return time.monotonic() + self._patience_s if given_s is None else given_s

    def _knock(self, neighbour: Neighbour, request: bytes, until_s: float) -> socket.socket:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _limit(door, until_s)
            door.connect("\0" + neighbour.door)
            door.sendall(neighbour.secret + request)
        except BaseException:
            door.close()
            raise
        return door

    # ---- answering

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError as error:
                if self._closing or error.errno not in _SHORTAGES or not self._turn_away():
                    return
                continue
            with closing(visitor):
                with self._lock:
                    if self._closing:
                        return
                    self._visitor = visitor
                try:
                    self._answer(visitor, self._until())
                except OSError:
                    continue  # the visitor has gone; it sees the same and says so
                finally:
                    with self._lock:
                        self._visitor = None

    def _turn_away(self) -> bool:
        """Who knocks while no descriptor is left sees the door shut, instead of waiting for an answer. Takes the spare one for it."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        try:
            self._socket.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def _answer(self, visitor: socket.socket, until_s: float) -> None:
        if not secrets.compare_digest(_receive(visitor, _SECRET_BYTES, until_s), self.secret):
            return
        request = _receive(visitor, 1, until_s)
        if request == _PROVE:
            socket.send_fds(visitor, [b"F"], [self._probe])
            mark = _receive(visitor, _WORD.size, until_s)
            with mmap.mmap(self._probe, _PROBE_BYTES) as probe:
                visitor.sendall(b"Y" if probe[: _WORD.size] == mark else b"N")
        elif request == _REGIONS and self._regions_open.wait(self._patience_s):
            names = json.dumps(list(self._regions)).encode()
            visitor.sendall(_LENGTH.pack(len(names)) + names)
            socket.send_fds(visitor, [b"F"], list(self._regions.values()))


def _advice(error: OSError) -> str:
    return f"; {_MORE_FILES}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""


def _not_near(neighbour: Neighbour, error: OSError) -> bool:
    """False: another host, namespace or user. Raises where only something that is short keeps the two apart: descriptors, or time."""
    if isinstance(error, TimeoutError):
        raise DeadlineError(f"rank {neighbour.rank} did not answer at its door in time: it has stopped, or gets no core") from error
    if error.errno in _SHORTAGES:
        raise UnavailableError(f"rank {neighbour.rank} cannot be asked for its memory: {error}{_advice(error)}") from error
    return False


def _limit(connection: socket.socket, until_s: float) -> None:
    """What it does next may take what is left of the time."""
    connection.settimeout(max(_LEAST_S, until_s - time.monotonic()))


def _hang_up(connection: socket.socket) -> None:
    """Whoever waits for it, in this process or the other, sees its end."""
    with suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, length: int, until_s: float) -> bytes:
    received = b""
    while len(received) < length:
        _limit(connection, until_s)
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError(f"closed after {len(received)} of {length} bytes")
        received += part
    return received
