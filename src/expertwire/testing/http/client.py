"""A client for tests of HTTP servers: says exactly what it is told to, judges strictly what comes back, and leaves when it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from expertwire.testing.http.wire import Decoder, End, Event, Head, WireError, encode

DEADLINE_S = 20.0


@dataclass
class Reply:
    """What came back for one request, as far as it came."""

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    whole: bool = False  # ended as its framing says
    fault: str = ""  # what broke it off
    interim: list[int] = field(default_factory=list)

    def header(self, name: str) -> str:
        """Its first value, or ""."""
        return next((value for found, value in self.headers if found == name), "")

    @property
    def json(self) -> Any:
        """The body's object."""
        return json.loads(self.body)

    @property
    def data(self) -> list[str]:
        """The data of every event that is whole, `[DONE]` among them."""
        blocks = self.body.decode().split("\n\n")[:-1]
        lines = [[line[6:] for line in block.split("\n") if line.startswith("data: ")] for block in blocks]
        return ["\n".join(of_one) for of_one in lines]

    @property
    def events(self) -> list[Any]:
        """The objects of every event but `[DONE]`."""
        return [json.loads(text) for text in self.data if text != "[DONE]"]

    @property
    def done(self) -> bool:
        """A stream that ended normally: whole, and [DONE] is its last."""
        return self.whole and self.data[-1:] == ["[DONE]"]

    def texts(self) -> dict[int, str]:
        """The text of each choice, streamed or not, of any API."""
        found: dict[int, str] = {}
        if not self.header("content-type").startswith("text/event-stream"):
            if self.json.get("object") == "response":
                return {0: "".join(part["text"] for item in self.json["output"] for part in item["content"])}
            return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in self.json["choices"]}
        for event in self.events:
            if event.get("type") == "response.output_text.delta":
                found[0] = found.get(0, "") + event["delta"]
            for choice in event.get("choices", ()):
                said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                found[choice["index"]] = found.get(choice["index"], "") + said
        return found


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = Decoder(responses=True)
        self._ready: list[Event] = []

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1", receive_bytes: int = 0) -> Client:
        """Connect; `receive_bytes` makes the window of a slow reader small."""
        endpoint = socket.socket()
        endpoint.setblocking(False)
        try:
            if receive_bytes:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            await asyncio.get_running_loop().sock_connect(endpoint, (host, port))
            reader, writer = await asyncio.open_connection(sock=endpoint, limit=receive_bytes or 1 << 16)
        except BaseException:
            endpoint.close()
            raise
        return cls(reader, writer)

    async def send(self, data: bytes, segment_bytes: int = 0) -> None:
        """These bytes, in segments that the receiver may see one by one."""
        size = segment_bytes or max(1, len(data))
        for at in range(0, len(data), size):
            self.writer.write(data[at : at + size])
            if segment_bytes:
                await asyncio.sleep(0)
        await self.writer.drain()

    async def reply(
        self, more_of: Reply | None = None, *, head_only: bool = False, until_events: int | None = None, deadline_s: float = DEADLINE_S
    ) -> Reply:
        """The next one, or the rest of one; of a stream no more than `until_events`. Raises `TimeoutError`; a break is told in it."""
        found = more_of or Reply()
        if more_of is None:
            self._decoder.bodiless.append(head_only)
        async with asyncio.timeout(deadline_s):
            while not found.whole and not found.fault:
                if until_events is not None and len(found.data) >= until_events:
                    break
                if not self._ready:
                    await self._read(found)
                while self._ready and not found.whole:
                    self._take(found, self._ready.pop(0))
        return found

    async def _read(self, found: Reply) -> None:
        try:
            data = await self.reader.read(1 << 16)
            self._ready += self._decoder.feed(data) if data else [*self._decoder.end(), b""]
        except (WireError, ConnectionError) as error:
            found.fault = str(error) or type(error).__name__

    def _take(self, found: Reply, event: Event) -> None:
        if isinstance(event, Head):
            if event.status < 200:
                found.interim.append(event.status)
            else:
                found.status, found.headers = event.status, event.headers
        elif isinstance(event, End):
            found.whole = found.status >= 200
        elif event:
            found.body += event
        elif not found.whole:
            found.fault = "closed"

    async def closed(self, deadline_s: float = DEADLINE_S) -> bool:
        """Whether the other side ends the connection, with nothing more said."""
        async with asyncio.timeout(deadline_s):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    def leave(self, *, reset: bool = False) -> None:
        """End the connection, as a client that is gone does."""
        if reset:
            endpoint = self.writer.get_extra_info("socket")
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()


def request(method: str, target: str, body: Any = None, headers: dict[str, str] | None = None, host: str = "test") -> bytes:
    """A request's bytes; a body that is not bytes is sent as JSON."""
    told = {"Host": host, **(headers or {})}
    raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    if raw is not None and "Content-Type" not in told:
        told["Content-Type"] = "application/json"
    return encode(f"{method} {target} HTTP/1.1", list(told.items()), raw)


async def ask(
    port: int, target: str, body: Any = None, headers: dict[str, str] | None = None, *, method: str = "", deadline_s: float = DEADLINE_S
) -> Reply:
    """One request over a connection of its own."""
    method = method or ("GET" if body is None else "POST")
    client = await Client.open(port)
    try:
        await client.send(request(method, target, body, headers))
        return await client.reply(head_only=method == "HEAD", deadline_s=deadline_s)
    finally:
        client.leave()
