"""One connection to a server, and what an answer on it becomes for its leg.

A connection that was kept and is closed before a byte of an answer came is told as STALE: whether the leg may be sent again is not decided
here. Nothing here waits without a deadline; a leg that is cancelled leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Final, cast

import httptools

from expertwire.proxy.headers import Headers, length_of
from expertwire.proxy.held import FREE_BYTES
from expertwire.proxy.http.render import has_no_body
from expertwire.proxy.http.wheel import NEVER, Timed
from expertwire.proxy.seam import Failure, Leg, Mode

if TYPE_CHECKING:
    from expertwire.proxy.http.pool import Pool
    from expertwire.proxy.http.relay import Relay

_STATUS_MAX: Final = 599
# A server that closes what is idle may do so just when a request is on its way, which says nothing of the request. What was in use a moment
# ago is not closed for that: such an end is the request's own failure, and who injects k of them counts k.
RESTED_S: Final = 1.0
# Heads of whole answers whose meaning is kept: a server's differ in date and length only.
KNOWN_HEADS: Final = 64
KNOWN_BYTES: Final = 1024
_NO_HEAD: Final = 3  # where the end of one was looked for and not found, and 4 added


class Phase(IntEnum):
    """Where a connection stands."""

    OPENING = 0
    IDLE = auto()  # kept for the next leg
    HELD = auto()  # a leg has it and has written nothing
    SENT = auto()  # the request was written, the head of the answer is not whole
    BODY = auto()
    WHOLE = auto()  # the answer is complete
    CLOSED = auto()


class Framing(IntEnum):
    """How the end of an answer is told."""

    NONE = 0  # it ends with its head
    MEASURED = 1  # by a length, or chunked
    UNTIL_CLOSE = 2


# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_FAILURE_CONNECT, _FAILURE_LOST, _FAILURE_PROTOCOL, _FAILURE_STALE = Failure.CONNECT, Failure.LOST, Failure.PROTOCOL, Failure.STALE
_FAILURE_TIMED_OUT, _FAILURE_TOO_LARGE = Failure.TIMED_OUT, Failure.TOO_LARGE
_FRAMING_MEASURED, _FRAMING_NONE, _FRAMING_UNTIL_CLOSE = Framing.MEASURED, Framing.NONE, Framing.UNTIL_CLOSE
_MODE_STREAM, _MODE_WHOLE = Mode.STREAM, Mode.WHOLE
_PHASE_BODY, _PHASE_CLOSED, _PHASE_HELD, _PHASE_IDLE, _PHASE_OPENING = Phase.BODY, Phase.CLOSED, Phase.HELD, Phase.IDLE, Phase.OPENING
_PHASE_SENT, _PHASE_WHOLE = Phase.SENT, Phase.WHOLE


class Upstream(asyncio.Protocol, Timed):
    """One connection, and httptools' callbacks for it."""

    __slots__ = (
        "_after",
        "_counted",
        "_framing",
        "_head_bytes",
        "_headers",
        "_mode",
        "_parser",
        "_pieces",
        "_size",
        "_status",
        "_stays",
        "leg",
        "phase",
        "pool",
        "relay",
        "rested_s",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        Timed.__init__(self)
        self.pool = pool
        self.phase = _PHASE_OPENING
        self.leg: Leg | None = None
        self.relay: Relay | None = None
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.rested_s = 0.0  # for how long it was kept before its present leg
        self._begin()

    def _begin(self) -> None:
        self._headers: Headers = []
        self._head_bytes = 0
        self._status = 0
        self._mode: Mode | None = None  # None: the exchange has not been told of the head
        self._framing = _FRAMING_MEASURED
        self._pieces: list[bytes] = []
        self._size = 0
        self._counted = 0  # of that, in `Pool.held`
        self._after = False  # bytes came behind the answer
        self._stays = False  # the server keeps the connection open behind it

    # ---- its leg

    def assign(self, leg: Leg, relay: Relay) -> None:
        """It is this leg's until the leg is over."""
        self.leg, self.relay = leg, relay
        self.phase = _PHASE_HELD
        self.due = NEVER
        leg.handle = self

    def send(self, leg: Leg) -> None:
        """Write the request."""
        if self.phase is not _PHASE_HELD or self.transport is None:
            return  # it was lost meanwhile, which is being told
        self.phase = _PHASE_SENT
        self.transport.write(leg.message)
        now = time.monotonic()
        self.due = due = now + leg.first_byte_s
        if self.looked_at > due:
            self.pool.wheel.watch(self, now)

    def cancel(self) -> None:
        """The leg is over, by the exchange's will."""
        untouched = self.phase is _PHASE_HELD
        self._detach()
        if untouched:
            self.pool.put(self, time.monotonic())
        else:
            self.drop()

    def abandon(self, leg: Leg) -> bool:
        """End our side: the server takes that for its client's leaving. What it had sent before is still read, within the leg's times."""
        transport = self.transport
        if transport is None or self.phase not in (_PHASE_SENT, _PHASE_BODY) or not transport.can_write_eof():
            return False
        if transport.get_write_buffer_size():
            return False  # it has not taken all of the request, so it has no answer to it; what is left would be held
        self._after = True  # no further request can be sent
        transport.write_eof()
        transport.resume_reading()
        self._extend(leg, time.monotonic())
        return True

    def pause(self) -> None:
        """The client does not take what is there: read no more, and let the server's deadline rest."""
        if self.transport is not None and self.phase in (_PHASE_SENT, _PHASE_BODY):
            self.transport.pause_reading()
            self.due = NEVER

    def resume(self) -> None:
        """Read again."""
        if self.transport is not None and self.leg is not None and self.phase in (_PHASE_SENT, _PHASE_BODY):
            self.transport.resume_reading()
            self._extend(self.leg, time.monotonic())

    def _extend(self, leg: Leg, now: float) -> None:
        self.due = now + (leg.idle_s if self.phase is _PHASE_BODY else leg.first_byte_s)
        if self.looked_at > self.due:
            self.pool.wheel.watch(self, now)

    def _detach(self) -> None:
        leg, self.leg, self.relay = self.leg, None, None
        self.due = NEVER
        self._uncount()
        if leg is not None:
            leg.handle = None

    def drop(self) -> None:
        """Close it now; what was not written is not."""
        if self.phase is not _PHASE_CLOSED:
            self.phase = _PHASE_CLOSED
            self.due = NEVER
            self._pieces = []
            self.pool.closed(self)
            if self.transport is not None:
                self.transport.abort()

    def _fail(self, failure: Failure, now: float) -> None:
        leg, relay = self.leg, self.relay
        self._detach()
        self.drop()
        if leg is not None and relay is not None:
            relay.leg_failed(leg, failure, now)

    def expire(self, now: float) -> None:
        """Timed: idle for too long, or the server is silent."""
        if self.phase is _PHASE_IDLE:
            self.drop()
        elif self.leg is not None:
            self._fail(_FAILURE_TIMED_OUT, now)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: it is open."""
        self.transport = cast(asyncio.Transport, transport)
        if self.phase is _PHASE_CLOSED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: it is closed."""
        self.transport = None
        del self._parser  # they hold each other, and the collector comes rarely here: see `Front`
        phase, leg, relay = self.phase, self.leg, self.relay
        if phase is _PHASE_CLOSED:
            return
        self.phase = _PHASE_CLOSED
        self.pool.closed(self)
        if leg is None or relay is None:
            return
        now = time.monotonic()
        ended = phase is _PHASE_BODY and self._framing is _FRAMING_UNTIL_CLOSE and exc is None
        body = b"".join(self._pieces)
        mode = self._mode
        self._detach()
        if ended:
            relay.leg_over(leg, cast(Mode, mode), body, now)
        elif phase is _PHASE_HELD:
            relay.leg_failed(leg, _FAILURE_CONNECT, now)
        elif phase is _PHASE_SENT and self.rested_s >= RESTED_S and not self._head_bytes:
            relay.leg_failed(leg, _FAILURE_STALE, now)
        else:
            relay.leg_failed(leg, _FAILURE_LOST, now)

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes of an answer."""
        leg = self.leg
        if leg is None or self.phase is _PHASE_HELD:
            self._unasked()
            return
        whole_head = 0  # bytes of the head, if this is the first piece of the answer
        if self.phase is _PHASE_SENT:
            if not self._head_bytes and not self._after and not leg.head_only:
                whole_head = data.find(b"\r\n\r\n") + 4
            self._head_bytes += len(data)
        broken = False
        known = self.pool.heads.get(data[:whole_head]) if whole_head > _NO_HEAD else None
        if known is not None and known[2] == len(data) - whole_head:
            self._status, self._headers, self._size = known
            self._pieces.append(data[whole_head:])
            self._stays = True
            self.phase = _PHASE_WHOLE
        else:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                broken = self.phase is not _PHASE_WHOLE
                self._after = True
            if whole_head > _NO_HEAD and self.phase is _PHASE_WHOLE and self._size == len(data) - whole_head:
                self._learn(data[:whole_head])
        now = time.monotonic()
        if self.phase is _PHASE_SENT:
            if broken:
                self._fail(_FAILURE_PROTOCOL, now)
            elif self._head_bytes > self.pool.head_bytes:
                self._fail(_FAILURE_TOO_LARGE, now)
            else:
                self.due = now + leg.first_byte_s
            return
        relay = self.relay
        assert relay is not None, "who has a leg has its relay"
        mode = self._mode
        if mode is None:
            mode = self._mode = relay.leg_head(leg, self._status, self._headers, now)
            if self.leg is not leg:
                return  # cancelled by what it was told
            if self._framing is _FRAMING_NONE:
                self.phase = _PHASE_WHOLE
                self._pieces.clear()
            elif self.phase is _PHASE_BODY:
                if self.due != NEVER:
                    self._extend(leg, now)
                if mode is _MODE_WHOLE and (failure := self._unfit(leg, length_of(self._headers) or 0)) is not None:
                    self._fail(failure, now)
                    return
        if mode is _MODE_STREAM:
            if pieces := self._pieces:
                piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                relay.leg_data(leg, piece, now)
                if self.leg is not leg:
                    return
        elif self._size > FREE_BYTES or self._size > leg.limit:
            if (failure := self._unfit(leg, self._size)) is not None:
                self._fail(failure, now)
                return
            self.pool.held.add(self._size - self._counted)
            self._counted = self._size
        if self.phase is _PHASE_WHOLE:
            self._complete(leg, relay, mode, now)
        elif broken:
            self._fail(_FAILURE_PROTOCOL, now)
        elif self.due != NEVER:  # else it is paused
            self.due = now + leg.idle_s

    def _unfit(self, leg: Leg, size: int) -> Failure | None:
        """Why an answer with a body of `size` bytes cannot be held whole."""
        if size > leg.limit:
            return _FAILURE_TOO_LARGE
        return None if size <= FREE_BYTES or self.pool.held.fits(size - self._counted) else Failure.HELD

    def _uncount(self) -> None:
        if self._counted:
            self.pool.held.give(self._counted)
            self._counted = 0

    def _learn(self, head: bytes) -> None:
        """The same bytes of a head with as many behind them mean the same: the parser need not be asked again."""
        if self._stays and not self._after and self._status == 200 and self._size and len(head) <= KNOWN_BYTES:
            heads = self.pool.heads
            if len(heads) >= KNOWN_HEADS:
                heads.clear()
            heads[head] = (200, self._headers, self._size)

    def _complete(self, leg: Leg, relay: Relay, mode: Mode, now: float) -> None:
        pieces = self._pieces
        body = b"" if mode is not _MODE_WHOLE else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        keep = self._framing is _FRAMING_MEASURED and not self._after and self._stays
        # An answer may come before the request has gone: the next would stand behind the rest of it, which the server may never read.
        keep = keep and self.transport is not None and not self.transport.get_write_buffer_size()
        self.leg = self.relay = leg.handle = None
        self._uncount()
        if keep:
            self.pool.put(self, now)
        else:
            self.drop()
        relay.leg_over(leg, mode, body, now)

    def _unasked(self) -> None:
        """Bytes that nobody asked for: what follows could be taken for an answer to the next request."""
        if self.leg is not None:
            self._fail(_FAILURE_CONNECT, time.monotonic())
        else:
            self.drop()

    # ---- httptools: nothing of this may call out

    def on_message_begin(self) -> None:
        """Httptools: the first byte of a head."""
        if self.phase is _PHASE_WHOLE:
            self._after = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools: a header, or a trailer, which is dropped."""
        if self.phase is _PHASE_SENT:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Httptools: the head is whole."""
        if self.phase is not _PHASE_SENT:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._headers.clear()
            return
        self._status = status
        self.phase = _PHASE_BODY
        framing, faults = _FRAMING_UNTIL_CLOSE, status > _STATUS_MAX
        for name, value in self._headers:
            if name == b"content-length":
                framing = _FRAMING_MEASURED
            elif name == b"transfer-encoding":
                framing = _FRAMING_MEASURED
                faults = faults or value.lower() != b"chunked"
        if faults:
            self.phase = _PHASE_SENT
            raise ValueError  # HttpParserCallbackError to the caller: not an answer that can be read
        if status != 200 and has_no_body(status):
            # httptools ends these by itself, so the connection is of use.
            framing = _FRAMING_MEASURED
        elif self.leg is not None and self.leg.head_only:
            framing = _FRAMING_NONE
        self._framing = framing

    def on_body(self, data: bytes) -> None:
        """Httptools: a piece of the body."""
        if self.phase is _PHASE_BODY:
            self._pieces.append(data)
            self._size += len(data)

    def on_message_complete(self) -> None:
        """Httptools: the body is whole; or an interim head was."""
        if self.phase is _PHASE_BODY:
            self.phase = _PHASE_WHOLE
            self._stays = self._parser.should_keep_alive()  # known only here: the parser forgets it with the message's end

    # ---- the pool's

    def keep(self, now: float) -> None:
        """Nobody needs it now."""
        self.phase = _PHASE_IDLE
        self._begin()
        self.due = due = now + self.pool.idle_s
        if self.looked_at > due:
            self.pool.wheel.watch(self, now)

    @property
    def alive(self) -> bool:
        """Whether it can be written to, for all that is known here."""
        return self.transport is not None and not self.transport.is_closing()
