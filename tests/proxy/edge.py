"""A worker of the proxy in front of fake servers, all of them on the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

import orjson
import uvloop

from expertwire.proxy import config
from expertwire.proxy.log import Log
from expertwire.proxy.server import Worker, listen
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.client import Client, Reply, ask
from expertwire.testing.http.fake_vllm import Fleet, Options

PROMPT = {"model": MODEL, "prompt": "one two three", "max_tokens": 4}
STREAM = PROMPT | {"stream": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}


def run(body: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, as the proxy has it."""
    uvloop.run(body)


class Edge:
    """Both; `left` is what neither has let go."""

    def __init__(self, fleet: Fleet | None = None, log_level: str = "debug", **table: Any) -> None:
        self.fleet = fleet or Fleet(1, 1, Options())
        self.table = table
        self.log_level = log_level
        self.lines: list[bytes] = []

    async def __aenter__(self) -> Self:
        await self.fleet.__aenter__()
        servers = {
            "prefill": [{"url": server.url} for server in self.fleet.prefill],
            "decode": [{"url": server.url} for server in self.fleet.decode],
        }
        self.config = config.from_table({"port": 0, **servers, **self.table})
        self.log = Log(self.lines.append, self.log_level)
        self.worker = Worker(self.config, self.log)
        await self.worker.start(listen(self.config, backlog=64))
        self.port = self.worker.address[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.worker.stop(2.0 if kind is None else 0.0)
        self.log.close()
        if kind is None:
            assert self.left() == {}
            assert not [line for line in self.logged() if line["event"] == "internal_error"], self.lines
            assert not [server.malformed for server in self.fleet.servers if server.malformed]
        await self.fleet.__aexit__(kind, error, trace)

    @property
    def p(self) -> Any:
        """The first prefill server."""
        return self.fleet.prefill[0]

    @property
    def d(self) -> Any:
        """The first decode server."""
        return self.fleet.decode[0]

    def logged(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [orjson.loads(line) for batch in self.lines for line in batch.splitlines()]

    def left(self) -> dict[str, int]:
        """What the proxy holds for requests: nothing, once all are over. Idle connections are no such thing."""
        worker = self.worker
        found = {
            "live": len(worker.live),
            "busy": sum(pool.busy_count for pool in worker.pools),
            "in_flight": worker.core.in_flight,
            "legs": worker.core.open_legs,
            "held": worker.held.total,
            "tasks": len(asyncio.all_tasks()) - 1,
        }
        return {name: count for name, count in found.items() if count}

    async def settle(self, deadline_s: float = 5.0, *, blocks: bool = True) -> dict[str, int]:
        """Wait until the proxy holds nothing and the servers do nothing; what is left at the deadline.

        `blocks` False: a D that broke off has been sent parameters, so what they stand for lies at P until its lease ends.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s

        def still() -> dict[str, int]:
            found = {**self.left(), **self.fleet.left(sockets=False)}
            ignored = {"tasks"} if blocks else {"tasks", "blocks_held"}  # tasks are the fakes' too, while they close
            return {name: count for name, count in found.items() if name not in ignored}

        while still() and loop.time() < until:
            await asyncio.sleep(0.005)
        return still()

    async def ask(self, target: str, body: Any = None, headers: dict[str, str] | None = None, **options: Any) -> Reply:
        """One request through the proxy."""
        return await ask(self.port, target, body, headers, **options)

    async def say(self, data: bytes, *, replies: int = 1, segment_bytes: int = 0, head_only: bool = False) -> tuple[list[Reply], Client]:
        """Exactly these bytes; the replies, and the connection, still open."""
        client = await Client.open(self.port)
        await client.send(data, segment_bytes)
        return [await client.reply(head_only=head_only) for _ in range(replies)], client
