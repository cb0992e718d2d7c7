"""A worker's process, started by `workers`: `python -m expertwire.proxy.worker FD`, FD being its end of the channel."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from typing import Any, Final

import uvloop

from expertwire.errors import ExpertwireError
from expertwire.proxy import faults, metrics
from expertwire.proxy.channel import Channel, Message
from expertwire.proxy.config import Config
from expertwire.proxy.http.relay import Relay
from expertwire.proxy.log import Log
from expertwire.proxy.server import Worker, calm_collector, listen, until_again

METRICS_S: Final = 5.0
ANSWER_S: Final = 2.0


class Process:
    """Does what the parent says. The parent's end is a reason to stop, in order."""

    def __init__(self) -> None:
        self._channel = Channel(self._asked)
        self._stop: asyncio.Queue[str] = asyncio.Queue()
        self._worker: Worker | None = None
        self._log: Log | None = None
        self._ended: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> None:
        """Until it was stopped."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.put_nowait, "SIGTERM")
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        await self._channel.open(sock)
        channel = asyncio.ensure_future(self._channel.run())
        channel.add_done_callback(lambda _: self._stop.put_nowait("the parent's end"))
        why = await self._stop.get()
        if self._worker is not None and self._log is not None:
            self._log.event("info", "stopping", signal=why)
            finished = await until_again(self._worker, self._stop)
            self._ended.set_result({"finished": finished, "counted": self._worker.counted()})
            await self._channel.answered(ANSWER_S)
            self._log.close()
        self._channel.close()
        channel.cancel()
        await asyncio.wait((channel,))

    async def _asked(self, message: Message) -> Any:
        what = message["op"]
        if what == "start":
            await self._start(pickle.loads(message["config"]), message["number"])
            return None
        if what in ("stop", "stop_now"):
            self._stop.put_nowait("stop")
            return await asyncio.shield(self._ended)
        worker = self._worker
        if worker is None:
            raise ExpertwireError(f"{what} before start")
        if what == "snapshot":
            return worker.core.metrics.snapshot(worker.core.gauges())
        return await worker.administer(message)

    async def _start(self, config: Config, number: int) -> None:
        self._log = Log(lambda data: os.write(2, data), config.log.level, number)
        worker = Worker(config, self._log, number)
        worker.metrics_of_all = self._metrics
        await worker.start(listen(config, backlog=config.limits.backlog))
        self._worker = worker

    def _metrics(self, relay: Relay) -> None:
        task = asyncio.ensure_future(self._answer_metrics(relay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_metrics(self, relay: Relay) -> None:
        """The numbers of all workers: which of them a request for /metrics comes to is chance."""
        try:
            snapshots = await self._channel.call({"op": "metrics"}, METRICS_S)
        except ExpertwireError:
            relay.refuse(faults.internal())
            return
        text = metrics.text(metrics.merge(snapshots))
        relay.reply(200, b"content-type: text/plain; version=0.0.4\r\n", text.encode())


async def main(sock: socket.socket) -> None:
    """The process."""
    calm_collector()
    await Process().run(sock)


if __name__ == "__main__":
    uvloop.run(main(socket.socket(fileno=int(sys.argv[1]))))
