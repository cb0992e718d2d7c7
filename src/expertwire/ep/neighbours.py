"""Whether two ranks share memory, proved by mapping; and descriptors of regions passed between those that do.

Each rank opens a door: an abstract unix socket of a random name (nothing to clean up, nothing to collide with), which answers those who
know its secret. The secret travels through the group, so only members have it.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
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
        self._probe = os.memfd_create("expertwire probe", os.MFD_CLOEXEC)
        os.ftruncate(self._probe, _PROBE_BYTES)
        self._regions: dict[str, int] = {}
        self._regions_open = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(1024)
        self._closing = False
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

    def open_regions(self, descriptors: Mapping[str, int]) -> None:
        """From now on, give these descriptors to neighbours. They stay the caller's."""
        self._regions.update(descriptors)
        self._regions_open.set()

    # ---- knocking

    def prove(self, neighbour: Neighbour) -> bool:
        """Whether this rank and the neighbour see the same bytes in a region of the neighbour's."""
        mark = secrets.randbits(64)
        try:
            with closing(self._knock(neighbour, _PROVE)) as door:
                _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
                if not descriptors:
                    return False
                try:
                    with mmap.mmap(descriptors[0], _PROBE_BYTES) as probe:
                        _WORD.pack_into(probe, 0, mark)
                        door.sendall(_WORD.pack(mark))
                        return _receive(door, 1) == b"Y"
                finally:
                    os.close(descriptors[0])
        except OSError:
            return False  # another host, namespace or user: not a neighbour

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
                    f"rank {neighbour.rank} passed {len(names)} regions and {len(descriptors)} descriptors arrived: "
                    "raise the limit of open files (ulimit -n)"
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
            except OSError:
                return  # closed
            with closing(visitor):
                if self._closing:
                    return
                try:
                    visitor.settimeout(self._patience_s)
                    self._answer(visitor)
                except OSError:
                    continue  # the visitor has gone; it sees the same and says so

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


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise ConnectionError(f"closed after {len(received)} of {length} bytes")
        received += part
    return received
