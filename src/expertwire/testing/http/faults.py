"""How a fake server misbehaves, as data: a fault is one way to answer badly, a script says which request meets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from expertwire.testing.http.wire import Head


class Cut(Enum):
    """Where an answer breaks off."""

    NOT = auto()
    BEFORE_HEAD = auto()
    IN_HEAD = auto()
    AFTER_EVENTS = auto()  # `events` of a stream, or that many bytes of a body
    IN_EVENT = auto()  # `events` whole ones, and half of the next


class Framing(Enum):
    """How the end of a body is told."""

    USUAL = auto()  # chunked for a stream, a length for the rest
    CHUNKED = auto()
    CLOSE = auto()  # by the end of the connection


class After(Enum):
    """What becomes of the connection after an answer that is whole."""

    KEEP = auto()
    CLOSE = auto()  # without having said so
    HALF_CLOSE = auto()  # nothing more is sent; what comes is read


@dataclass(frozen=True)
class Fault:
    """What is not named is as usual."""

    status: int = 0  # in place of an answer
    body: bytes = b""
    content_type: str = ""  # none: no such header
    headers: tuple[tuple[str, str], ...] = ()  # added to whatever is answered
    raw: bytes = b""  # exactly this, then the end of the connection
    interim: bytes = b""  # before the head, e.g. a 103
    delay_s: float = 0.0  # before the first byte
    hang: bool = False  # no answer, ever
    cut: Cut = Cut.NOT
    events: int = 0
    reset: bool = False  # a cut is RST, not FIN
    error_after: int | None = None  # after so many events an error event, then [DONE]
    framing: Framing = Framing.USUAL
    length_off: int = 0  # added to the Content-Length that is told
    chunk_bytes: int = 0  # of the chunks of a chunked body
    segment_bytes: int = 0  # of what is handed to the socket at a time
    after: After = After.KEEP
    behind: bytes = b""  # bytes after the answer, which nobody asked for
    params: Any = field(default_factory=dict)  # over P's kv_transfer_params; a value of DROP leaves a field out; None: null
    stops: bool = False  # the first token is the end of the text, so that P holds nothing
    dies: bool = False  # the engine ends once this request is answered


DROP = object()
NONE = Fault()

INTERNAL = b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}'


def status(code: int, body: bytes = INTERNAL, content_type: str = "application/json", **headers: str) -> Fault:
    """An answer of that status; underscores of header names are dashes."""
    return Fault(status=code, body=body, content_type=content_type, headers=tuple((n.replace("_", "-"), v) for n, v in headers.items()))


def html(code: int) -> Fault:
    """As a proxy between would answer."""
    return status(code, b"<html><body><h1>%d</h1></body></html>\n" % code, "text/html; charset=utf-8")


def text(code: int) -> Fault:
    """As uvicorn answers an exception that nobody caught."""
    return status(code, b"Internal Server Error", "text/plain; charset=utf-8")


def empty(code: int) -> Fault:
    """A status and nothing else."""
    return status(code, b"", "")


@dataclass
class Rule:
    """Which requests meet a fault."""

    fault: Fault
    path: str | None = None
    header: tuple[str, str] | None = None
    skip: int = 0  # this many that match are answered as usual first
    times: int | None = 1  # None: every one


class Script:
    """Rules in order; the first that matches counts."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def add(self, rule: Rule) -> None:
        """Behind those that are there."""
        self.rules.append(rule)

    def of(self, head: Head) -> Fault:
        """The fault for this request, and one use of its rule."""
        path = head.target.partition("?")[0]
        for rule in self.rules:
            if rule.path is not None and rule.path != path:
                continue
            if rule.header is not None and rule.header[1] not in head.all(rule.header[0]):
                continue
            if rule.skip:
                rule.skip -= 1
                return NONE
            if rule.times is None:
                return rule.fault
            if rule.times:
                rule.times -= 1
                return rule.fault
        return NONE
