"""Where two processes of one job meet: one stream, a unix socket in a fresh directory, or TCP between hosts.

Messages are lines of JSON. Each side waits for the kind that it expects; what went wrong on the other side arrives as an error.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from expertwire.errors import DeadlineError, InvalidArgumentError, MismatchError, PeerError

SOCKET_NAME = "meet"
WAIT_S = 120.0
RETRY_S = 0.02
LINE_BYTES_MAX = 1 << 24
READ_BYTES = 1 << 16


class Meeting:
    """One side of the stream; a context manager."""

    def __init__(self, stream: socket.socket, who: str) -> None:
        self._stream = stream
        self._who = who  # the other side, for messages
        self._held = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with contextlib.suppress(OSError):
                self.send("error", what=f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Leave."""
        self._stream.close()

    @property
    def host(self) -> str:
        """The address of this side that the other reaches: where engines listen."""
        if self._stream.family == socket.AF_UNIX:
            return "127.0.0.1"
        return str(self._stream.getsockname()[0])

    def send(self, kind: str, **content: Any) -> None:
        """Give the other side a message."""
        self._stream.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")

    def waiting(self) -> bool:
        """Whether something of a message has come; takes no time."""
        return bool(self._held) or bool(select.select([self._stream], [], [], 0)[0])

    def receive(self, kind: str, wait_s: float = WAIT_S) -> dict[str, Any]:
        """The next message. Raises `PeerError` (it failed or has gone), `DeadlineError`, `MismatchError` (another kind)."""
        line = self._line(kind, wait_s)
        content: dict[str, Any] = json.loads(line)
        found = content.pop("kind")
        if found == "error":
            raise PeerError(f"the {self._who} failed: {content['what']}")
        if found != kind:
            raise MismatchError(f"the {self._who} said {found!r} where {kind!r} was to come")
        return content

    def _line(self, kind: str, wait_s: float) -> bytes:
        deadline = time.monotonic() + wait_s
        while (end := self._held.find(b"\n")) < 0:
            self._stream.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                more = self._stream.recv(READ_BYTES)
            except TimeoutError:
                raise DeadlineError(f"the {self._who} has not said {kind!r} within {wait_s:.0f} s") from None
            except ConnectionError as error:
                raise PeerError(f"the {self._who} has gone before it said {kind!r}: {error.strerror}") from None
            if not more:
                raise PeerError(f"the {self._who} has gone before it said {kind!r}")
            self._held += more
            if len(self._held) > LINE_BYTES_MAX:
                raise MismatchError(f"the {self._who} sent a message of more than {LINE_BYTES_MAX} bytes")
        line, self._held = self._held[:end], self._held[end + 1 :]
        return line


def meet(where: str, source: bool, wait_s: float = WAIT_S) -> Meeting:
    """Come together at `where`: a directory, or HOST:PORT on which the target listens. Raises `DeadlineError`, `InvalidArgumentError`."""
    family, address = _address(where)
    deadline = time.monotonic() + wait_s
    if not source:
        with socket.socket(family, socket.SOCK_STREAM) as door:
            if family != socket.AF_UNIX:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
            door.listen(1)
            door.settimeout(wait_s)
            try:
                stream, _ = door.accept()
            except TimeoutError:
                raise DeadlineError(f"no source has come to {where} within {wait_s:.0f} s") from None
        return Meeting(stream, "source")
    while True:
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            stream.close()
            if time.monotonic() > deadline:
                raise DeadlineError(f"no target listens at {where} after {wait_s:.0f} s") from None
            time.sleep(RETRY_S)
        else:
            return Meeting(stream, "target")


def _address(where: str) -> tuple[int, Any]:
    if Path(where).is_dir():
        return socket.AF_UNIX, str(Path(where) / SOCKET_NAME)
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidArgumentError(f"--meet is {where!r}; give a directory that exists, or HOST:PORT on which the target listens")
    return socket.AF_INET6 if ":" in host.strip("[]") else socket.AF_INET, (host.strip("[]"), int(port))


def same_settings(mine: dict[str, Any], theirs: dict[str, Any], whose: str) -> None:
    """Raises `MismatchError` naming every key that differs, with both values."""
    differ = [key for key in dict.fromkeys((*mine, *theirs)) if mine.get(key) != theirs.get(key)]
    if differ:
        words = ", ".join(f"{key} is {mine.get(key)!r} here and {theirs.get(key)!r} there" for key in differ)
        raise MismatchError(f"the {whose} of this pair was started otherwise: {words}")
