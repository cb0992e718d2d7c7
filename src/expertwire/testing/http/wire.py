"""HTTP/1.1 messages from bytes, strictly: what a sender may not say raises `WireError`. Pure, and shares nothing with the proxy's parsers.

Written after RFC 9112: it is the judge of what the proxy sends, so it takes no leniency that RFC allows a recipient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from expertwire.errors import ExpertwireError

HEAD_BYTES_MAX = 1 << 20
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([^ \x00-\x20\x7f]+) HTTP/(1\.[01])")
_STATUS_LINE = re.compile(r"HTTP/(1\.[01]) ([1-5][0-9][0-9]) ([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\r\n]*)?")


class WireError(ExpertwireError):
    """Bytes that are no HTTP/1.1 message. The message says what, and where."""


@dataclass(frozen=True)
class Head:
    """First line and headers of a message. Names are in lower case, in the order in which they came."""

    method: str  # of a response ""
    target: str
    status: int  # of a request 0
    version: str
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """Every value of that header."""
        return [value for found, value in self.headers if found == name]

    def get(self, name: str, default: str = "") -> str:
        """The first value, or `default`."""
        return next(iter(self.all(name)), default)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection outlives this message."""
        words = {word.strip().lower() for value in self.all("connection") for word in value.split(",")}
        return "close" not in words and (self.version == "1.1" or "keep-alive" in words)


@dataclass(frozen=True)
class End:
    """A message is whole; `trailers` are what followed its last chunk."""

    trailers: tuple[tuple[str, str], ...] = ()


Event = Head | bytes | End


class _Phase(Enum):
    HEAD = auto()
    LENGTH = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    UNTIL_CLOSE = auto()


class Decoder:
    """Bytes of one direction of a connection, in; heads, pieces of bodies, and ends, out."""

    def __init__(self, *, responses: bool = False) -> None:
        self._responses = responses
        self._buffer = bytearray()
        self._phase = _Phase.HEAD
        self._left = 0
        self.bodiless: list[bool] = []  # of responses: whether the request was HEAD, in order

    def feed(self, data: bytes) -> list[Event]:
        """What is complete now. Raises `WireError`; the connection is of no use after that."""
        self._buffer += data
        found: list[Event] = []
        while self._step(found):
            pass
        return found

    def end(self) -> list[Event]:
        """The sender has closed. Raises `WireError` where a message was cut short."""
        if self._phase is _Phase.UNTIL_CLOSE:
            self._phase = _Phase.HEAD
            return [End()]
        if self._phase is not _Phase.HEAD or self._buffer:
            raise WireError(f"closed in the midst of a message, in its {self._phase.name.lower()}, {self._left} bytes missing there")
        return []

    @property
    def idle(self) -> bool:
        """Between two messages, with nothing left over."""
        return self._phase is _Phase.HEAD and not self._buffer

    def _step(self, found: list[Event]) -> bool:
        """One part of a message; False where more bytes are needed."""
        if self._phase is _Phase.HEAD:
            return self._head(found)
        if self._phase in (_Phase.LENGTH, _Phase.CHUNK_DATA, _Phase.UNTIL_CLOSE):
            return self._data(found)
        if self._phase is _Phase.TRAILERS:
            return self._trailers(found)
        line = self._line()
        if line is None:
            return False
        if self._phase is _Phase.CHUNK_END:
            if line:
                raise WireError(f"{line[:40]!r} follows a chunk's data, where its CRLF should be")
            self._phase = _Phase.CHUNK_SIZE
            return True
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise WireError(f"{line[:40]!r} is no chunk size")
        self._left = int(size[1], 16)
        self._phase = _Phase.CHUNK_DATA if self._left else _Phase.TRAILERS
        return True

    def _line(self) -> bytes | None:
        at = self._buffer.find(b"\n")
        if at < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise WireError(f"a line of more than {HEAD_BYTES_MAX} bytes")
            return None
        if at == 0 or self._buffer[at - 1] != 0x0D:
            raise WireError("a line ends in LF alone")
        line = bytes(self._buffer[: at - 1])
        del self._buffer[: at + 1]
        return line

    def _block(self) -> list[str] | None:
        """The lines up to an empty one."""
        if self._buffer.startswith(b"\r\n"):
            del self._buffer[:2]
            return []
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise WireError(f"a head of more than {HEAD_BYTES_MAX} bytes")
            return None
        text = bytes(self._buffer[:at]).decode("latin-1")
        del self._buffer[: at + 4]
        lines = text.split("\r\n")
        if bad := [line for line in lines if "\n" in line or "\r" in line]:
            raise WireError(f"{bad[0][:80]!r} has a lone CR or LF")
        return lines

    def _head(self, found: list[Event]) -> bool:
        if not self._buffer:
            return False
        lines = self._block()
        if lines is None:
            return False
        head = _response_head(lines) if self._responses else _request_head(lines)
        found.append(head)
        self._phase, self._left = self._framing(head)
        if self._phase is _Phase.LENGTH and not self._left:
            self._finish(found)
        return True

    def _framing(self, head: Head) -> tuple[_Phase, int]:
        codings, lengths = head.all("transfer-encoding"), head.all("content-length")
        if codings and lengths:
            raise WireError("both Transfer-Encoding and Content-Length")
        if self._responses and self._has_no_body(head):
            return _Phase.LENGTH, 0
        if codings:
            if [coding.lower() for coding in codings] != ["chunked"]:
                raise WireError(f"Transfer-Encoding is {codings}; only one `chunked` is known")
            return _Phase.CHUNK_SIZE, 0
        if lengths:
            if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,15}", lengths[0]):
                raise WireError(f"Content-Length is {lengths}")
            return _Phase.LENGTH, int(lengths[0])
        return (_Phase.UNTIL_CLOSE, 0) if self._responses else (_Phase.LENGTH, 0)

    def _has_no_body(self, head: Head) -> bool:
        if head.status < 200:
            return True
        asked_by_head = self.bodiless.pop(0) if self.bodiless else False
        return asked_by_head or head.status in (204, 304)

    def _data(self, found: list[Event]) -> bool:
        if not self._buffer:
            return False
        if self._phase is _Phase.UNTIL_CLOSE:
            found.append(bytes(self._buffer))
            self._buffer.clear()
            return False
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        found.append(piece)
        if not self._left:
            if self._phase is _Phase.LENGTH:
                self._finish(found)
            else:
                self._phase = _Phase.CHUNK_END
        return True

    def _trailers(self, found: list[Event]) -> bool:
        lines = self._block()
        if lines is None:
            return False
        self._finish(found, _fields(lines))
        return True

    def _finish(self, found: list[Event], trailers: tuple[tuple[str, str], ...] = ()) -> None:
        found.append(End(trailers))
        self._phase, self._left = _Phase.HEAD, 0


def _request_head(lines: list[str]) -> Head:
    line = _REQUEST_LINE.fullmatch(lines[0] if lines else "")
    if line is None:
        raise WireError(f"{lines[:1]} is no request line")
    head = Head(line[1], line[2], 0, line[3], _fields(lines[1:]))
    if head.version == "1.1" and len(head.all("host")) != 1:
        raise WireError(f"{len(head.all('host'))} Host headers; one is needed")
    return head


def _response_head(lines: list[str]) -> Head:
    line = _STATUS_LINE.fullmatch(lines[0] if lines else "")
    if line is None:
        raise WireError(f"{lines[:1]} is no status line")
    return Head("", "", int(line[2]), line[1], _fields(lines[1:]))


def _fields(lines: list[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for line in lines:
        name, colon, value = line.partition(":")
        if line[:1] in (" ", "\t"):
            raise WireError(f"{line[:80]!r} continues the header before it (obs-fold)")
        if not colon or not _TOKEN.fullmatch(name) or "\0" in value:
            raise WireError(f"{line[:80]!r} is no header")
        found.append((name.lower(), value.strip(" \t")))
    return tuple(found)


def encode(first: str, headers: list[tuple[str, str]], body: bytes | None = b"") -> bytes:
    """A message with a Content-Length, or with no body and none (`None`)."""
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; of nothing, the last."""
    return b"%x\r\n%s\r\n" % (len(data), data)
