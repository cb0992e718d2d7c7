"""What was asked of the transport, and how it ended."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertwire.errors import CancelledRequestError, DeadlineError, ExpertwireError, PeerError, StateError, TransferError
from expertwire.fabric.region import Region

if TYPE_CHECKING:
    from expertwire.fabric.endpoint import Endpoint
    from expertwire.fabric.native import PreparedRequest as NativePrepared
    from expertwire.fabric.native import Request as NativeRequest

_OK = 0
_PENDING = 1
_RECHECK_S = 0.25  # a deadline of the engine ends a request without an event


class Status(enum.IntEnum):
    """How a request stands. Everything but `PENDING` is terminal; everything terminal but `OK` is a failure."""

    OK = 0
    PENDING = 1
    WOULD_BLOCK = 2
    CANCELLED = 3
    ABORTED = 4
    PEER_DEAD = 5
    BAD_KEY = 6
    OUT_OF_RANGE = 7
    TIMED_OUT = 8
    REFUSED = 9
    INVALID = 10
    STALE = 11
    CLOSED = 12
    IO_ERROR = 13


_STATUSES = tuple(Status)  # by number: a look at a tuple costs a tenth of a call of the enum


class Scope(enum.IntEnum):
    """What a signal waits for: its request's chunks, everything before it on its lane, or everything before it to that peer."""

    REQUEST = 0
    QUEUE_PAIR = 1
    PEER = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """`nbytes` bytes between `region` at `offset` here and the peer's region `remote` at `remote_offset`."""

    region: Region
    remote: str
    nbytes: int
    offset: int = 0
    remote_offset: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Signal:
    """Add `value` to the 64-bit word at byte `offset` of the peer's region `remote`, once what `scope` covers is there."""

    value: int
    offset: int = 0
    remote: str = "counters"
    scope: Scope = Scope.REQUEST
    lane: int = 0


class Request:
    """One logical request to one peer. Dropping it gives the handle up; what it still owns is freed when it has ended."""

    def __init__(self, endpoint: Endpoint, native: NativeRequest, what: str) -> None:
        self._endpoint = endpoint
        self._native = native
        self._what = what

    def __repr__(self) -> str:
        return f"Request({self._what} with rank {self.peer}: {self.status().name.lower()})"

    @property
    def peer(self) -> int:
        """The other rank."""
        return self._native.rank

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native.status() != _PENDING

    @property
    def stalled(self) -> bool:
        """Whether a wait for it has passed its deadline."""
        return self._native.stalled()

    @property
    def code(self) -> int:
        """The provider's own number behind a failure, or 0."""
        return 0 if self.status() is Status.STALE or self._endpoint.native.closed else self._native.code()

    def status(self) -> Status:
        """One local load: no lock, no system call."""
        return _STATUSES[self._native.status()]

    def poll(self) -> Status:
        """Help the engine for at most 20 µs if nobody else does, then `status()`."""
        return _STATUSES[self._native.turn()]

    def wait(self, timeout_ms: int | None = None) -> None:
        """Return when it has ended well.

        Raises `DeadlineError` when `timeout_ms` (the endpoint's by default) has passed: the request keeps its memory, and may be waited for
        again. Raises `PeerError`, `TransferError`, `CancelledRequestError` or `StateError` as it failed.
        """
        limit = self._endpoint.timeout_ms if timeout_ms is None else timeout_ms
        status = self._native.wait(limit)
        if status == _PENDING:
            raise self.late(limit)
        if status != _OK:
            self._check()

    def cancel(self) -> bool:
        """True: cancelled before anything was posted. False: posted work is still owned; the handle stays valid."""
        return Status(self._native.cancel()) is Status.OK

    def release(self) -> None:
        """Give the handle up now. Idempotent."""
        self._native.release()

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> None:
        if self._native.turn() == _PENDING:
            await self._endpoint.watcher().wait(self)
        self._check()

    def late(self, limit_ms: int) -> ExpertwireError:
        """What is raised where it has not ended in time."""
        return late(self._endpoint, self._what, self.peer, limit_ms)

    def _check(self) -> None:
        status = self.status()
        if status is Status.OK:
            return
        message = f"the {self._what} with rank {self.peer} failed: {status.name.lower()}"
        code = self.code
        if code:
            message += f" (provider's code {code}: {os.strerror(code)})"
        if status in (Status.CANCELLED, Status.ABORTED):
            raise CancelledRequestError(message)
        if status is Status.PEER_DEAD:
            fault = self._endpoint.fault(self.peer)
            raise PeerError(f"{message}; {fault[1]}" if fault else message, fault[0] if fault else self.peer)
        if status in (Status.CLOSED, Status.STALE, Status.REFUSED):
            raise StateError(message)
        raise TransferError(message)


class PreparedRequest:
    """Chunks to one peer that have been checked (`Endpoint.prepare_arrays()`), submitted as often as one likes, one at a time.

    `native` is what is called where each microsecond counts; its statuses are those of `Status`, or -1 (never submitted), -2 (released).
    """

    def __init__(self, endpoint: Endpoint, native: NativePrepared, what: str, peer: int) -> None:
        self._endpoint = endpoint
        self.native = native
        self._what = what
        self._peer = peer

    @property
    def done(self) -> bool:
        """Whether it is not on its way."""
        return self.native.status() != _PENDING

    async def ended(self) -> None:
        """Until it is not on its way any more. Raises `DeadlineError` after the endpoint's timeout."""
        if self.native.turn() == _PENDING:
            await self._endpoint.watcher().wait(self)

    def late(self, limit_ms: int) -> ExpertwireError:
        """What is raised where it has not ended in time."""
        return late(self._endpoint, self._what, self._peer, limit_ms)


def late(endpoint: Endpoint, what: str, peer: int, limit_ms: int) -> ExpertwireError:
    """In words: it has not ended in time, and what can be done."""
    return DeadlineError(
        f"the {what} with rank {peer} over {endpoint.provider} has not ended after {limit_ms} ms; "
        f"it keeps its memory: wait again, remove_peer({peer}), or close the endpoint"
    )


class Watcher:
    """Wakes the awaiting tasks of one event loop: an eventfd of the core in the loop's selector, only while somebody awaits."""

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._fd = -1
        self._waiting: dict[asyncio.Future[None], Request | PreparedRequest] = {}

    async def wait(self, request: Request | PreparedRequest) -> None:
        """Until the request has ended. Raises `DeadlineError` after the endpoint's timeout."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._open()
        self._waiting[future] = request
        self._endpoint.native.step_aside()
        timeout_s = self._endpoint.timeout_ms / 1000
        deadline = self._loop.time() + timeout_s
        try:
            while not request.done:  # looked at after the watch is open: what ended before has been seen
                if self._loop.time() >= deadline:
                    raise request.late(self._endpoint.timeout_ms)
                await asyncio.wait([future], timeout=min(_RECHECK_S, deadline - self._loop.time()))
        finally:
            del self._waiting[future]
            future.cancel()
            self._close_if_unused()

    def _open(self) -> None:
        if self._fd < 0:
            self._fd = self._endpoint.native.watch_open()
            self._loop.add_reader(self._fd, self._ready)

    def _close_if_unused(self) -> None:
        if self._fd >= 0 and not self._waiting:
            self._loop.remove_reader(self._fd)
            self._endpoint.native.watch_close(self._fd)
            self._fd = -1

    def _ready(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
        for future, request in self._waiting.items():
            if request.done and not future.done():
                future.set_result(None)
