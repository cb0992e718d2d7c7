"""Which headers go up to a server and which come back, rendered as lines; and the complete requests of legs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

Headers = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: of one connection only. Proxy-Authorization is a secret for us, not for the server.
_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# What each leg writes itself. A leg's answer is read here, so it may not be compressed.
_OURS: Final = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id", b"x-data-parallel-rank"})
_DROPPED_UP: Final = _HOP | _OURS
_DROPPED_UP_JSON: Final = _DROPPED_UP | {b"content-type", b"content-encoding"}
_DROPPED_DOWN: Final = _HOP | {b"content-length", b"x-request-id", b"date"}
# Of a two-leg answer only these: it is made anew here.
_KEPT_DOWN: Final = frozenset({b"content-type", b"retry-after", b"www-authenticate", b"content-encoding"})
# One formatting takes two thirds of the time of a join of as many pieces.
_HEAD: Final = b"%b %b HTTP/1.1\r\nhost: %b\r\n%baccept-encoding: identity\r\nx-request-id: %b\r\n%b"
_BODILESS: Final = _HEAD + b"\r\n"
_WITH_BODY: Final = _HEAD + b"content-length: %d\r\n\r\n%b"
_JSON: Final = b"content-type: application/json\r\n"
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,256}")


def value_of(headers: Headers, name: bytes) -> bytes:
    """The first header of that (lower-case) name, b"" if there is none."""
    for key, value in headers:
        if key == name:
            return value
    return b""


def request_id_of(fields: dict[bytes, bytes]) -> bytes:
    """The caller's X-Request-Id, if it is one that a header line may hold; else b""."""
    value = fields.get(b"x-request-id", b"")
    return value if value and _REQUEST_ID.fullmatch(value) else b""


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    names = [part.strip().lower() for key, value in headers if key == b"connection" for part in value.split(b",")]
    return frozenset(name for name in names if name not in (b"close", b"keep-alive"))


def up_lines(headers: Headers, *, json: bool) -> bytes:
    """The client's headers that go up, rendered. `json`: the leg's body is made here, so its content type is not the client's."""
    dropped = _DROPPED_UP_JSON if json else _DROPPED_UP
    lines = []
    for pair in headers:
        if pair[0] not in dropped:
            lines.append(pair[0] + b": " + pair[1])
        elif pair[0] == b"connection" and (named := _named_by_connection(headers) - dropped):
            return up_lines([other for other in headers if other[0] not in named and other is not pair], json=json)
    lines.append(b"")
    return b"\r\n".join(lines)


def message(method: bytes, target: bytes, host: bytes, lines: bytes, request_id: bytes, rank: bytes, body: bytes | None) -> bytes:
    """A complete request. `rank`: for X-data-parallel-rank, b"" for none. `body`: None where the client sent none."""
    ranked = b"x-data-parallel-rank: %b\r\n" % rank if rank else b""
    if body is None:
        return _BODILESS % (method, target, host, lines, request_id, ranked)
    return _WITH_BODY % (method, target, host, lines, request_id, ranked, len(body), body)


class Digest:
    """What conversations ask of a request's head. It can be kept for heads that come again."""

    __slots__ = ("_headers", "_json_lines", "rank", "request_id", "target")

    def __init__(self, target: bytes, headers: Headers) -> None:
        self.target = origin_form(target)
        fields = dict(headers[::-1])  # of several alike the first
        self.request_id = request_id_of(fields)
        self.rank = fields.get(b"x-data-parallel-rank", b"")
        self._headers = headers
        self._json_lines = b""

    def json_lines(self) -> bytes:
        """The header lines of a leg whose body is made here."""
        if not self._json_lines:
            self._json_lines = up_lines(self._headers, json=True) + _JSON
        return self._json_lines


def origin_form(target: bytes) -> bytes:
    """Path and query of a request's target: what it names as a host is nobody's to choose."""
    if target.startswith(b"/"):
        return target
    _, mark, rest = target.partition(b"://")
    if not mark:
        return b"/"
    at = min((index for index in (rest.find(b"/"), rest.find(b"?")) if index >= 0), default=-1)
    if at < 0:
        return b"/"
    return rest[at:] if rest[at : at + 1] == b"/" else b"/" + rest[at:]


def down_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Of a two-leg answer's headers those that the client gets, rendered."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] in _KEPT_DOWN])


def plain_down_lines(headers: Headers, origin: bytes) -> bytes:
    """Of an answer that is passed on: all but those of the connection. A Location on the server itself (`origin`) becomes a path."""
    named = _named_by_connection(headers)
    lines = []
    for key, value in headers:
        if key in _DROPPED_DOWN or key in named:
            continue
        if key == b"location" and value.startswith(origin) and value[len(origin) : len(origin) + 1] in (b"/", b"?", b""):
            value = value[len(origin) :] or b"/"
        lines.append(b"%b: %b\r\n" % (key, value))
    return b"".join(lines)


def media_type(headers: Headers) -> bytes:
    """The content type without its parameters, lower case."""
    return value_of(headers, b"content-type").partition(b";")[0].strip().lower()


def length_of(headers: Headers) -> int | None:
    """Content-Length as a number, None if there is none."""
    value = value_of(headers, b"content-length")
    return int(value) if value.isdigit() else None
