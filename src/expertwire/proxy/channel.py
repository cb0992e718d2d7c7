"""Calls between the process that runs the proxy and its workers, over a socket pair that nobody else has."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from expertwire.errors import DeadlineError, ExpertwireError, PeerError

Message = dict[str, Any]
Handler = Callable[[Message], Awaitable[Any]]
_HEAD_BYTES: Final = 8


class Channel:
    """One end. Both may call, at any time; the other's handler answers, or its error of ours comes back."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, sock: socket.socket) -> None:
        """This end from now on; `run` follows."""
        self._reader, self._writer = await asyncio.open_connection(sock=sock)

    async def run(self) -> None:
        """Serve this end until the other has closed."""
        reader = self._reader
        assert reader is not None
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "little")
                number, is_answer, content = pickle.loads(await reader.readexactly(size))  # written by our own `_send`
                if is_answer:
                    self._answered(number, content)
                else:
                    task = asyncio.ensure_future(self._handle(number, content))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(PeerError("the other process has ended"))
            for task in list(self._tasks):
                task.cancel()  # nobody is there to be answered
            self.close()

    async def call(self, message: Message, deadline_s: float) -> Any:
        """The other's answer. Raises its error of ours; PeerError if it has ended, DeadlineError after `deadline_s`."""
        if self._writer is None or self._writer.is_closing():
            raise PeerError("the other process has ended, or has not begun")
        self._number += 1
        number = self._number
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, False, message)
            async with asyncio.timeout(deadline_s):
                return await waiting
        except TimeoutError as error:
            raise DeadlineError(f"the other process has not answered {message.get('op')!r} within {deadline_s:g} s") from error
        finally:
            del self._waiting[number]

    async def answered(self, deadline_s: float) -> None:
        """Wait until every call from the other end has its answer."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)

    def close(self) -> None:
        """Close this end; the other sees it. What was sent still goes."""
        if self._writer is not None:
            self._writer.close()

    def _send(self, number: int, is_answer: bool, content: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            data = pickle.dumps((number, is_answer, content))
            self._writer.write(len(data).to_bytes(_HEAD_BYTES, "little") + data)

    async def _handle(self, number: int, message: Message) -> None:
        try:
            answer = await self._handler(message)
        except ExpertwireError as error:
            answer = error
        self._send(number, True, answer)

    def _answered(self, number: int, content: Any) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return  # too late
        if isinstance(content, ExpertwireError):
            waiting.set_exception(content)
        else:
            waiting.set_result(content)
