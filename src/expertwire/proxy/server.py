"""One worker: a loop, its listener, its connections, and an orderly end."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Final, cast

from expertwire.errors import InvalidArgumentError
from expertwire.proxy import admin, faults
from expertwire.proxy.admin import AdminService, Message, apply, reason
from expertwire.proxy.config import Config
from expertwire.proxy.conversation import Conversation
from expertwire.proxy.core import Core, own
from expertwire.proxy.exchange import open_exchange
from expertwire.proxy.faults import Fault
from expertwire.proxy.headers import origin_form
from expertwire.proxy.held import FREE_BYTES
from expertwire.proxy.http import render
from expertwire.proxy.http.front import Front
from expertwire.proxy.http.pool import Pool, PoolLimits
from expertwire.proxy.http.relay import Relay
from expertwire.proxy.http.reply import Ask, FrontLimits, Known, Reply
from expertwire.proxy.http.wheel import Wheel
from expertwire.proxy.log import Log
from expertwire.proxy.policy import Server, Side
from expertwire.proxy.seam import Request

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Counted = dict[tuple[str, str], int]
FLUSH_S: Final = 0.1  # of log lines
OVER_MAX: Final = 16  # conversations that wait for their line: what is let go soon is still in the cache for the next request
LOOK_S: Final = 0.02  # at an end: how often is looked whether all is over
TELL_S: Final = 10.0  # between two lines in the log that say that there is no more of something
# glibc keeps what was freed, if anything above it is in use: 157 of 164 MiB after 160 bodies of 500 kB at a time. It is asked to give back
# what it has where so much, and a half of what there was, has gone since; or all, and so much.
TRIM_FROM_BYTES: Final = 16 << 20
TRIM_LAST_BYTES: Final = 1 << 20
TRIM_S: Final = 1.0


def listen(config: Config, *, backlog: int) -> socket.socket:
    """A socket on the configured address that other workers can share. `backlog` 0: it only keeps the port."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidArgumentError(f"host is {config.host!r}, which is no address to listen on: {error.strerror}") from error
    family, kind, number, _, address = found[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Only for several workers: with it a second proxy on the same port would go unnoticed.
        if config.workers > 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if backlog:
            sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise InvalidArgumentError(
            f"port {config.port} of {config.host} cannot be listened on: {reason(error)}; give another --port"
        ) from error
    return sock


def try_start(config: Config) -> None:
    """Whether the ports are free and the certificates can be read. Raises InvalidArgumentError that says all that is wrong."""
    faults_of: list[str] = []
    checks: list[Callable[[], object]] = [lambda: try_port(config)]
    if config.admin.port:
        checks.append(lambda: admin.try_port(config.admin.host, config.admin.port))
    if config.tls.ca_file:
        checks.append(lambda: tls_context(config))
    for check in checks:
        try:
            check()
        except InvalidArgumentError as error:
            faults_of.append(str(error))
    if faults_of:
        raise InvalidArgumentError("; ".join(faults_of))


def try_port(config: Config) -> None:
    """Whether nobody listens on the port: workers of another proxy, who would share it with ours, neither. Raises InvalidArgumentError."""
    listen(dataclasses.replace(config, workers=1), backlog=0).close()


class Worker:
    """Everything of one process: also `Service` of its fronts and `Host` of its relays."""

    def __init__(self, config: Config, log: Log, number: int = 0) -> None:
        self.config = config
        self.log = log
        self.number = number
        self.core = Core(config, os.urandom(6))
        limits, timeouts = config.limits, config.timeouts
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.core.descriptors = 0 if soft == resource.RLIM_INFINITY else soft
        self.limits = FrontLimits(
            limits.head_bytes,
            limits.headers,
            limits.body_bytes,
            limits.pipelined,
            limits.connections,
            timeouts.client_head_s,
            timeouts.client_idle_s,
            timeouts.idle_s,
            min(FREE_BYTES, limits.body_bytes),
            # A quarter is left for connections to servers, of that a half for clients that are refused and read it.
            sys.maxsize if soft == resource.RLIM_INFINITY else soft - soft // 4,
            sys.maxsize if soft == resource.RLIM_INFINITY else soft - soft // 8,
            config.retry_after_s,
        )
        self.held = self.core.held
        self.heads = render.Heads()
        self.fronts: set[Front] = set()
        self.known: dict[bytes, Known] = {}
        self.live: set[Relay] = set()
        self.pools: set[Pool] = set()
        self.stopping = False
        self.metrics_of_all: Callable[[Relay], None] | None = None  # where there are several workers
        self._pool_limits = PoolLimits(limits.pool_per_server, timeouts.pool_idle_s, limits.head_bytes)
        self._over: list[Conversation] = []
        self._tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._flusher: asyncio.TimerHandle | None = None
        self._trim_at = self._tell_at = 0.0
        self._told: dict[tuple[str, ...], int] = {}

    # ---- its life

    async def start(self, sock: socket.socket) -> None:
        """Listen. The socket is bound; it becomes this worker's. Raises InvalidArgumentError."""
        self.loop = asyncio.get_running_loop()
        if any(server.tls for side in Side for server in self.core.fleet.servers(side)):
            self._tls = tls_context(self.config)
        self.wheel = Wheel(self.loop)
        self._server = await self.loop.create_server(lambda: Front(self, self.loop), sock=sock, backlog=self.config.limits.backlog)
        self._flush()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        assert self._server is not None
        return cast(tuple[str, int], self._server.sockets[0].getsockname()[:2])

    async def stop(self, deadline_s: float | None = None) -> bool:
        """Take no more, finish what is there, at most `deadline_s` long (the configured time if None). False if something was cut off."""
        self.stopping = self.core.stopping = True
        now = time.monotonic()
        until = now + (self.config.timeouts.shutdown_s if deadline_s is None else deadline_s)
        if self._server is not None:
            self._server.close()
        for front in list(self.fronts):
            front.close_if_idle()
        for pool in self.pools:
            pool.retire()
        finished = await self._wait(until)
        if not finished:
            self.log.event("warning", "shutdown_cut_off", requests=len(self.live))
            for front in list(self.fronts):
                front.drop()
            # Calls that free blocks have a time of their own.
            await self._wait(time.monotonic() + self.config.timeouts.release_s)
        for front in list(self.fronts):
            front.drop()
        for pool in list(self.pools):
            pool.close()
        await asyncio.sleep(0)  # what was closed is told so in the next turn
        if self._flusher is not None:
            self._flusher.cancel()
        self._log_over()
        self.wheel.close()
        return finished

    async def _wait(self, until: float) -> bool:
        while self.live or self.fronts or any(pool.busy_count for pool in self.pools):
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    # ---- Service, for the clients' connections

    def open(self, front: Front, ask: Ask) -> Reply:
        """Service: what answers a request."""
        return Relay(self, front, ask)

    def answer(self, reply: Reply) -> None:
        """Service: answer it."""
        relay = cast(Relay, reply)
        try:
            self._answer(relay, reply.request)
        except Exception as error:  # a fault of ours is this request's end, not the connection's silence
            self.broke(relay.exchange, error)
            relay.refuse(faults.internal())

    def out_of(self, what: str) -> Fault:
        """Service: what a client is told that cannot be served for want of that."""
        core, again_s = self.core, self.config.retry_after_s
        core.metrics.count("exhausted_total", what)
        return faults.no_room(core.held.limit, again_s) if what == "bodies" else faults.no_descriptors(core.descriptors, again_s)

    def _answer(self, relay: Relay, request: Request) -> None:
        if request.target[:2] != b"/v":
            path = origin_form(request.target).partition(b"?")[0]
            if path == b"/metrics" and self.metrics_of_all is not None and request.method == b"GET":
                self.metrics_of_all(relay)
                return
            if (answer := own(self.core, request.method, path)) is not None:
                relay.reply(*answer)
                return
        conversation = open_exchange(self.core, relay, request)
        self.live.add(relay)
        relay.start(conversation, time.monotonic())

    # ---- Host, for the relays

    def pool_of(self, server: Server) -> Pool:
        """Host: the connections to a server."""
        if server.tls and self._tls is None:
            self._tls = tls_context(self.config)
        tls = self._tls if server.tls else None
        pool = server.pool = Pool(server, self.loop, self.wheel, self.held, self._pool_limits, tls, self._spare)
        self.pools.add(pool)
        return pool

    def _spare(self) -> bool:
        return any(pool.drop_idle() for pool in self.pools)

    def ended(self, relay: Relay) -> None:
        """Host: the client's part is over."""
        conversation = relay.exchange
        if conversation is None or relay not in self.live:
            return
        self.live.remove(relay)
        relay.exchange = None  # they hold each other: a circle would wait for the collector
        if len(self._over) >= OVER_MAX:
            self._log_over()
        self._over.append(conversation)  # its outcome is known when this call is over

    def broke(self, exchange: Conversation | None, error: Exception) -> None:
        """Host: it has raised."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}")
            trace = trace.tb_next
        # Not the message: it could hold a piece of a request.
        self.log.event(
            "error",
            "internal_error",
            error=type(error).__name__,
            at=frames[-8:],
            request_id=exchange.log.request_id if exchange is not None else "",
        )

    def counted(self) -> Counted:
        """Requests so far, by (endpoint, outcome)."""
        return cast(Counted, dict(self.core.metrics.counters["requests_total"]))

    async def administer(self, message: Message) -> Message:
        """What the admin endpoint asks of this worker."""
        if message.get("url", "").startswith("https:") and self._tls is None:
            self._tls = tls_context(self.config)  # if it cannot be, the server is not taken
        return apply(self.core.fleet, message, self._retire)

    def _retire(self, server: Server) -> None:
        """It was removed: its open legs go on, its connections do not stay."""
        if server.pool is not None:
            server.pool.retire()

    # ---- logs

    def _flush(self) -> None:
        self._log_over()
        self.log.flush()
        for pool in [pool for pool in self.pools if pool.retired and not pool.open_count]:
            self.pools.discard(pool)
        self._give_back(time.monotonic())
        self._tell_exhausted(time.monotonic())
        self._flusher = self.loop.call_later(FLUSH_S, self._flush)

    def _give_back(self, now: float) -> None:
        """Memory that large bodies had."""
        held = self.held
        if held.most - held.total >= (max(TRIM_FROM_BYTES, held.total) if held.total else TRIM_LAST_BYTES) and now >= self._trim_at:
            held.most = held.total
            self._trim_at = now + TRIM_S
            trim()

    def _tell_exhausted(self, now: float) -> None:
        counted = self.core.metrics.counters["exhausted_total"]
        if counted != self._told and now >= self._tell_at:
            self._told, self._tell_at = dict(counted), now + TELL_S
            fields = {what: count for (what,), count in counted.items()}
            self.log.event("warning", "exhausted", open_files=self.core.descriptors, held_bytes=self.held.total, refused=fields)

    def _log_over(self) -> None:
        over, self._over = self._over, []
        for level, failed in (("info", False), ("warning", True)):
            if self.log.takes(level):
                self.log.records(level, "request", [each.log for each in over if each.failed is failed])


def tls_context(config: Config) -> ssl.SSLContext:
    """For connections to https servers. Raises InvalidArgumentError if there are no certificates in the file that is to have them."""
    try:
        return ssl.create_default_context(cafile=config.tls.ca_file or None)
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror
        raise InvalidArgumentError(f"tls.ca_file is {config.tls.ca_file!r}, which has no certificates that can be read: {why}") from error


def trim() -> None:
    """Give freed memory back to the system, by malloc_trim(3) where the C library has it."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


def calm_collector() -> None:
    """For a process that does nothing but serve: what is here now stays, and conversations leave no circles behind (that is tested)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def raise_file_limit(config: Config, log: Log) -> None:
    """As many descriptors as this user may have; a line in the log where that is less than the configured connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = config.limits.connections + 2 * config.in_flight_limit
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.event(
            "warning", "few_descriptors", limit=hard, needed=needed, hint="raise ulimit -n, or lower limits.connections and in_flight_limit"
        )


async def serve(config: Config, log: Log) -> tuple[bool, Counted]:
    """Run one worker in this process until SIGTERM, SIGINT or SIGHUP; a second one ends it at once.

    (everything was finished, what was counted)
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[str] = asyncio.Queue()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, asked.put_nowait, number.name)
    calm_collector()
    worker = Worker(config, log)
    service: AdminService | None = None
    try:
        if config.admin.port:  # before the worker, which would have to be stopped again if this cannot be
            service = AdminService(worker.administer, log)
            await service.start(config.admin.host, config.admin.port)
        await worker.start(listen(config, backlog=config.limits.backlog))
        host, port = worker.address
        log.event("info", "listening", host=host, port=port, workers=1)
        log.event("info", "stopping", signal=await asked.get())
        finished = await until_again(worker, asked)
        return finished, worker.counted()
    finally:
        if service is not None:
            await service.close()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


async def until_again(worker: Worker, asked: asyncio.Queue[str]) -> bool:
    """Stop in order; if one asks again, at once."""
    stopping, again = asyncio.ensure_future(worker.stop()), asyncio.ensure_future(asked.get())
    await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        again.cancel()
        return stopping.result()
    stopping.cancel()
    await asyncio.wait((stopping,))
    await worker.stop(0.0)
    return False
