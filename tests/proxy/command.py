"""`expertwire proxy` as a process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from expertwire.testing.http.fake_vllm import Fleet

LIMIT_S = 60.0


class Command:
    """The command, its log read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, fleet: Fleet, *words: str, before: tuple[str, ...] = ()) -> AsyncIterator[Command]:
        """One that is killed at the end if it still runs. `before`: words before the command itself."""
        servers = ["--prefill", *(server.url for server in fleet.prefill), "--decode", *(server.url for server in fleet.decode)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [*before, sys.executable, "-m", "expertwire.cli", "proxy", *servers, "--port", "0", *words]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
        try:
            yield cls(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """The count-th line of that event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = [line for line in self.lines if line["event"] == event]
                if len(found) >= count:
                    return found[count - 1]
                line = await self.process.stderr.readline()
                assert line.startswith(b"{"), (line, self.lines)
                self.lines.append(orjson.loads(line))

    async def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            assert self.process.stderr is not None
            for line in (await self.process.stderr.read()).splitlines():
                self.lines.append(orjson.loads(line))
            return await self.process.wait()


def counted(text: bytes, name: str) -> int:
    return sum(int(line.rpartition(b" ")[2]) for line in text.splitlines() if line.startswith(name.encode()))


async def free_port() -> int:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    return port


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """A process that is, and is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
