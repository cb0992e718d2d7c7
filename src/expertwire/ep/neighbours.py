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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType

from expertwire.ep.processes import Process
from expertwire.errors import UnavailableError

_SECRET_BYTES = 32
_STEP_S = 30.0  # a neighbour that does not answer for so long is no neighbour
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

    def __init__(self, patience_s: float = _STEP_S) -> None:
        self._patience_s = patience_s
        self.name = f"expertwire-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._regions: dict[str, int] = {}
        self._regions_open = threading.Event()
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
        self._closing = True
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

    def prove(self, neighbour: Neighbour) -> bool:
        """Whether this rank and the neighbour see the same bytes in a region of the neighbour's. Raises `UnavailableError` where only the
        want of a descriptor, here or there, keeps them from it: such a rank would go by the network, and nobody would know why."""
        mark = secrets.randbits(64)
        try:
            knocked = self._knock(neighbour, _PROVE)
        except OSError as error:
            return _not_near(neighbour, error)
        with closing(knocked) as door:
            try:
                word, descriptors, flags, _ = socket.recv_fds(door, 1, 1)
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "its descriptor was cut off")
                if not word:
                    raise ConnectionError("closed before a descriptor came")
                try:
                    with mmap.mmap(descriptors[0], _PROBE_BYTES) as probe:
                        _WORD.pack_into(probe, 0, mark)
                        door.sendall(_WORD.pack(mark))
                        return _receive(door, 1) == b"Y"
                finally:
                    os.close(descriptors[0])
            except ConnectionError as error:
                raise UnavailableError(
                    f"rank {neighbour.rank} shut its door without an answer: it has no descriptor left, or has ended ({error})"
                ) from error
            except OSError as error:
                return _not_near(neighbour, error)

    @contextmanager
    def regions_of(self, neighbour: Neighbour) -> Iterator[dict[str, int]]:
        """Descriptors of a neighbour's regions by name, closed afterwards."""
        try:
            with closing(self._knock(neighbour, _REGIONS)) as door:
                (length,) = _LENGTH.unpack(_receive(door, _LENGTH.size))
                names = json.loads(_receive(door, length))
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

    def _knock(self, neighbour: Neighbour, request: bytes) -> socket.socket:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            door.settimeout(self._patience_s)
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
                if self._closing:
                    return
                try:
                    visitor.settimeout(self._patience_s)
                    self._answer(visitor)
                except OSError:
                    continue  # the visitor has gone; it sees the same and says so

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

    def _answer(self, visitor: socket.socket) -> None:
        if not secrets.compare_digest(_receive(visitor, _SECRET_BYTES), self.secret):
            return
        request = _receive(visitor, 1)
        if request == _PROVE:
            socket.send_fds(visitor, [b"F"], [self._probe])
            mark = _receive(visitor, _WORD.size)
            with mmap.mmap(self._probe, _PROBE_BYTES) as probe:
                visitor.sendall(b"Y" if probe[: _WORD.size] == mark else b"N")
        elif request == _REGIONS and self._regions_open.wait(self._patience_s):
            names = json.dumps(list(self._regions)).encode()
            visitor.sendall(_LENGTH.pack(len(names)) + names)
            socket.send_fds(visitor, [b"F"], list(self._regions.values()))


def _advice(error: OSError) -> str:
    return f"; {_MORE_FILES}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""


def _not_near(neighbour: Neighbour, error: OSError) -> bool:
    """False: another host, namespace or user. Raises where only something that is short keeps the two apart."""
    if error.errno in _SHORTAGES:
        raise UnavailableError(f"rank {neighbour.rank} cannot be asked for its memory: {error}{_advice(error)}") from error
    return False


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError(f"closed after {len(received)} of {length} bytes")
        received += part
    return received
