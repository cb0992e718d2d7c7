"""A connection of a fake server: requests in, one after the other, and answers out, whole or broken as a fault says."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from expertwire.testing.http.faults import NONE, After, Cut, Fault, Framing
from expertwire.testing.http.wire import Decoder, End, Head, WireError, chunk

if TYPE_CHECKING:
    from expertwire.testing.http.fake_vllm import FakeServer

LINGER_RESET = struct.pack("ii", 1, 0)  # socket(7): a close that is answered by RST
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    500: "Internal Server Error",
}


class Connection(asyncio.Protocol):
    """One client's connection. What was pipelined waits its turn; a connection that is lost cancels what is being answered."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.transport: asyncio.Transport
        self._decoder = Decoder()
        self._waiting: deque[tuple[Head, bytes]] = deque()
        self._head: Head | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counted, and closed at once where a test asked for that."""
        self.transport = cast(asyncio.Transport, transport)
        self.server.counts["accepted"] += 1
        self.server.connections.add(self)
        self.server.counts["most_sockets"] = max(self.server.counts["most_sockets"], len(self.server.connections))
        self._writable.set()
        if self.server.close_on_accept:
            self.server.close_on_accept -= 1
            self.transport.close()
            return
        self._rest()

    def data_received(self, data: bytes) -> None:
        """Requests, strictly: what RFC 9112 forbids is counted, and answered by 400 and the end."""
        try:
            for event in self._decoder.feed(data):
                self._take(event)
        except WireError as error:
            self.server.counts["malformed"] += 1
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.server.malformed.append(str(error))
            self.transport.close()

    def _take(self, event: Head | bytes | End) -> None:
        if isinstance(event, Head):
            self._head = event
            self._body.clear()
            if event.get("expect").lower() == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif isinstance(event, bytes):
            self._body += event
        else:
            assert self._head is not None
            self._waiting.append((self._head, bytes(self._body)))
            self._next()

    def _next(self) -> None:
        if self._task is None and self._waiting and not self.transport.is_closing():
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            head, body = self._waiting.popleft()
            self._task = asyncio.get_running_loop().create_task(self._serve(head, body))

    async def _serve(self, head: Head, body: bytes) -> None:
        exchange = Exchange(self, head)
        try:
            await self.server.answer(exchange, head, body)
        finally:
            self._task = None
        if exchange.stays and not self.transport.is_closing():
            self._rest()
            self._next()
        else:
            self.transport.close()

    def _rest(self) -> None:
        if self._idle is None and not self._waiting:
            self._idle = asyncio.get_running_loop().call_later(self.server.options.keepalive_s, self.transport.close)

    def pause_writing(self) -> None:
        """The client reads slower than it is written to."""
        self._writable.clear()
        self.server.counts["paused"] += 1

    def resume_writing(self) -> None:
        """It reads again."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Whatever was being answered is aborted."""
        if self._idle is not None:
            self._idle.cancel()
        if self._task is not None:
            self._task.cancel()
        self.server.connections.discard(self)

    async def write(self, data: bytes) -> None:
        """Hand over, and wait while the client is too slow."""
        if self.transport.is_closing():
            await asyncio.sleep(3600)  # until connection_lost cancels this
        self.transport.write(data)
        await self._writable.wait()

    def drop(self, *, reset: bool) -> None:
        """End it: FIN, or RST."""
        if reset:
            endpoint: socket.socket | None = self.transport.get_extra_info("socket")
            if endpoint is not None:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            self.transport.abort()
        else:
            self.transport.close()

    def half_close(self) -> None:
        """Send nothing more, and go on reading."""
        self.transport.write_eof()


class Exchange:
    """One answer. Its fault decides how it is written."""

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection, self._request = connection, head
        self.fault: Fault = NONE
        self.status = 0
        self.was_cut = False
        self.stays = head.keeps_alive
        self.head_only = False
        self._chunked = False
        self._events = 0

    async def before_head(self) -> None:
        """What a fault does before there is any answer."""
        fault = self.fault
        if fault.hang:
            await asyncio.sleep(3600)
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.interim:
            await self.connection.write(fault.interim)
        if fault.raw:
            await self._write(fault.raw)
            self._cut()
        elif fault.cut is Cut.BEFORE_HEAD:
            self._cut()

    async def json(self, status: int, found: Any) -> None:
        """An object as a whole answer; nothing for None."""
        body = b"" if found is None else json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        await self._whole(status, body, "application/json" if body else "")

    async def canned(self, fault: Fault) -> None:
        """The answer that a fault holds."""
        await self._whole(fault.status, fault.body, fault.content_type)

    async def _whole(self, status: int, body: bytes, content_type: str) -> None:
        if self.was_cut:
            return
        self.status = status
        fault = self.fault
        headers = [("content-type", content_type)] if content_type else []
        if fault.framing is Framing.USUAL:
            headers.append(("content-length", str(len(body) + fault.length_off)))
        await self._begin(status, headers, chunked=fault.framing is Framing.CHUNKED)
        if self.was_cut or self.head_only:
            return
        if fault.cut is not Cut.NOT:
            await self._body(body[: fault.events])
            self._cut()
            return
        await self._body(body)
        if self._chunked:
            await self._write(b"0\r\n\r\n")
        if fault.length_off > 0:
            self._cut()
            return
        await self._after()

    async def _begin(self, status: int, headers: list[tuple[str, str]], *, chunked: bool) -> None:
        if chunked:
            headers.append(("transfer-encoding", "chunked"))
        self._chunked = chunked
        if self.fault.framing is Framing.CLOSE or not self.stays:
            headers.append(("connection", "close"))
            self.stays = False
        headers += [("date", "Mon, 30 Nov 2026 12:00:00 GMT"), ("server", "uvicorn"), *self.fault.headers]
        if request_id := self._request.get("x-request-id"):
            headers.append(("x-request-id", request_id))
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", *(f"{name}: {value}" for name, value in headers), "", ""]
        data = "\r\n".join(lines).encode("latin-1")
        if self.fault.cut is Cut.IN_HEAD:
            await self._write(data[: len(data) // 2])
            self._cut()
            return
        await self._write(data)

    async def begin_stream(self) -> None:
        """The head of a stream of events."""
        if self.was_cut:
            return
        self.status = 200
        headers = [("content-type", "text/event-stream; charset=utf-8")]
        await self._begin(200, headers, chunked=self.fault.framing is not Framing.CLOSE)

    async def event(self, found: Any, name: str = "") -> None:
        """One event, an HTTP chunk of its own."""
        if self.was_cut:
            return
        fault = self.fault
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
        data = (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"
        if fault.cut in (Cut.AFTER_EVENTS, Cut.IN_EVENT) and self._events == fault.events:
            if fault.cut is Cut.IN_EVENT:
                await self._body(data[: len(data) // 2])
            self._cut()
            return
        if fault.error_after == self._events:
            self._events += 1
            await self._body(b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}\n\n')
            await self.end_stream()
            self.was_cut = True
            return
        self._events += 1
        await self._body(data)

    async def end_stream(self, *, done: bool = True) -> None:
        """[DONE] where the API has it, and the last chunk."""
        if self.was_cut:
            return
        if self.fault.cut in (Cut.AFTER_EVENTS, Cut.IN_EVENT):
            self._cut()  # the stream was shorter than what was to be whole
            return
        if done:
            await self._body(b"data: [DONE]\n\n")
        if self._chunked:
            await self._write(b"0\r\n\r\n")
        await self._after()

    async def _body(self, data: bytes) -> None:
        if not self._chunked:
            await self._write(data)
            return
        size = self.fault.chunk_bytes or max(1, len(data))
        await self._write(b"".join(chunk(data[at : at + size]) for at in range(0, len(data), size)))

    async def _write(self, data: bytes) -> None:
        size = self.fault.segment_bytes or max(1, len(data))
        for at in range(0, len(data), size):
            await self.connection.write(data[at : at + size])
            if self.fault.segment_bytes:
                await asyncio.sleep(0)  # so that who reads may see it alone

    async def _after(self) -> None:
        fault = self.fault
        if fault.behind:
            await self._write(fault.behind)
        if fault.after is After.HALF_CLOSE:
            self.connection.half_close()
        elif fault.after is After.CLOSE:
            self.stays = False

    def _cut(self) -> None:
        self.was_cut = True
        self.stays = False
        self.connection.drop(reset=self.fault.reset)
