"""Bytes of answers: status lines, heads, chunks. Pure, but for the clock that the Date header needs."""

from __future__ import annotations

import http
import time
from email.utils import formatdate
from typing import Final

LAST_CHUNK: Final = b"0\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP: Final = b"connection: keep-alive\r\n"

_REASONS: Final = {status.value: status.phrase.encode() for status in http.HTTPStatus}


def has_no_body(status: int) -> bool:
    """RFC 9112, 6.3: answers that end with their head whatever it says."""
    return status < 200 or status in (204, 304)


class Heads:
    """Status line and Date, made once in a second for each status."""

    __slots__ = ("_lines", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._lines: dict[int, bytes] = {}

    def start(self, status: int) -> bytes:
        """`HTTP/1.1 200 OK` and `date: …`, each with its end."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._lines.clear()
        line = self._lines.get(status)
        if line is None:
            date = formatdate(second, usegmt=True).encode()
            line = self._lines[status] = b"HTTP/1.1 %d %b\r\ndate: %b\r\n" % (status, _REASONS.get(status, b""), date)
        return line


def whole(start: bytes, headers: bytes, ending: bytes, body: bytes) -> bytes:
    """A complete answer. `ending`: CLOSE, KEEP, or nothing."""
    return b"%b%b%bcontent-length: %d\r\n\r\n%b" % (start, headers, ending, len(body), body)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. Not of nothing: that would be the last."""
    return b"%x\r\n%b\r\n" % (len(data), data)
