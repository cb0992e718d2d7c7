"""The answer to one client's request: how its head and end are told, and what the connection must know of the request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from expertwire.proxy.faults import Fault
from expertwire.proxy.headers import Digest, Headers
from expertwire.proxy.held import Held
from expertwire.proxy.http import render
from expertwire.proxy.http.wheel import Wheel
from expertwire.proxy.seam import Request

if TYPE_CHECKING:
    from expertwire.proxy.http.front import Front


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Of what clients may send, in bytes, numbers and seconds."""

    head_bytes: int
    headers: int
    body_bytes: int
    pipelined: int
    connections: int
    head_s: float
    idle_s: float
    stall_s: float
    free_bytes: int  # a body up to this is not counted; not above `body_bytes`
    descriptors: int  # a connection whose descriptor is not below this is refused
    descriptors_left: int  # and not below this: closed at once
    retry_after_s: int


class Service(Protocol):
    """Who answers."""

    limits: FrontLimits
    wheel: Wheel
    heads: render.Heads
    fronts: set[Front]
    known: dict[bytes, Known]
    held: Held
    stopping: bool

    def open(self, front: Front, ask: Ask) -> Reply:
        """The object that answers a request. Nothing is sent yet."""

    def answer(self, reply: Reply) -> None:
        """Begin to answer."""

    def out_of(self, what: str) -> Fault:
        """What is answered, and is counted, where there are no more "descriptors", or no room for "bodies"."""


class Known(NamedTuple):
    """What a head meant that came before, byte for byte, and how long the body behind it is."""

    method: bytes
    target: bytes
    headers: Headers
    digest: Digest
    size: int


@dataclass(slots=True)
class Ask:
    """A request that is whole, and what its connection needs to know of it."""

    request: Request
    keep: bool
    old: bool  # HTTP/1.0
    counted: int  # bytes of its body that `Service.held` counts until its reply is over


class Stage(IntEnum):
    """How far a reply is."""

    OPEN = 0
    BEGUN = auto()
    OVER = auto()


class Framing(IntEnum):
    """How the end of a reply is told."""

    NONE = 0  # it ends with its head
    LENGTH = auto()
    CHUNKED = auto()
    UNTIL_CLOSE = auto()


# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_FRAMING_CHUNKED, _FRAMING_LENGTH, _FRAMING_NONE = Framing.CHUNKED, Framing.LENGTH, Framing.NONE
_FRAMING_UNTIL_CLOSE = Framing.UNTIL_CLOSE
_STAGE_BEGUN, _STAGE_OPEN, _STAGE_OVER = Stage.BEGUN, Stage.OPEN, Stage.OVER


class Reply:
    """The answer to one request: `Port`'s half that faces the client."""

    __slots__ = ("_framing", "counted", "front", "keep", "old", "request", "stage")

    def __init__(self, front: Front, ask: Ask) -> None:
        self.front: Front | None = front
        self.request = ask.request
        self.keep = ask.keep
        self.old = ask.old
        self.counted = ask.counted
        self.stage = _STAGE_OPEN
        self._framing = _FRAMING_LENGTH

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """Port: a whole reply."""
        front = self.front
        if front is None or self.stage is not _STAGE_OPEN:
            return
        self.stage = _STAGE_OVER
        start = front.service.heads.start(status)
        if self.request.method == b"HEAD" or (status != 200 and render.has_no_body(status)):
            data = b"%b%b%b\r\n" % (start, headers, self._ending(front))
        else:
            data = render.whole(start, headers, self._ending(front), body)
        front.send(data)
        front.replied(self)

    def refuse(self, fault: Fault) -> None:
        """A fault of ours as a whole reply."""
        self.reply(fault.status, fault.header_lines(), fault.body())

    def begin(self, status: int, headers: bytes, length: int | None) -> None:
        """Port: the head of a reply."""
        front = self.front
        if front is None or self.stage is not _STAGE_OPEN:
            return
        self.stage = _STAGE_BEGUN
        framing = b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
            self._framing = _FRAMING_LENGTH
        elif not self.old:
            framing = b"transfer-encoding: chunked\r\n"
            self._framing = _FRAMING_CHUNKED
        else:
            self.keep = False
            self._framing = _FRAMING_UNTIL_CLOSE
        if render.has_no_body(status) or self.request.method == b"HEAD":
            self._framing = _FRAMING_NONE
            if render.has_no_body(status):
                framing = b""
        front.send(b"%b%b%b%b\r\n" % (front.service.heads.start(status), headers, framing, self._ending(front)))

    def write(self, data: bytes) -> None:
        """Port: a piece of the body."""
        front = self.front
        if front is None or self.stage is not _STAGE_BEGUN or not data:
            return
        framing = self._framing
        if framing is _FRAMING_CHUNKED:
            front.send(b"%x\r\n%b\r\n" % (len(data), data))
        elif framing is not _FRAMING_NONE:
            front.send(data)

    def finish(self) -> None:
        """Port: the proper end."""
        front = self.front
        if front is None or self.stage is not _STAGE_BEGUN:
            return
        if self._framing is _FRAMING_CHUNKED:
            front.send(render.LAST_CHUNK)
        self.stage = _STAGE_OVER
        front.replied(self)

    def abort(self, data: bytes) -> None:
        """Port: an end that no client takes for one."""
        front = self.front
        if front is None or self.stage is _STAGE_OVER:
            return
        self.write(data)
        self.stage = _STAGE_OVER
        self.keep = False
        front.replied(self, reset=self._framing is _FRAMING_UNTIL_CLOSE)

    def _ending(self, front: Front) -> bytes:
        if front.service.stopping:
            self.keep = False
        if not self.keep:
            return render.CLOSE
        return render.KEEP if self.old else b""

    # ---- what the connection tells

    def gone(self, now: float) -> None:
        """The client has left; nothing is sent any more."""
        self.front = None

    def pause(self) -> None:
        """The client does not take what is sent."""

    def resume(self) -> None:
        """It takes it again."""
