"""What stands between one client request (`exchange`, pure) and the sockets: the words they have in common."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from expertwire.proxy.headers import Digest, Headers
from expertwire.proxy.policy import Server

if TYPE_CHECKING:
    from expertwire.proxy.conversation import Conversation


@dataclass(slots=True)
class Request:
    """A client's request, head and body whole. Header names are in lower case, values without white space around them."""

    method: bytes
    target: bytes  # path and query, as received
    headers: Headers
    body: bytes
    client: str = ""  # who asks, for logs only
    digest: Digest | None = None  # of target and headers, if somebody has made it


class Kind(IntEnum):
    """What a call to a server is for."""

    PREFILL = 0
    DECODE = 1
    RELEASE = 2  # to be refused by D, which frees P's blocks
    PLAIN = 3  # passed on to a D
    LATE = 4  # P's, that nobody waits for any more; its answer may be on its way


class Failure(IntEnum):
    """How a call ended without a whole answer."""

    CONNECT = 0  # no connection, by refusal, name, TLS or time: nothing was sent
    STALE = 1  # a connection that had been kept was closed before a byte of answer came
    LOST = 2  # closed or reset after the request was sent, or the body was cut short
    PROTOCOL = 3  # what came is not HTTP
    TOO_LARGE = 4  # head or body over its limit
    TIMED_OUT = 5  # too long without a byte
    DESCRIPTORS = 6  # no connection, for want of a descriptor or a port of ours: nothing was sent, and the server has no part in it
    HELD = 7  # there is no room for the answer's body among all that are held


class Mode(IntEnum):
    """What the edge does with an answer's body."""

    WHOLE = 0  # collect it, up to `Leg.limit` bytes, and give it to `leg_body`
    STREAM = 1  # give each piece to `leg_data`, then `leg_ended`


class Terms(NamedTuple):
    """What a leg may take: seconds to connect, until the first byte, between two pieces; bytes of a whole body."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    limit: int


class Leg:
    """One call to one server."""

    __slots__ = (
        "branch",
        "called_at",
        "connect_s",
        "exchange",
        "first_byte_s",
        "handle",
        "head_at",
        "head_only",
        "headers",
        "idle_s",
        "kind",
        "last",
        "limit",
        "message",
        "rank",
        "relaying",
        "sent",
        "server",
        "splitter",
        "status",
    )

    def __init__(self, exchange: Conversation, kind: Kind, branch: int, server: Server, rank: int, terms: Terms) -> None:
        self.exchange = exchange
        self.kind = kind
        self.branch = branch
        self.server = server
        self.rank = rank  # −1: the server's own choice
        self.message = b""  # the complete request, from right before `Port.send` until that is over: it can be large, and a stream long
        self.sent = False
        self.connect_s, self.first_byte_s, self.idle_s, self.limit = terms
        self.head_only = False  # the answer has no body
        self.handle: Any = None  # the edge's
        # The exchange's own:
        self.called_at = self.head_at = 0.0
        self.status = 0
        self.headers: Headers = []
        self.relaying = False  # whole events that hold nothing of ours go straight through
        self.last = b""  # the last piece that went through
        self.splitter: Any = None


class Port(Protocol):
    """The edge, seen from one client request. Nothing here raises, and nothing calls back into the exchange.

    Exactly one of `reply`, or `begin` and then `finish` or `abort`, is called; none once the client has gone.
    """

    def call(self, leg: Leg) -> bool:
        """Get a connection. True: one is in hand. False: `leg_ready` or `leg_failed` follows, later."""

    def send(self, leg: Leg) -> None:
        """Write `leg.message`."""

    def cancel(self, leg: Leg) -> None:
        """The leg is over: what was not written to may be kept, else it is closed. No event follows."""

    def abandon(self, leg: Leg) -> bool:
        """Tell the server that nobody waits any more (by the end of our side), and go on reading: the leg ends as any other.

        False: that cannot be done with this connection, and nothing was.
        """

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole reply; content-length, connection and date are the edge's."""

    def begin(self, status: int, headers: bytes, length: int | None) -> None:
        """Status and headers of a reply whose body follows; `length` None: in chunks."""

    def write(self, data: bytes) -> None:
        """A piece of the body."""

    def finish(self) -> None:
        """The body's proper end."""

    def abort(self, data: bytes) -> None:
        """Write `data`, then close without an end, so that no client takes it for one."""


@dataclass(slots=True)
class LogLine:
    """What is known of a request at its end; no prompt, no secret."""

    request_id: str = ""
    method: str = ""
    path: str = ""
    status: int = 0
    outcome: str = ""  # done, failed, gone
    why: str = ""  # the failure's type
    prefill: str = ""
    decode: str = ""
    prefill_rank: int = -1
    decode_rank: int = -1
    branches: int = 1
    first_content_s: float = 0.0
    duration_s: float = 0.0
    retries: int = 0
    reprefills: int = 0
