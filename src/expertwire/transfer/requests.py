"""Prepared lists and transfers: what is moved, how it stands, and who owns the memory meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from expertwire.errors import (
    ActiveError,
    CancelledRequestError,
    CapacityError,
    DeadlineError,
    ExpertwireError,
    InvalidArgumentError,
    NotFoundError,
    NotPostedError,
    PeerError,
    StateError,
    TransferError,
)
from expertwire.fabric import Status
from expertwire.fabric.lanes import lane_for
from expertwire.transfer.states import TransferEvent, TransferState, advance

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint, Region, Request
    from expertwire.fabric.request import PreparedRequest
    from expertwire.transfer.descriptors import Descriptors
    from expertwire.transfer.memory import Found
    from expertwire.transfer.peers import Peer
    from expertwire.transfer.runs import Runs

__all__ = ["LANES", "NOTIFICATION", "Prepared", "Transfer", "check_notification"]

LANES = 2  # to a peer, each with an endpoint to itself: one for what is small
NOTIFICATION = b"\x01"  # the kind of message: before each, so that an empty one is one too
_DEATH_LOOKED_FOR_NS = 200_000_000  # a transfer that young is not asked whether its peer has died

_HINTS = {
    Status.BAD_KEY: "the memory there is not registered any more, or was registered again; add the agent's newer card and prepare again",
    Status.PEER_DEAD: "remove the agent, and add it again once it is back",
    Status.TIMED_OUT: "it passed the hard deadline",
    Status.ABORTED: "something before it on its way failed",
}


class Prepared:
    """Descriptors whose places are known: of this agent (`agent` is ""), or of another one. It may be dropped while transfers of it run."""

    def __init__(self, agent: str, descriptors: Descriptors, found: Found, peer: Peer | None) -> None:
        self.agent = agent
        self.descriptors = descriptors
        self._found: Found | None = found
        self._peer = peer

    def __len__(self) -> int:
        return len(self.descriptors)

    def __repr__(self) -> str:
        return f"Prepared({self.agent or 'local'!r}, {len(self)} descriptors{'' if self._found else ', released'})"

    def release(self) -> None:
        """No transfer can be made of it any more. Idempotent."""
        self._found = None

    def places(self) -> Found:
        """Raises `StateError` once it is released."""
        if self._found is None:
            raise StateError(f"a prepared list of {len(self)} descriptors was released; prepare it again")
        return self._found

    def peer(self) -> Peer:
        """Whose they are. Raises `InvalidArgumentError` of a local list."""
        if self._peer is None:
            raise InvalidArgumentError("the remote side is a list that was prepared as local; prepare it with the other agent's name")
        return self._peer


class Transfer:
    """Bytes between this agent and another, posted as often as one likes. Calls may come from several threads.

    `operation`: "READ" or "WRITE"; `agent`: the other one; `nbytes`, `descriptor_count`: as asked for; `run_count`: in so many pieces after
    neighbours were merged. `posted_ns`, `ended_ns`: of `time.monotonic_ns()`, when it was last posted and when its end was seen;
    `post_duration_ns`: how long that call took; `start_wall_ns`: of `time.time_ns()`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        operation: str,
        peer: Peer,
        runs: Runs,
        regions: tuple[Region, ...],
        descriptor_count: int,
        notification: bytes,
    ) -> None:
        self.operation, self.agent = operation, peer.name
        self.nbytes, self.descriptor_count, self.run_count = int(runs.lengths.sum()), descriptor_count, len(runs)
        self.notification = notification
        self.posted_ns = self.post_duration_ns = self.start_wall_ns = 0
        self.ended_ns: int | None = None
        self.error: ExpertwireError | None = None
        self._endpoint, self._peer, self._runs, self._regions = endpoint, peer, runs, regions
        self._lane = lane_for(self.nbytes, endpoint.lanes, endpoint.lanes)
        self._state = TransferState.READY
        self._request: Request | None = None
        self._prepared: PreparedRequest | None = None  # at the first post; the handle outlives the lists that it was made of
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"Transfer({self._what()}: {self._state.value})"

    def _what(self) -> str:
        return f"{self.operation} of {self.descriptor_count} descriptors, {self.nbytes} bytes, with agent {self.agent!r}"

    @property
    def stalled(self) -> bool:
        """Whether it is on its way, and its deadline has passed. It owns its memory all the same."""
        if self.state() is not TransferState.ACTIVE:
            return False
        return time.monotonic_ns() - self.posted_ns > self._endpoint.timeout_ms * 1_000_000

    def state(self) -> TransferState:
        """How it stands. One local load while it is on its way."""
        request = self._request
        if request is not None and (status := request.status()) is not Status.PENDING:
            self._settle(request, status)
        return self._state

    def post(self, notification: bytes = b"", timeout_ms: int | None = None) -> TransferState:
        """Begin it, or begin it again. A `notification` that is not empty replaces the one that it has.

        Nothing of the work is done here. Where the tables are full it waits for room, up to `timeout_ms`. Raises `ActiveError` (on its
        way), `NotFoundError` (the agent was removed, or memory deregistered), `PeerError`, `DeadlineError`, `TransferError`; then nothing
        was taken, and it may be posted again.
        """
        begun = time.monotonic_ns()
        with self._lock:
            self._settle_locked()
            if self._state is TransferState.ACTIVE:
                self._require_own_process()
                raise ActiveError(f"the {self._what()} is still on its way; wait for its end before it is posted again")
            after = advance(self._state, TransferEvent.POST)
            if notification:
                self._check_notification(notification)
                self.notification = notification
            wall = time.time_ns()
            self._request = self._submit(timeout_ms)
            self._state, self.error, self.ended_ns = after, None, None
            self.posted_ns, self.start_wall_ns = begun, wall
            self.post_duration_ns = time.monotonic_ns() - begun
            return self._state

    def _submit(self, timeout_ms: int | None) -> Request:
        if self._peer.ended or self._peer.card is None:
            self._check_places()
        attached = NOTIFICATION + self.notification if self.notification else None
        try:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared.submit(attached, later=self._lane > 0, timeout_ms=timeout_ms)
        except (InvalidArgumentError, StateError):
            # Memory that was deregistered, or a forked child: said in words here. Seldom, so not looked for before every post.
            self._require_own_process()
            self._check_places()
            raise
        except PeerError as error:
            raise PeerError(f"the {self._what()} was not begun: {error}", self._peer.number) from None
        except (CapacityError, DeadlineError, TransferError) as error:
            raise type(error)(f"the {self._what()}, in {self.run_count} pieces, was not begun: {error}") from None

    def _prepare(self) -> PreparedRequest:
        runs = self._runs
        return self._endpoint.prepare_arrays(
            self.operation.lower(),
            self._peer.number,
            runs.locals_,
            runs.local_offsets,
            runs.remotes,
            runs.remote_offsets,
            runs.lengths,
            lane=self._lane,
        )

    def check(self) -> TransferState:
        """Help for at most 20 µs, then how it stands: ACTIVE or DONE. Raises `NotPostedError` before a post, and its error once it failed.

        Where its peer has died it raises `PeerError` though something may still be in flight: `state()` says whether memory may be reused.
        """
        request = self._request
        if request is None:
            self._posted()
        elif (status := request.poll()) is not Status.PENDING:
            self._settle(request, status)
        elif time.monotonic_ns() - self.posted_ns > _DEATH_LOOKED_FOR_NS and (why := self._death()):
            raise PeerError(f"the {self._what()} still owns its memory, but the agent is dead: {why}", self._peer.number)
        return self._outcome()

    def wait(self, timeout_ms: int | None = None) -> None:
        """Return once it is DONE. Raises `DeadlineError` after `timeout_ms`: it is stalled, owns its memory, may be waited for again."""
        request = self._posted()
        if request is not None:
            try:
                request.wait(timeout_ms)
            except ExpertwireError as error:
                self._raise_if_active(request, error)
            self._settle(request, request.status())
        self._outcome()

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> None:
        request = self._posted()
        if request is not None:
            try:
                await request
            except ExpertwireError as error:
                self._raise_if_active(request, error)
            self._settle(request, request.status())
        self._outcome()

    def release(self) -> None:
        """Give it up. Idempotent. On its way it is cancelled where nothing of it was posted; else `ActiveError`, and it stays valid."""
        self._require_own_process()
        with self._lock:
            if self._state is TransferState.RELEASED:
                return
            self._settle_locked()
            if self._state is TransferState.ACTIVE:
                assert self._request is not None
                self._request.cancel()
                self._settle_locked()
            if self._state is TransferState.ACTIVE:
                raise ActiveError(f"the {self._what()} is on its way and owns its memory; it cannot be let go before it has ended")
            self._state = advance(self._state, TransferEvent.RELEASE)

    # ---- inside

    def _posted(self) -> Request | None:
        """The request where it is on its way. Raises where it never was."""
        self._require_own_process()
        with self._lock:
            if self._state is TransferState.READY:
                raise NotPostedError(f"the {self._what()} was never posted")
            if self._state is TransferState.RELEASED:
                raise StateError(f"the {self._what()} was released")
            return self._request

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(f"the {self._what()} belongs to process {self._process}, the parent of this forked one ({os.getpid()})")

    def _outcome(self) -> TransferState:
        if self._state is TransferState.FAILED and self.error is not None:
            raise self.error
        return self._state

    def _raise_if_active(self, request: Request, error: ExpertwireError) -> None:
        self._settle(request, request.status())
        if self._state is not TransferState.ACTIVE:
            return
        text = f"the {self._what()} still owns its memory: {error}"
        raise PeerError(text, self._peer.number) if isinstance(error, PeerError) else type(error)(text)

    def _settle(self, request: Request, status: Status) -> None:
        with self._lock:
            if self._request is request:  # else another thread was first, and the status is stale
                self._end(request, status)

    def _settle_locked(self) -> None:
        request = self._request
        if request is not None and (status := request.status()) is not Status.PENDING:
            self._end(request, status)

    def _end(self, request: Request, status: Status) -> None:
        if status is Status.PENDING:
            return
        self.ended_ns = time.monotonic_ns()
        if status is not Status.OK:
            self.error = self._failure(request, status)
        self._state = advance(self._state, TransferEvent.SUCCEED if status is Status.OK else TransferEvent.FAIL)
        self._request = None
        request.release()

    def _failure(self, request: Request, status: Status) -> ExpertwireError:
        message = f"the {self._what()} failed: {status.name.lower()}"
        code = request.code
        if code:
            message += f" (provider's code {code}: {os.strerror(code)})"
        if status in _HINTS:
            message += f"; {_HINTS[status]}"
        if status in (Status.CANCELLED, Status.ABORTED):
            return CancelledRequestError(message)
        if status is Status.PEER_DEAD:
            why = self._death()
            return PeerError(f"{message} ({why})" if why else message, self._peer.number)
        if status in (Status.CLOSED, Status.STALE, Status.REFUSED):
            return StateError(message)
        return TransferError(message)

    def _death(self) -> str:
        """Why the other agent has ended, as far as that is known."""
        if self._peer.ended:
            return self._peer.ended
        fault = self._endpoint.fault(self._peer.number)
        return fault[1] if fault else ""

    def _check_places(self) -> None:
        if self._peer.ended and self._peer.card is not None:
            raise PeerError(f"the {self._what()} was not begun: the agent has ended: {self._peer.ended}; {_HINTS[Status.PEER_DEAD]}")
        if self._peer.card is None:
            raise NotFoundError(f"agent {self.agent!r} was removed since this transfer was made; add it, and make the transfer again")
        for region in self._regions:
            if region.closed:
                raise NotFoundError(
                    f"memory of this transfer ({region.bytes} bytes at {region.address:#x}) was deregistered since it was made"
                )

    def _check_notification(self, payload: bytes) -> None:
        check_notification(self._endpoint, payload)


def check_notification(endpoint: Endpoint, payload: bytes) -> None:
    """Raises `InvalidArgumentError` for what cannot be sent as one message."""
    if not isinstance(payload, bytes | bytearray):
        raise InvalidArgumentError(f"a notification is a {type(payload).__name__}; it must be bytes")
    most = int(endpoint.native.capabilities["notification_bytes_max"]) - len(NOTIFICATION)
    if len(payload) > most:
        raise InvalidArgumentError(
            f"a notification has {len(payload)} bytes, the limit of {endpoint.provider} is {most}; write the rest as memory"
        )
