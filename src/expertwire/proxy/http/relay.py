"""One client request between its client and its servers: the whole of `Port`, and the way back of what servers say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from expertwire.proxy import faults
from expertwire.proxy.headers import Headers
from expertwire.proxy.http.front import Front
from expertwire.proxy.http.reply import Ask, Reply, Stage
from expertwire.proxy.seam import Failure, Leg, Mode

if TYPE_CHECKING:
    from expertwire.proxy.conversation import Conversation
    from expertwire.proxy.http.pool import Pool
    from expertwire.proxy.policy import Server


# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_MODE_WHOLE = Mode.WHOLE
_STAGE_OPEN, _STAGE_OVER = Stage.OPEN, Stage.OVER


class Host(Protocol):
    """What a relay needs of its worker."""

    def pool_of(self, server: Server) -> Pool:
        """The connections to a server."""

    def ended(self, relay: Relay) -> None:
        """The client's part of a request is over."""

    def broke(self, exchange: Conversation | None, error: Exception) -> None:
        """It has raised: a fault of the proxy, to be logged."""


class Relay(Reply):
    """`Port` for one exchange. Events are told to the exchange from the loop, never from within its own calls."""

    __slots__ = ("_host", "exchange")

    def __init__(self, host: Host, front: Front, ask: Ask) -> None:
        super().__init__(front, ask)
        self._host = host
        self.exchange: Conversation | None = None  # none: answered by this process itself, or over

    def start(self, exchange: Conversation, now: float) -> None:
        """Begin."""
        self.exchange = exchange
        try:
            exchange.start(now)
        except Exception as error:
            self._broken(exchange, error, now)

    # ---- Port, towards the servers

    def call(self, leg: Leg) -> bool:
        """Port: get a connection."""
        pool = leg.server.pool
        if pool is None:
            pool = self._host.pool_of(leg.server)
        now = time.monotonic()
        connection = pool.take(now)
        if connection is None:
            pool.dial(leg, self, now)
            return False
        connection.assign(leg, self)
        return True

    def send(self, leg: Leg) -> None:
        """Port: write the request."""
        if leg.handle is not None:
            leg.handle.send(leg)

    def cancel(self, leg: Leg) -> None:
        """Port: the leg is over."""
        if leg.handle is not None:
            leg.handle.cancel()

    def abandon(self, leg: Leg) -> bool:
        """Port: nobody waits for the leg any more, but for what is on its way."""
        return leg.handle is not None and leg.handle.abandon(leg)

    # ---- Port, towards the client

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """Port: a whole reply."""
        super().reply(status, headers, body)
        self._host.ended(self)

    def finish(self) -> None:
        """Port: the proper end."""
        super().finish()
        self._host.ended(self)

    def abort(self, data: bytes) -> None:
        """Port: an end that is none."""
        super().abort(data)
        self._host.ended(self)

    # ---- from the client's connection

    def gone(self, now: float) -> None:
        """The client has left: whatever leg is open is closed."""
        self.front = None
        exchange = self.exchange
        if exchange is None:
            return
        try:
            exchange.client_gone(now)
        except Exception as error:  # a fault of ours may not become a leak
            self._broken(exchange, error, now)
        self._host.ended(self)

    def pause(self) -> None:
        """Read no more from the servers."""
        for leg in self.exchange.open_legs if self.exchange is not None else ():
            if leg.handle is not None:
                leg.handle.pause()

    def resume(self) -> None:
        """Read on."""
        for leg in self.exchange.open_legs if self.exchange is not None else ():
            if leg.handle is not None:
                leg.handle.resume()

    # ---- from the servers' connections

    def leg_ready(self, leg: Leg, now: float) -> None:
        """There is a connection."""
        try:
            leg.exchange.leg_ready(leg, now)
        except Exception as error:
            self._broken(leg.exchange, error, now)

    def leg_head(self, leg: Leg, status: int, headers: Headers, now: float) -> Mode:
        """An answer's head."""
        try:
            mode = leg.exchange.leg_head(leg, status, headers, now)
        except Exception as error:
            self._broken(leg.exchange, error, now)
            return _MODE_WHOLE
        if self.front is not None and self.front.stalled and leg.handle is not None:
            leg.handle.pause()
        return mode

    def leg_data(self, leg: Leg, data: bytes, now: float) -> None:
        """A piece of a stream."""
        try:
            out = leg.exchange.leg_data(leg, data, now)
        except Exception as error:
            self._broken(leg.exchange, error, now)
            return
        if out is not None:
            self.write(out)

    def leg_over(self, leg: Leg, mode: Mode, body: bytes, now: float) -> None:
        """A whole answer, or the proper end of a stream."""
        try:
            if mode is _MODE_WHOLE:
                leg.exchange.leg_body(leg, body, now)
            else:
                leg.exchange.leg_ended(leg, now)
        except Exception as error:
            self._broken(leg.exchange, error, now)

    def leg_failed(self, leg: Leg, failure: Failure, now: float) -> None:
        """An end before the end."""
        try:
            leg.exchange.leg_failed(leg, failure, now)
        except Exception as error:
            self._broken(leg.exchange, error, now)

    def _broken(self, exchange: Conversation, error: Exception, now: float) -> None:
        """The exchange cannot go on. What it holds is let go, and the client is told that it was our fault."""
        self._host.broke(exchange, error)
        if self.stage is not _STAGE_OVER:
            if self.stage is _STAGE_OPEN:
                self.refuse(faults.internal())
            else:
                self.abort(b"")
            self.front = None
            try:
                exchange.client_gone(now)
            except Exception as second:
                self._host.broke(exchange, second)
        for leg in list(exchange.open_legs):
            if leg.handle is not None:
                leg.handle.cancel()
