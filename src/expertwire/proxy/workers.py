"""Runs the proxy: one worker in this process, or several processes that share the port (SO_REUSEPORT), kept alive by this one."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import uvloop

from expertwire.errors import DeadlineError, ExpertwireError, PeerError
from expertwire.proxy.admin import AdminService, apply
from expertwire.proxy.channel import Channel, Message
from expertwire.proxy.config import Config
from expertwire.proxy.log import Log
from expertwire.proxy.policy import Server, ServerConfig, Side
from expertwire.proxy.server import STOP_SIGNALS, Counted, listen, raise_file_limit, serve, try_port

START_S: Final = 60.0  # until a worker listens
ANSWER_S: Final = 5.0  # for what a worker does at once
NUMBERS_S: Final = 2.0  # for its numbers: one that hangs may not take those of the others with it
LOOK_S: Final = 2.0  # between two looks whether a worker still answers
HUNG_S: Final = 10.0  # for that answer; one that gives none keeps its share of the connections, and answers none of them
AGAIN_S: Final = 0.5  # until a worker that died is started again; doubled each time it dies young
AGAIN_MAX_S: Final = 10.0
YOUNG_S: Final = 10.0


def run(config: Config, write: Callable[[bytes], object]) -> tuple[bool, Counted]:
    """Serve until a signal. (everything was finished, requests by (endpoint, outcome)). `write`: takes the log's lines."""
    log = Log(write, config.log.level)
    raise_file_limit(config, log)  # workers inherit it
    try:
        return uvloop.run(serve(config, log) if config.workers == 1 else Parent(config, log).serve())
    finally:
        log.close()


class Child:
    """One worker process, as its parent sees it."""

    def __init__(self, number: int, handler: Callable[[Message], Any]) -> None:
        self.number = number
        self.channel = Channel(handler)
        self.process: asyncio.subprocess.Process | None = None
        self.reader: asyncio.Task[None] | None = None
        self.began = 0.0
        self.listens = False

    async def start(self, config: Config) -> None:
        """Start it, and wait until it listens. Raises ExpertwireError."""
        self.began = time.monotonic()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for the parent, which asks its workers in order.
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "expertwire.proxy.worker",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        await self.channel.open(ours)
        self.reader = asyncio.ensure_future(self.channel.run())
        await self.channel.call({"op": "start", "config": pickle.dumps(config), "number": self.number}, START_S)
        self.listens = True

    async def end(self, deadline_s: float) -> None:
        """Wait for its end; kill it after the deadline."""
        self.channel.close()
        if self.process is None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        if self.reader is not None:
            await self.reader


class Parent:
    """Keeps the workers, and tells all of them what the admin endpoint is told."""

    def __init__(self, config: Config, log: Log) -> None:
        self._config = config
        self._log = log
        self._fleet = config.fleet()
        self._children: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []  # two for each worker
        self._stopping = False

    async def serve(self) -> tuple[bool, Counted]:
        """See `run`."""
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[str] = asyncio.Queue()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, asked.put_nowait, signal.Signals(number).name)
        flusher = asyncio.ensure_future(self._flush())
        admin: AdminService | None = None
        try_port(self._config)
        # Bound and never listening: the port stays ours while workers come and go, and 0 becomes one number for all.
        with listen(self._config, backlog=0) as sock:
            self._config = dataclasses.replace(self._config, port=sock.getsockname()[1])
            try:
                self._children = [Child(number, self._asked) for number in range(self._config.workers)]
                await asyncio.gather(*(child.start(self._config) for child in self._children))
                for index in range(len(self._children)):
                    self._keepers += [asyncio.ensure_future(self._keep(index)), asyncio.ensure_future(self._watch(index))]
                self._log.event("info", "listening", host=self._config.host, port=self._config.port, workers=len(self._children))
                if self._config.admin.port:
                    admin = AdminService(self._administer, self._log)
                    await admin.start(self._config.admin.host, self._config.admin.port)
                self._log.event("info", "stopping", signal=await asked.get())
                return await self._stop(asked)
            finally:
                self._stopping = True
                if admin is not None:
                    await admin.close()
                for keeper in self._keepers:
                    keeper.cancel()
                await asyncio.gather(*(child.end(ANSWER_S) for child in self._children), *self._keepers, return_exceptions=True)
                flusher.cancel()
                for number in STOP_SIGNALS:
                    loop.remove_signal_handler(number)

    async def _flush(self) -> None:
        while True:
            self._log.flush()
            await asyncio.sleep(0.1)

    async def _stop(self, asked: asyncio.Queue[str]) -> tuple[bool, Counted]:
        self._stopping = True
        timeouts = self._config.timeouts
        limit_s = timeouts.shutdown_s + timeouts.release_s + ANSWER_S
        ends = asyncio.gather(*(child.channel.call({"op": "stop"}, limit_s) for child in self._children), return_exceptions=True)
        again = asyncio.ensure_future(asked.get())
        await asyncio.wait((ends, again), return_when=asyncio.FIRST_COMPLETED)
        if not ends.done():
            await asyncio.gather(*(child.channel.call({"op": "stop_now"}, ANSWER_S) for child in self._children), return_exceptions=True)
        again.cancel()
        finished, counted = True, Counter[tuple[str, str]]()
        for end in await ends:
            if isinstance(end, BaseException):
                self._log.event("error", "worker_lost", error=str(end))
                finished = False
            else:
                finished = finished and end["finished"]
                counted.update(end["counted"])
        return finished, dict(counted)

    async def _keep(self, index: int) -> None:
        """Start a worker again whenever it dies."""
        wait_s = AGAIN_S
        while True:
            child = self._children[index]
            assert child.process is not None
            status = await child.process.wait()
            if self._stopping:
                return
            self._log.event("error", "worker_died", number=child.number, status=status)
            wait_s = min(2 * wait_s, AGAIN_MAX_S) if time.monotonic() - child.began < YOUNG_S else AGAIN_S
            await child.end(ANSWER_S)
            await asyncio.sleep(wait_s)
            fresh = self._children[index] = Child(child.number, self._asked)
            try:
                await fresh.start(self._now())
                self._log.event("info", "worker_started", number=child.number)
            except (ExpertwireError, OSError) as error:
                self._log.event("error", "worker_not_started", number=child.number, error=str(error))
                await fresh.end(ANSWER_S)
            if fresh.process is None:
                self._children[index] = child

    async def _watch(self, index: int) -> None:
        """Kill a worker that hangs or is stopped; `_keep` starts it again."""
        while True:
            await asyncio.sleep(LOOK_S)
            child = self._children[index]
            if not child.listens:
                continue  # START_S is its time for that
            try:
                await child.channel.call({"op": "list"}, HUNG_S)
            except DeadlineError:
                if self._stopping or child.process is None or child.process.returncode is not None:
                    continue
                self._log.event("error", "worker_hung", number=child.number, seconds=HUNG_S)
                child.process.kill()
            except ExpertwireError:
                continue  # it has ended, or has not begun

    def _now(self) -> Config:
        """The configuration with the servers that there are now."""
        sides: dict[str, tuple[ServerConfig, ...]] = {
            side.value: tuple(_config_of(server) for server in self._fleet.servers(side)) for side in Side
        }
        return dataclasses.replace(self._config, prefill=sides["prefill"], decode=sides["decode"])

    async def _everywhere(self, message: Message, deadline_s: float = ANSWER_S) -> list[Any]:
        """The answers of all workers, errors among them."""
        return await asyncio.gather(*(child.channel.call(message, deadline_s) for child in self._children), return_exceptions=True)

    async def _asked(self, message: Message) -> Any:
        """A worker wants what only all of them know."""
        snapshots = await self._everywhere({"op": "snapshot"}, NUMBERS_S)
        return [snapshot for snapshot in snapshots if not isinstance(snapshot, BaseException)]

    async def _administer(self, message: Message) -> Message:
        """Checked here, then told to all; a worker that cannot be told is started anew and learns it then."""
        if message["op"] == "list":
            return _together(await self._everywhere(message))
        done = apply(self._fleet, message, lambda server: None)
        answers = await self._everywhere({**message, "name": done["name"]})
        for child, answer in zip(self._children, answers, strict=True):
            if isinstance(answer, BaseException):
                self._log.event("error", "worker_not_told", number=child.number, error=str(answer))
                if child.process is not None and child.process.returncode is None:
                    child.process.kill()
        return done


def _config_of(server: Server) -> ServerConfig:
    return ServerConfig((server.origin + server.prefix).decode(), server.name, server.ranks)


def _together(answers: list[Any]) -> Message:
    """Several workers' servers as one list: what is in flight is added up; a server that any passes over is said to be passed over."""
    found: dict[tuple[str, str], Message] = {}
    for answer in answers:
        if isinstance(answer, BaseException):
            continue
        for server in answer["servers"]:
            key = (server["side"], server["name"])
            if key not in found:
                found[key] = server
                continue
            found[key]["in_flight"] += server["in_flight"]
            found[key]["failures"] += server["failures"]
            if server["standing"] != "serving":
                found[key]["standing"] = server["standing"]
    if not found and all(isinstance(answer, BaseException) for answer in answers):
        raise PeerError("no worker answers")
    return {"servers": list(found.values())}
