"""A relay before a decode server that lets a known number of requests fail: some with a status, some in the midst of the answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from types import TracebackType
from typing import Self

ANSWER = b'{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}'
REFUSAL = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
LINE_BYTES = 1 << 20  # of a head
CUT_BYTES = 60  # of an answer's body, its framing included: a stream has begun by then, and none is whole


class Relay:
    """Listens on `port`, in a thread of its own. Each request has a connection of its own to the server behind it.

    Of the generating requests the first `skip` pass, then every `every`-th fails until `faults` have.
    """

    def __init__(self, name: str, server_port: int, *, faults: int, skip: int, every: int) -> None:
        self.name, self._server_port = name, server_port
        self._faults, self._skip, self._every = faults, skip, every
        self._seen = 0
        self.failed = {"status": 0, "cut": 0}
        self.port = 0
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(10):
            raise RuntimeError("the relay does not listen after 10 s")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024, limit=LINE_BYTES) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stop.wait()

    def _fault(self, head: bytes) -> str:
        """What becomes of this request: "", "status" or "cut"."""
        if not re.match(rb"POST \S*completions ", head):
            return ""
        self._seen += 1
        done = sum(self.failed.values())
        if self._seen <= self._skip or (self._seen - self._skip) % self._every or done == self._faults:
            return ""
        kind = ("status", "cut")[done % 2]
        self.failed[kind] += 1
        return kind

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            kind = self._fault(head)
            if kind == "status":
                writer.write(REFUSAL % (len(ANSWER), ANSWER))
                await writer.drain()
            else:
                await self._pass_on(head, body, reader, writer, CUT_BYTES if kind == "cut" else None)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side has left
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass_on(
        self, head: bytes, body: bytes, client: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None
    ) -> None:
        reader, server = await asyncio.open_connection("127.0.0.1", self._server_port, limit=LINE_BYTES)
        left = asyncio.ensure_future(client.read(1))  # ends where the client leaves: then so does this
        try:
            alone = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
            server.write(alone[:-2] + b"connection: close\r\n\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            writer.write(re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", answer)[:-2] + b"connection: close\r\n\r\n")
            while most is None or most > 0:
                piece = asyncio.ensure_future(reader.read(65536 if most is None else most))
                await asyncio.wait({piece, left}, return_when=asyncio.FIRST_COMPLETED)
                if left.done() or not piece.result():
                    piece.cancel()
                    return
                writer.write(piece.result())
                await writer.drain()
                if most is not None:
                    most -= len(piece.result())
        finally:
            left.cancel()
            server.close()
            with contextlib.suppress(OSError):
                await server.wait_closed()
