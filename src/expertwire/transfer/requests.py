"""Prepared lists and transfers: what is moved, how it stands, and who owns the memory meanwhile."""

from __future__ import annotations

import os
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
from expertwire.transfer.memory import Found, FoundThere
from expertwire.transfer.parts import Parts
from expertwire.transfer.states import ACTIVE, DONE, NEVER_POSTED, RELEASED, TransferState, state_of

if TYPE_CHECKING:
    from expertwire.fabric import Endpoint, Region
    from expertwire.fabric.request import PreparedRequest
    from expertwire.transfer.descriptors import Descriptors
    from expertwire.transfer.peers import Peer
    from expertwire.transfer.runs import Runs

__all__ = ["LANES", "NOTIFICATION", "Prepared", "Transfer", "check_notification"]

LANES = 2  # to a peer, each with an endpoint to itself: one for what is small
NOTIFICATION = b"\x01"  # the kind of message: before each, so that an empty one is one too
_ACTIVE, _DONE = TransferState.ACTIVE, TransferState.DONE  # an enum's own look-up costs more than the rest of a check
_DEATH_LOOKED_FOR_NS = 200_000_000  # a transfer that young is not asked whether its peer has died

_HINTS = {
    Status.BAD_KEY: "the memory there is not registered any more, or was registered again; add the agent's newer card and prepare again",
    Status.PEER_DEAD: "remove the agent, and add it again once it is back",
    Status.TIMED_OUT: "it passed the hard deadline",
    Status.ABORTED: "something before it on its way failed",
}


class Prepared:
    """Descriptors whose places are known: of this agent (`agent` is ""), or of another one. It may be dropped while transfers of it run."""

    def __init__(self, agent: str, descriptors: Descriptors, found: Found | FoundThere, peer: Peer | None) -> None:
        self.agent = agent
        self.descriptors = descriptors
        self._found: Found | FoundThere | None = found
        self._peer = peer

    def __len__(self) -> int:
        return len(self.descriptors)

    def __repr__(self) -> str:
        return f"Prepared({self.agent or 'local'!r}, {len(self)} descriptors{'' if self._found else ', released'})"

    def release(self) -> None:
        """No transfer can be made of it any more. Idempotent."""
        self._found = None

    def here(self) -> Found:
        """Of a local list. Raises `StateError` once it is released."""
        found = self._places()
        assert isinstance(found, Found)
        return found

    def there(self) -> FoundThere:
        """Of another agent's. Raises `StateError` once it is released."""
        found = self._places()
        assert isinstance(found, FoundThere)
        return found

    def _places(self) -> Found | FoundThere:
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

    `operation`: "READ" or "WRITE"; `agent`: the other one; `path`: the provider that leads there. `nbytes`, `descriptor_count`: as
    asked for; `run_count`: in so many pieces after neighbours were merged. `posted_ns`, `ended_ns`: of `time.monotonic_ns()`, when it
    was last posted and when its end was seen; `post_duration_ns`: how long that call took; `start_wall_ns`: of `time.time_ns()`.
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
        self.operation, self.agent, self.path = operation, peer.name, endpoint.provider
        self.nbytes, self.descriptor_count, self.run_count = int(runs.lengths.sum()), descriptor_count, len(runs)
        self.notification = notification
        self._attached = NOTIFICATION + notification if notification else None
        self._endpoint, self._peer, self._regions = endpoint, peer, regions
        lane = lane_for(self.nbytes, endpoint.lanes, endpoint.lanes)
        self._later = lane > 0
        self._failed: tuple[int, ExpertwireError] | None = None  # when what failed was posted, and why it failed
        self._process = os.getpid()
        self._prepared = self._prepare(runs, lane)
        self._native = self._prepared.native

    def _prepare(self, runs: Runs, lane: int) -> PreparedRequest | Parts:
        """At once, or in as many parts as it takes so that each leaves half of the tables to others."""
        endpoint, what, peer = self._endpoint, self.operation.lower(), self._peer.number
        parts = runs.parts(endpoint.operations_max // 2, endpoint.bulk_chunk_bytes if lane > 0 else 2**63)
        try:
            made = [
                endpoint.prepare_arrays(
                    what, peer, each.locals_, each.local_offsets, each.remotes, each.remote_offsets, each.lengths, lane=lane
                )
                for each in parts
            ]
            return made[0] if len(made) == 1 else Parts(made, endpoint.timeout_ms)
        except (InvalidArgumentError, StateError):  # what has changed since the lists were prepared
            self._check_places()
            raise

    def __repr__(self) -> str:
        return f"Transfer({self._what()}: {self.state().value})"

    def _what(self) -> str:
        return f"{self.operation} of {self.descriptor_count} descriptors, {self.nbytes} bytes, with agent {self.agent!r}"

    @property
    def posted_ns(self) -> int:
        """When it was last posted, of `time.monotonic_ns()`; 0: never."""
        return self._native.times[0]

    @property
    def post_duration_ns(self) -> int:
        """How long that post took."""
        return self._native.times[1]

    @property
    def start_wall_ns(self) -> int:
        """When it was last posted, of `time.time_ns()`; 0: never."""
        return self._native.times[2]

    @property
    def ended_ns(self) -> int | None:
        """When its end was seen, of `time.monotonic_ns()`."""
        return self._native.times[3] or None

    @property
    def stalled(self) -> bool:
        """Whether it is on its way, and its deadline has passed. It owns its memory all the same."""
        if self.state() is not TransferState.ACTIVE:
            return False
        return time.monotonic_ns() - self.posted_ns > self._endpoint.timeout_ms * 1_000_000

    @property
    def error(self) -> ExpertwireError | None:
        """Why it failed, where the last post did."""
        status, posted_ns = self._native.status(), self.posted_ns
        if self._failed is not None and self._failed[0] == posted_ns:
            return self._failed[1]
        if state_of(status) is not TransferState.FAILED:
            return None
        self._failed = posted_ns, self._failure(Status(status))
        return self._failed[1]

    def state(self) -> TransferState:
        """How it stands. One local load while it is on its way."""
        return state_of(self._native.status())

    def post(self, notification: bytes = b"", timeout_ms: int | None = None) -> TransferState:
        """Begin it, or begin it again: ACTIVE, or DONE where it has ended already. A `notification` that is not empty replaces its own.

        Nothing of the work is done here where it is more than 16 KiB. Where the tables are full it waits for room, up to `timeout_ms`.
        Raises `ActiveError` (on its way), `NotFoundError` (the agent was removed, or memory deregistered), `PeerError`, `DeadlineError`,
        `TransferError`; then nothing was taken, and it may be posted again.
        """
        attached = self._attached
        if notification:
            check_notification(self._endpoint, notification)
            attached = NOTIFICATION + notification
        if self._peer.ended or self._peer.card is None:
            self._check_places()
        try:
            status = self._native.submit(attached, self._endpoint.timeout_ms if timeout_ms is None else timeout_ms, self._later)
        except ExpertwireError as error:
            raise self._not_begun(error) from None
        if status is None:
            raise self._not_free()
        if notification:
            self.notification, self._attached = notification, attached
        return _DONE if status == DONE else _ACTIVE

    def _not_begun(self, error: ExpertwireError) -> ExpertwireError:
        if isinstance(error, PeerError):
            return PeerError(f"the {self._what()} was not begun: {error}", self._peer.number)
        if isinstance(error, CapacityError | DeadlineError | TransferError):
            return type(error)(f"the {self._what()}, in {self.run_count} pieces, was not begun: {error}")
        # Memory that was deregistered, or a forked child: seldom, so not looked for before every post.
        self._require_own_process()
        self._check_places()
        if why := self._death():  # it is being let go
            return PeerError(f"the {self._what()} was not begun: the agent has ended: {why}", self._peer.number)
        return error

    def _not_free(self) -> ExpertwireError:
        if self.state() is TransferState.RELEASED:
            return StateError(f"the {self._what()} was released")
        return ActiveError(f"the {self._what()} is still on its way; wait for its end before it is posted again")

    def check(self) -> TransferState:
        """Help for at most 20 µs, then how it stands: ACTIVE or DONE. Raises `NotPostedError` before a post, and its error once it failed.

        Where its peer has died it raises `PeerError` though something may still be in flight: `state()` says whether memory may be reused.
        """
        status = self._native.turn()
        if status == DONE:
            return _DONE
        if status == ACTIVE:
            if time.monotonic_ns() - self._native.times[0] > _DEATH_LOOKED_FOR_NS and (why := self._death()):
                raise PeerError(f"the {self._what()} still owns its memory, but the agent is dead: {why}", self._peer.number)
            return _ACTIVE
        raise self._unfit(status)

    def wait(self, timeout_ms: int | None = None) -> None:
        """Return once it is DONE. Raises `DeadlineError` after `timeout_ms`: it is stalled, owns its memory, may be waited for again."""
        limit_ms = self._endpoint.timeout_ms if timeout_ms is None else timeout_ms
        try:
            status = self._native.wait(limit_ms)
        except ExpertwireError as error:
            self._raise_if_active(error)
            status = self._native.status()
        if status == ACTIVE:
            self._raise_if_active(self._prepared.late(limit_ms))
        if status != DONE:
            raise self._unfit(status)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> None:
        try:
            await self._prepared.ended()
        except ExpertwireError as error:
            self._raise_if_active(error)
        if (status := self._native.status()) != DONE:
            raise self._unfit(status)

    def release(self) -> None:
        """Give it up. Idempotent. On its way it is cancelled where nothing of it was posted; else `ActiveError`, and it stays valid."""
        self._require_own_process()
        if self._native.release():
            return
        self._native.cancel()
        if not self._native.release():
            raise ActiveError(f"the {self._what()} is on its way and owns its memory; it cannot be let go before it has ended")

    # ---- inside

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(f"the {self._what()} belongs to process {self._process}, the parent of this forked one ({os.getpid()})")

    def _unfit(self, status: int) -> ExpertwireError:
        """What is raised where it neither is done nor on its way."""
        if status == NEVER_POSTED:
            return NotPostedError(f"the {self._what()} was never posted")
        if status == RELEASED:
            return StateError(f"the {self._what()} was released")
        return self.error or StateError(f"the {self._what()} was posted again by another thread meanwhile")

    def _raise_if_active(self, error: ExpertwireError) -> None:
        if self.state() is not TransferState.ACTIVE:
            return
        text = f"the {self._what()} still owns its memory: {error}"
        raise PeerError(text, self._peer.number) if isinstance(error, PeerError) else type(error)(text)

    def _failure(self, status: Status) -> ExpertwireError:
        message = f"the {self._what()} failed: {status.name.lower()}"
        if code := self._native.code:
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
        if why := self._peer.ended or self._peer.leaving:
            return why
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


def check_notification(endpoint: Endpoint, payload: bytes) -> None:
    """Raises `InvalidArgumentError` for what cannot be sent as one message."""
    if not isinstance(payload, bytes | bytearray):
        raise InvalidArgumentError(f"a notification is a {type(payload).__name__}; it must be bytes")
    most = int(endpoint.native.capabilities["notification_bytes_max"]) - len(NOTIFICATION)
    if len(payload) > most:
        raise InvalidArgumentError(
            f"a notification has {len(payload)} bytes, the limit of {endpoint.provider} is {most}; write the rest as memory"
        )
