"""The server's side: what clients send, held to its limits, and the replies, in the order of the requests.

A client that closes its side has left, even if it could still read: a closed socket looks no different from here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from enum import IntEnum, auto
from typing import Final, cast

import httptools

from expertwire.proxy import faults
from expertwire.proxy.faults import Fault
from expertwire.proxy.headers import Digest, Headers
from expertwire.proxy.http import render
from expertwire.proxy.http.reply import Ask, Known, Reply, Service
from expertwire.proxy.http.wheel import NEVER, Timed
from expertwire.proxy.seam import Request

LINGER_S: Final = 3.0  # after an answer that was given before all was read, until what is not read may reset the connection
LEFT_S: Final = 1.0  # until it is asked whether a client that is not read from has left
_ESTABLISHED: Final = 1  # linux/tcp_states.h
BODY_BYTES_PER_S: Final = 16_384  # a body's time grows by its bytes at this rate
_RESET: Final = struct.pack("ii", 1, 0)  # socket(7), SO_LINGER: on, 0 s
_SPECIAL: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"})
# Heads that are kept, with what they meant: a client's differ in the length of the body only, which is part of them.
KNOWN_HEADS: Final = 512
KNOWN_BYTES: Final = 1024
_NO_HEAD: Final = 3  # where the end of one was looked for and not found, and 4 added
# With one of these a head is not kept: it comes once, or the request is not simply so many bytes.
_VARYING: Final = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"x-request-id", b"traceparent", b"tracestate", b"idempotency-key"}
)
_OF_UPGRADE: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})


class Reading(IntEnum):
    """What is expected from the client."""

    IDLE = 0
    HEAD = auto()
    BODY = auto()
    ENDED = auto()  # no more requests are taken
    LINGERING = auto()  # the answer is out; what still comes is dropped
    CLOSED = auto()


# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_READING_BODY, _READING_CLOSED, _READING_ENDED, _READING_HEAD = Reading.BODY, Reading.CLOSED, Reading.ENDED, Reading.HEAD
_READING_IDLE, _READING_LINGERING = Reading.IDLE, Reading.LINGERING


class RefusedError(ValueError):
    """Stops httptools; what is wrong stands in `Front`."""


class Front(asyncio.Protocol, Timed):
    """One client's connection, and httptools' callbacks for it."""

    __slots__ = (
        "_begun_at",
        "_counted",
        "_expects",
        "_fault",
        "_fed",
        "_head_bytes",
        "_headers",
        "_hosts",
        "_loop",
        "_measured",
        "_old",
        "_parser",
        "_pieces",
        "_queue",
        "_queued_bytes",
        "_reading",
        "_reply",
        "_size",
        "_target",
        "_transport",
        "_unsent",
        "_upgrade",
        "peer",
        "service",
        "stalled",
    )

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        Timed.__init__(self)
        self.service = service
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._reading = _READING_IDLE
        self._fault: Fault | None = None
        self._queue: deque[Ask | Fault] = deque()
        self._queued_bytes = 0
        self._fed = 0  # bytes of the piece that is being read
        self._reply: Reply | None = None
        self._begun_at = 0.0
        self._counted = 0  # bytes of the body that is being read, in `service.held`
        self._unsent = 0  # and of replies that the client does not take
        self.stalled = False
        self.peer = ""
        self._clear()

    def _clear(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._hosts = 0
        self._measured = False  # a length, or chunks: a body follows
        self._expects = False
        self._old = False  # HTTP/1.0
        self._upgrade = False
        self._pieces: list[bytes] = []
        self._size = 0

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: a client is here."""
        self._transport = cast(asyncio.Transport, transport)
        service = self.service
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        service.fronts.add(self)
        # accept(2) gives the lowest free number, so as many are in use. Past the very end libuv closes what it accepts, without a word.
        number = transport.get_extra_info("socket").fileno()
        if (fault := self._unwelcome(number)) is not None:
            self._answer_fault(fault)
            if number >= service.limits.descriptors_left:
                self._close()  # to wait until it has read this would cost a server's connection
            return
        self._await(service.limits.idle_s, time.monotonic())

    def _unwelcome(self, number: int) -> Fault | None:
        """Why this connection is not served."""
        service, limits = self.service, self.service.limits
        if service.stopping:
            return faults.stopping()
        if len(service.fronts) > limits.connections:
            return faults.busy(limits.connections, limits.retry_after_s)
        return service.out_of("descriptors") if number >= limits.descriptors else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: it is closed."""
        self._reading = _READING_CLOSED
        self._transport = None
        self.due = NEVER
        self._uncount()
        self.service.held.give(self._unsent)
        self._clear()
        del self._parser  # they hold each other, and the collector comes rarely here: a body of a gigabyte would wait for it
        self.service.fronts.discard(self)
        self._leave()

    def eof_received(self) -> bool | None:
        """Asyncio: the client sends no more, and so it has left."""
        if self._reply is not None or self._queue:
            self.drop()
        else:
            self._reading = _READING_ENDED
            self._await(LINGER_S, time.monotonic())
        return None

    def pause_writing(self) -> None:
        """Asyncio: the client reads too slowly."""
        self.stalled = True
        if self._transport is not None:
            self._unsent = self._transport.get_write_buffer_size()
            self.service.held.add(self._unsent)
        self._await(self.service.limits.stall_s, time.monotonic())
        if self._reply is not None:
            self._reply.pause()

    def resume_writing(self) -> None:
        """Asyncio: it has caught up."""
        self.stalled = False
        self.service.held.give(self._unsent)
        self._unsent = 0
        if self._reply is not None:
            self.due = NEVER
            self._reply.resume()
            self._hold_back()
        elif self._queue:
            self._loop.call_soon(self._next)
        elif self._reading < _READING_ENDED:
            self._await(self.service.limits.idle_s, time.monotonic())

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes of requests."""
        if self._reading >= _READING_ENDED:
            return
        head_end = 0
        if self._reading is _READING_IDLE:
            head_end = data.find(b"\r\n\r\n") + 4
            known = self.service.known.get(data[:head_end])
            if known is not None and known.size == len(data) - head_end:
                # The same bytes as before, and nothing behind them: they mean the same, and the parser need not be asked again.
                method, target, headers, digest, size = known
                self._queue.append(Ask(Request(method, target, headers, data[head_end:], self.peer, digest), True, False, 0))
                self._queued_bytes += size
                if self._reply is not None or self.stalled:
                    self._hold_back()
                else:
                    self._next()
                return
        waiting = len(self._queue)
        self._fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._without_upgrade(data, upgrade)
        except httptools.HttpParserError as error:
            self._bad(error)
        if _NO_HEAD < head_end <= KNOWN_BYTES and self._reading is _READING_IDLE and len(self._queue) == waiting + 1:
            self._learn(data[:head_end], len(data) - head_end)
        if self._reading is _READING_HEAD and self._fault is None:
            self._head_bytes += len(data)
            if self._head_bytes > self.service.limits.head_bytes:
                self._fault = faults.head_too_large(self.service.limits.head_bytes)
        if self._fault is not None and self._reading < _READING_ENDED:
            self._reading = _READING_ENDED
            self._uncount()
            self._clear()
            self._queue.append(self._fault)
        if self._reply is not None:
            self._hold_back()
        elif self._queue:
            if self.stalled:
                self._hold_back()
            self._next()
        elif self._reading is not _READING_IDLE:
            self._await_rest(time.monotonic())

    def _learn(self, head: bytes, size: int) -> None:
        """It was one whole request, by its length, and the connection stays."""
        ask = self._queue[-1]
        if isinstance(ask, Fault) or ask.old or ask.counted or len(ask.request.body) != size:
            return
        request = ask.request
        if not _VARYING.isdisjoint([name for name, _ in request.headers]) or b"upgrade:" in head.lower():  # that is not in them
            return
        known = self.service.known
        if len(known) >= KNOWN_HEADS:
            known.clear()
        request.digest = Digest(request.target, request.headers)
        known[head] = Known(request.method, request.target, request.headers, request.digest, size)

    # ---- reading

    def _await(self, seconds: float, now: float) -> None:
        self.due = now + seconds
        if self.looked_at > self.due:
            self.service.wheel.watch(self, now)

    def _await_rest(self, now: float) -> None:
        """More of a request must come; the time for it counts from its first byte."""
        if self._begun_at == 0.0:
            self._begun_at = now
        self.due = self._begun_at + self.service.limits.head_s + self._size / BODY_BYTES_PER_S
        self.service.wheel.watch(self, now)

    def _uncount(self) -> None:
        """The body that is being read is let go."""
        self.service.held.give(self._counted)
        self._counted = 0

    def _drop_queue(self) -> None:
        for ask in self._queue:
            if isinstance(ask, Ask):
                self.service.held.give(ask.counted)
        self._queue.clear()

    def _hold_back(self) -> None:
        """Read no more while as many requests wait as may. Who does not read sees no end, so the kernel is asked now and then."""
        limits = self.service.limits
        if (len(self._queue) >= limits.pipelined or self._queued_bytes > limits.body_bytes) and self._transport is not None:
            self._transport.pause_reading()
            if not self.stalled:
                self._await(LEFT_S, time.monotonic())

    def _has_left(self) -> bool:
        """Whether the client has closed its side, by the connection's state (tcp(7), TCP_INFO: its first byte)."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    def _bad(self, error: Exception) -> None:
        if self._fault is None and self._reading < _READING_ENDED:
            self._fault = faults.bad_request(f"the request is not valid HTTP/1.1: {error}")

    def _without_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade | None) -> None:
        """We speak HTTP/1.1 only: read the same request as if it had not offered anything else (RFC 9110, 7.8)."""
        while upgrade is not None:
            lines = [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in _OF_UPGRADE]
            head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self._parser.get_method(), self._target, b"".join(lines))
            data = head + data[upgrade.args[0] :]
            upgrade = None
            self._uncount()
            self._clear()
            self._reading = _READING_IDLE
            self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                upgrade = another
            except httptools.HttpParserError as error:
                self._bad(error)

    def _refuse(self, fault: Fault) -> None:
        self._fault = fault
        raise RefusedError

    def on_message_begin(self) -> None:
        """Httptools: the first byte of a request."""
        if self._reading is _READING_ENDED:
            raise RefusedError
        self._reading = _READING_HEAD

    def on_url(self, url: bytes) -> None:
        """Httptools: (a part of) the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools: a header; or a trailer, which is dropped."""
        if self._reading is not _READING_HEAD:
            return
        name = name.lower()
        self._headers.append((name, value))
        if name in _SPECIAL:
            self._special(name, value)

    def _special(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            self._measured = True
            # httptools has refused what is no number, and a second one.
            size, limits = int(value), self.service.limits
            if size > limits.body_bytes:
                self._refuse(faults.too_large("the body", limits.body_bytes))
            if size > limits.free_bytes and not self.service.held.fits(size):
                self._refuse(self.service.out_of("bodies"))
        elif name == b"transfer-encoding":
            self._measured = True
            if value.lower() != b"chunked":
                self._refuse(Fault(501, "invalid_request_error", "the only transfer coding that this server knows is chunked"))
        elif name == b"expect":
            if value.lower() != b"100-continue":
                self._refuse(Fault(417, "invalid_request_error", "the only expectation that this server knows is 100-continue"))
            self._expects = True
        else:
            self._upgrade = True

    def on_headers_complete(self) -> None:
        """Httptools: the head is whole."""
        parser, limits, headers = self._parser, self.service.limits, self._headers
        if len(headers) > limits.headers or (self._head_bytes + self._fed > limits.head_bytes and self._long_head()):
            self._refuse(faults.head_too_large(limits.head_bytes))
        version = parser.get_http_version()
        self._old = version == "1.0"
        if version != "1.1" and version != "1.0":
            self._refuse(Fault(505, "invalid_request_error", "this server speaks HTTP/1.1 and HTTP/1.0"))
        if self._hosts != 1 and (version == "1.1" or self._hosts):
            self._refuse(faults.bad_request(f"the request has {self._hosts} Host headers; it needs one"))
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in headers):
            self._refuse(faults.bad_request("Transfer-Encoding does not exist in HTTP/1.0"))
        if parser.get_method() == b"CONNECT":
            self._refuse(Fault(405, "invalid_request_error", "this server opens no tunnels"))
        self._reading = _READING_BODY
        self._expects = self._expects and not self._upgrade and version == "1.1" and self._measured
        if self._expects and self._reply is None and not self._queue:
            self._go_on()

    def _go_on(self) -> None:
        """Who has asked whether to send a body may."""
        self._expects = False
        self.send(render.CONTINUE)

    def _long_head(self) -> bool:
        """Counted exactly: other requests may have come with it."""
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers) > self.service.limits.head_bytes

    def on_body(self, data: bytes) -> None:
        """Httptools: a piece of the body."""
        size = self._size = self._size + len(data)
        if size > self.service.limits.free_bytes:
            self._count(size)
        self._pieces.append(data)

    def _count(self, size: int) -> None:
        """A large body grows: within its own limit, and that of all together."""
        if size > self.service.limits.body_bytes:
            self._refuse(faults.too_large("the body", self.service.limits.body_bytes))
        if not self.service.held.take(size - self._counted):
            self._refuse(self.service.out_of("bodies"))
        self._counted = size

    def on_message_complete(self) -> None:
        """Httptools: a request is whole."""
        if self._upgrade and self._reading is _READING_BODY and self._parser.should_upgrade():
            return  # HttpParserUpgrade follows
        parser, pieces = self._parser, self._pieces
        body = b"".join(pieces) if len(pieces) != 1 else pieces[0]
        keep = parser.should_keep_alive()
        ask = Ask(Request(parser.get_method(), self._target, self._headers, body, self.peer), keep, self._old, self._counted)
        self._counted = 0  # the reply's now
        self._queue.append(ask)
        self._queued_bytes += self._size
        self._begun_at = 0.0
        self._clear()
        self._reading = _READING_IDLE if keep else _READING_ENDED

    # ---- answering

    def _next(self) -> None:
        """Take the next request, if nothing is being answered."""
        if self._reply is not None or not self._queue or self._transport is None or self.stalled:
            return  # to a client that takes no reply nothing more is answered: its replies would be held without a bound
        ask = self._queue.popleft()
        if isinstance(ask, Fault):
            self._answer_fault(ask)
            return
        self._queued_bytes -= len(ask.request.body)
        self.due = NEVER
        reply = self._reply = self.service.open(self, ask)
        self.service.answer(reply)

    def _answer_fault(self, fault: Fault) -> None:
        """The last answer of this connection."""
        self._uncount()
        self._clear()
        self.send(render.whole(self.service.heads.start(fault.status), fault.header_lines(), render.CLOSE, fault.body()))
        self._linger()

    def _linger(self) -> None:
        """Nothing more is sent, but what still comes is read for a while: closing before would reset the connection, answer and all."""
        self._reading = _READING_LINGERING
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            self._await(LINGER_S, time.monotonic())

    def send(self, data: bytes) -> None:
        """Hand bytes to the transport, which collects those of one turn of the loop."""
        if self._transport is not None:
            self._transport.write(data)

    def replied(self, reply: Reply, reset: bool = False) -> None:
        """A reply is over. `reset`: by a reset, for its end could be taken for a proper one."""
        if self._reply is not reply:
            return
        self._reply = None
        reply.front = None
        if reply.counted:
            self.service.held.give(reply.counted)
        if not reply.keep or self.service.stopping:
            self._close(reset)
            return
        now = time.monotonic()
        if self._queue:
            if self.stalled:
                self._await(self.service.limits.stall_s, now)
                return
            if self._transport is not None:
                self._transport.resume_reading()
            self._loop.call_soon(self._next)
        elif self.stalled:
            self._await(self.service.limits.stall_s, now)
        elif self._reading is _READING_IDLE:
            self._await(self.service.limits.idle_s, now)
        elif self._reading < _READING_ENDED:
            if self._expects and self._reading is _READING_BODY:
                self._go_on()
            self._await_rest(now)

    def _close(self, reset: bool = False) -> None:
        """Close once what was written is sent."""
        self._drop_queue()
        if self._transport is None:
            return
        if reset:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
            return
        self._reading = _READING_ENDED
        self._await(LINGER_S if not self.stalled else self.service.limits.stall_s, time.monotonic())
        self._transport.close()

    def close_if_idle(self) -> None:
        """We stop: nothing is being answered here, so nothing need be."""
        if self._reply is None and not self._queue and self._reading is _READING_IDLE:
            self._close()

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._reading = _READING_CLOSED
            self._transport.abort()
        self._leave()

    def _leave(self) -> None:
        reply, self._reply = self._reply, None
        self._drop_queue()
        if reply is not None:
            self.service.held.give(reply.counted)
            reply.gone(time.monotonic())

    def expire(self, now: float) -> None:
        """Timed: the client is too slow, or idle for too long."""
        if self._reply is None and self._reading in (_READING_HEAD, _READING_BODY) and not self.stalled:
            seconds = self.service.limits.head_s
            self._answer_fault(faults.request_timeout("the request", seconds))
        elif self._reply is None and self._reading is _READING_IDLE and not self.stalled:
            self._close()
        elif self._reply is not None and not self.stalled and self._reading < _READING_ENDED and not self._has_left():
            self._await(LEFT_S, now)
        else:
            self.drop()
