"""What every client request has: legs that are counted, one reply, one end. `exchange` (two legs) and `passage` (passed on) are made of it.

Pure: the edge calls its methods with the time (s, monotonic), and does what is asked for through a `Port`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Final

from expertwire.proxy import faults, headers
from expertwire.proxy.core import Core
from expertwire.proxy.faults import Fault
from expertwire.proxy.headers import Headers
from expertwire.proxy.policy import Server, Side
from expertwire.proxy.seam import Failure, Kind, Leg, LogLine, Mode, Port, Request

_OUTCOME: Final = ("unreached", "stale", "lost", "protocol", "too_large", "timed_out", "exhausted", "exhausted")
_EXHAUSTED: Final = {Failure.DESCRIPTORS: "descriptors", Failure.HELD: "bodies"}
# What the breaker counts. Too long without a byte is no failure of the transport: a server may be computing.
_BROKEN: Final = frozenset({Failure.CONNECT, Failure.LOST, Failure.PROTOCOL})


class Stage(IntEnum):
    """How far the reply is."""

    OPEN = 0  # nothing has left
    BEGUN = 1  # the status has
    OVER = 2


# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_STAGE_BEGUN, _STAGE_OPEN, _STAGE_OVER = Stage.BEGUN, Stage.OPEN, Stage.OVER


class Answer:
    """A server's answer that is not 2xx: it reaches the client as it is."""

    __slots__ = ("body", "lines", "side", "status")

    def __init__(self, side: Side, status: int, lines: bytes, body: bytes) -> None:
        self.side = side
        self.status = status
        self.lines = lines
        self.body = body


class Conversation(ABC):
    """One client request. `start` first; then the edge tells what happens, in any order that can happen."""

    __slots__ = (
        "_decode",
        "_digest",
        "_ended_at",
        "_first_content_s",
        "_outcome",
        "_port",
        "_prefill",
        "_rank",
        "_reprefills",
        "_request",
        "_request_id",
        "_retries",
        "_stage",
        "_started",
        "_status",
        "_target",
        "_why",
        "core",
        "open_legs",
    )

    def __init__(self, core: Core, port: Port, request: Request) -> None:
        self.core = core
        self._port = port
        self._request = request
        self._stage = _STAGE_OPEN
        self._started = self._ended_at = self._first_content_s = 0.0
        self._digest = digest = request.digest or headers.Digest(request.target, request.headers)
        self._target = digest.target
        self._request_id = digest.request_id or core.new_id()
        self._rank = digest.rank
        self.open_legs: list[Leg] = []
        self._prefill: tuple[Server, int] | None = None  # the last of each, and its rank, for log and headers
        self._decode: tuple[Server, int] | None = None
        self._status = self._retries = self._reprefills = 0
        self._outcome = self._why = ""

    @property
    def over(self) -> bool:
        """The client's part is over; calls that free P's blocks may still run."""
        return self._stage is _STAGE_OVER

    @property
    def failed(self) -> bool:
        """It ended otherwise than it should."""
        return self._status >= 500 or self._outcome == "failed"

    @property
    def log(self) -> LogLine:
        """What is known of it now."""
        prefill, decode = self._prefill, self._decode
        return LogLine(
            request_id=self._request_id.decode(),
            method=self._request.method.decode("latin-1"),
            path=self._target.partition(b"?")[0].decode("latin-1"),
            status=self._status,
            outcome=self._outcome,
            why=self._why,
            prefill=prefill[0].name if prefill is not None else "",
            decode=decode[0].name if decode is not None else "",
            prefill_rank=prefill[1] if prefill is not None else -1,
            decode_rank=decode[1] if decode is not None else -1,
            branches=self._branch_count(),
            first_content_s=self._first_content_s,
            duration_s=self._ended_at - self._started,
            retries=self._retries,
            reprefills=self._reprefills,
        )

    def start(self, now: float) -> None:
        """Begin."""
        core = self.core
        self._started = now
        core.in_flight += 1
        if core.stopping:
            self._fail_with(faults.stopping(), now)
        elif core.in_flight > (limit := core.config.in_flight_limit):
            core.metrics.count("rejected_total")
            self._fail_with(faults.busy(limit, core.config.retry_after_s), now)
        else:
            self._begin(now)

    # ---- what the edge tells, beside `start`

    @abstractmethod
    def leg_ready(self, leg: Leg, now: float) -> None:
        """`Port.call` said False, and now there is a connection."""

    @abstractmethod
    def leg_head(self, leg: Leg, status: int, lines: Headers, now: float) -> Mode:
        """The final status and the headers of an answer have come."""

    @abstractmethod
    def leg_body(self, leg: Leg, body: bytes, now: float) -> None:
        """A whole answer has come, and with it the end of the leg."""

    @abstractmethod
    def leg_data(self, leg: Leg, data: bytes, now: float) -> bytes | None:
        """A piece of a stream; returns what the client gets now (`is data`: as it came; None: nothing)."""

    @abstractmethod
    def leg_ended(self, leg: Leg, now: float) -> None:
        """A stream's body has ended as its framing says."""

    @abstractmethod
    def leg_failed(self, leg: Leg, failure: Failure, now: float) -> None:
        """The leg is over, without a whole answer."""

    @abstractmethod
    def client_gone(self, now: float) -> None:
        """Nobody is there to be answered any more."""

    # ---- for subclasses

    @abstractmethod
    def _begin(self, now: float) -> None:
        """The request was admitted."""

    @abstractmethod
    def _drop_legs(self, now: float) -> None:
        """The reply is over; whatever is still open is not wanted."""

    def _call(self, leg: Leg, now: float) -> bool:
        """Open a leg. True: there is a connection already."""
        leg.called_at = now
        self.open_legs.append(leg)
        self.core.open_legs += 1
        return self._port.call(leg)

    def _send_leg(self, leg: Leg) -> None:
        """Write its request, and let go of it: what is not sent yet is the edge's."""
        leg.sent = True
        self._port.send(leg)
        leg.message = b""

    def _end_leg(self, leg: Leg, outcome: str) -> None:
        """A leg is over, however; each ends once."""
        core = self.core
        self.open_legs.remove(leg)
        core.open_legs -= 1
        server = leg.server
        core.fleet.done(server, leg.rank)
        core.metrics.count("legs_total", server.side, server.name, outcome)

    def _cancel_leg(self, leg: Leg) -> None:
        self._port.cancel(leg)
        self._end_leg(leg, "cancelled")

    def _leg_broke(self, leg: Leg, failure: Failure, now: float) -> None:
        """Its end by a failure, and what the breaker thinks of it."""
        if failure in _BROKEN and self.core.fleet.failed(leg.server, now):
            self.core.metrics.count("breaker_trips_total", leg.server.side, leg.server.name)
        if failure in _EXHAUSTED:
            self.core.metrics.count("exhausted_total", _EXHAUSTED[failure])
        self._end_leg(leg, _OUTCOME[failure])

    def _fault_of(self, leg: Leg, failure: Failure) -> Fault:
        side = Side.PREFILL if leg.kind is Kind.PREFILL else Side.DECODE
        if failure is Failure.CONNECT or failure is Failure.STALE:
            return faults.unreached(side)
        if failure is Failure.DESCRIPTORS:
            return faults.no_descriptors(self.core.descriptors, self.core.config.retry_after_s)
        if failure is Failure.HELD:
            return faults.no_room(self.core.held.limit, self.core.config.retry_after_s)
        if failure is Failure.TIMED_OUT:
            return faults.timed_out(side, leg.idle_s if leg.status else leg.first_byte_s)
        if failure is Failure.TOO_LARGE:
            return faults.answer_too_large(side, leg.limit)
        return faults.protocol(side) if failure is Failure.PROTOCOL else faults.lost(side)

    def _reply_lines(self) -> bytes:
        """The header lines that every reply has."""
        lines = b"x-request-id: %b\r\n" % self._request_id
        if self.core.config.show_servers:
            for name, chosen in ((b"prefill", self._prefill), (b"decode", self._decode)):
                if chosen is not None:
                    server, rank = chosen
                    ranked = b";rank=%d" % rank if rank >= 0 else b""
                    lines += b"x-expertwire-%b: %b%b\r\n" % (name, server.name.encode("ascii", "replace"), ranked)
        return lines

    def _reply(self, status: int, lines: bytes, body: bytes, now: float, outcome: str, why: str) -> None:
        """The one whole reply, and the end."""
        self._port.reply(status, lines + self._reply_lines(), body)
        self._status = status
        self.core.metrics.count("replies_total", str(status))
        self._close(now, outcome, why)

    def _fail_with(self, failure: Fault | Answer, now: float) -> None:
        if isinstance(failure, Answer):
            self._reply(failure.status, failure.lines, failure.body, now, "failed", "upstream")
        else:
            self._reply(failure.status, failure.header_lines(), failure.body(), now, "failed", failure.type)

    def _begin_reply(self, status: int, lines: bytes, length: int | None) -> None:
        """Status and headers leave."""
        self._stage = _STAGE_BEGUN
        self._status = status
        self.core.metrics.count("replies_total", str(status))
        self._port.begin(status, lines + self._reply_lines(), length)

    def _close(self, now: float, outcome: str, why: str) -> None:
        """The client's part is over."""
        self._stage = _STAGE_OVER
        core = self.core
        core.in_flight -= 1
        self._outcome, self._why, self._ended_at = outcome, why, now
        self._request.body = b""  # calls that free blocks, and the log, may keep this for seconds
        core.metrics.request.observe(now - self._started)
        core.metrics.count("requests_total", self._endpoint(), outcome)
        if self.open_legs:
            self._drop_legs(now)

    def _branch_count(self) -> int:
        return 1

    @abstractmethod
    def _endpoint(self) -> str:
        """For the metrics: one of a few words."""
