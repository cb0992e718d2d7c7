"""The connections to one server: kept ones, last in first out, and those that legs wait for, each with its deadline."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from expertwire.proxy.headers import Headers
from expertwire.proxy.held import Held
from expertwire.proxy.http.upstream import Upstream
from expertwire.proxy.http.wheel import NEVER, Timed, Wheel
from expertwire.proxy.seam import Failure, Leg

if TYPE_CHECKING:
    from expertwire.proxy.http.relay import Relay
    from expertwire.proxy.policy import Server


# connect(2), socket(2): no descriptor, no local port, no memory. None of it is the server's.
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


def failure_of(error: Exception) -> Failure:
    """Whether no connection came about for want of something of ours, or because of the server."""
    if isinstance(error, OSError) and error.errno in _OURS:
        return Failure.DESCRIPTORS
    # getaddrinfo(3) has numbers of its own, and asyncio makes one error without any of several addresses': is there a descriptor?
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno is None):
        try:
            socket.socket().close()
        except OSError as found:
            return Failure.DESCRIPTORS if found.errno in _OURS else Failure.CONNECT
    return Failure.CONNECT


class Dial(Timed):
    """A leg that waits for a connection: one that is being opened, or, at the pool's limit, any that comes back."""

    __slots__ = ("leg", "pool", "relay", "task")

    def __init__(self, pool: Pool, leg: Leg, relay: Relay) -> None:
        super().__init__()
        self.pool = pool
        self.leg: Leg | None = leg
        self.relay = relay
        self.task: asyncio.Task[None] | None = None
        leg.handle = self

    def cancel(self) -> None:
        """The leg is over."""
        self._take()
        if self.task is not None:
            self.task.cancel()

    def expire(self, now: float) -> None:
        """Timed: no connection in time."""
        self.fail(now)
        if self.task is not None:
            self.task.cancel()

    def fail(self, now: float, failure: Failure = Failure.CONNECT) -> None:
        """Tell the leg, if it still waits."""
        leg = self._take()
        if leg is not None:
            self.relay.leg_failed(leg, failure, now)

    def give(self, connection: Upstream, now: float) -> bool:
        """Hand a connection over; False if nobody waits any more."""
        leg = self._take()
        if leg is None:
            return False
        connection.assign(leg, self.relay)
        self.relay.leg_ready(leg, now)
        return True

    def _take(self) -> Leg | None:
        leg, self.leg = self.leg, None
        self.due = NEVER
        if leg is not None:
            leg.handle = None
        return leg

    def pause(self) -> None:
        """Nothing is read yet."""

    def resume(self) -> None:
        """Nothing is read yet."""


class Pool:
    """The connections to one server."""

    def __init__(
        self,
        server: Server,
        loop: asyncio.AbstractEventLoop,
        wheel: Wheel,
        held: Held,
        limits: PoolLimits,
        tls: ssl.SSLContext | None,
        spare: Callable[[], bool],
    ) -> None:
        """`spare`: closes a connection of any pool that nobody uses; False if there is none."""
        self.server = server
        self.wheel = wheel
        self.held = held
        self._spare = spare
        self.idle_s = limits.idle_s
        self.head_bytes = limits.head_bytes
        self._limits = limits
        self._loop = loop
        self._tls = tls
        self.heads: dict[bytes, tuple[int, Headers, int]] = {}  # status, headers and the body's bytes, by the head as it came
        self._idle: dict[Upstream, None] = {}  # popitem() takes the last
        self._open: set[Upstream] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._waiting: deque[Dial] = deque()

    def take(self, now: float) -> Upstream | None:
        """The connection that was used last, None if there is none that is young enough."""
        while self._idle:
            connection, _ = self._idle.popitem()
            transport = connection.transport
            if connection.due > now and transport is not None and not transport.is_closing():
                connection.rested_s = now - (connection.due - self.idle_s)
                return connection
            connection.drop()
        return None

    def dial(self, leg: Leg, relay: Relay, now: float) -> None:
        """Open one for this leg."""
        dial = Dial(self, leg, relay)
        dial.due = now + leg.connect_s
        self.wheel.watch(dial, now)
        if len(self._open) + len(self._dialling) >= self._limits.connections:
            self._waiting.append(dial)
        else:
            self._start(dial)

    def _start(self, dial: Dial) -> None:
        task = dial.task = self._loop.create_task(self._connect(dial))
        self._dialling.add(task)
        task.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._dialling.discard(task)
        if self._waiting:
            self._serve_waiting()

    async def _connect(self, dial: Dial) -> None:
        connection = Upstream(self)
        try:
            while (error := await self._open_one(connection)) is not None:
                failure = failure_of(error)
                # What other legs have left open takes descriptors too. It is closed in the loop's next turn.
                if failure is Failure.DESCRIPTORS and self._spare():
                    await asyncio.sleep(0)
                    connection = Upstream(self)
                    continue
                connection.drop()
                dial.fail(time.monotonic(), failure)
                return
        except BaseException:
            connection.drop()
            raise
        if not connection.alive:
            dial.fail(time.monotonic())
            return
        self._open.add(connection)
        self._offer(connection, dial)

    async def _open_one(self, connection: Upstream) -> Exception | None:
        """None, or why it is not open: refused, no such name, a certificate that does not hold (CertificateError is a ValueError too)."""
        server, tls = self.server, self._tls
        try:
            if tls is None:
                await self._loop.create_connection(lambda: connection, server.host, server.port)
            else:
                await self._loop.create_connection(
                    lambda: connection, server.host, server.port, ssl=tls, server_hostname=server.host, ssl_handshake_timeout=3600.0
                )
        except (OSError, UnicodeError, ValueError) as error:
            return error
        return None

    def drop_idle(self) -> bool:
        """Close the connection that has been idle for longest; False if none is."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        oldest.drop()
        return True

    def _offer(self, connection: Upstream, dial: Dial | None) -> None:
        now = time.monotonic()
        if dial is not None and dial.give(connection, now):
            return
        while self._waiting:
            if self._waiting.popleft().give(connection, now):
                return
        connection.keep(now)
        self._idle[connection] = None

    def put(self, connection: Upstream, now: float) -> None:
        """It is free again."""
        transport = connection.transport
        if self.idle_s <= 0 or transport is None or transport.is_closing():
            connection.drop()
            return
        connection.keep(now)
        self._idle[connection] = None
        if self._waiting:
            self._loop.call_soon(self._serve_waiting)

    def _serve_waiting(self) -> None:
        while self._waiting:
            if self._waiting[0].leg is None:
                self._waiting.popleft()
            elif (connection := self.take(time.monotonic())) is not None:
                self._waiting.popleft().give(connection, time.monotonic())
            elif len(self._open) + len(self._dialling) < self._limits.connections:
                self._start(self._waiting.popleft())
            else:
                return

    def closed(self, connection: Upstream) -> None:
        """It is no more."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        if self._waiting:
            self._loop.call_soon(self._serve_waiting)

    def retire(self) -> None:
        """Nothing is kept from now on: the server was removed, or we stop."""
        self.idle_s = 0.0
        for connection in list(self._idle):
            connection.drop()

    def close(self) -> None:
        """Close everything, whatever it is doing."""
        self.retire()
        for dial in list(self._waiting):
            dial.cancel()
        for task in list(self._dialling):
            task.cancel()
        for connection in list(self._open):
            connection.drop()

    @property
    def retired(self) -> bool:
        """Nothing is kept."""
        return self.idle_s <= 0.0

    @property
    def open_count(self) -> int:
        """Connections that are open or being opened."""
        return len(self._open) + len(self._dialling)

    @property
    def busy_count(self) -> int:
        """Of those, such as are not idle."""
        return self.open_count - len(self._idle)


class PoolLimits:
    """What a pool keeps to."""

    __slots__ = ("connections", "head_bytes", "idle_s")

    def __init__(self, connections: int, idle_s: float, head_bytes: int) -> None:
        self.connections = connections
        self.idle_s = idle_s
        self.head_bytes = head_bytes
