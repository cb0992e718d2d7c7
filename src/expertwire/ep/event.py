"""Events and their overlap, DeepEP's names. On CPU tensors an operation has finished when its call returns, so events are complete."""

from __future__ import annotations

from types import TracebackType


class EventHandle:
    """A point in a stream's work. Work on CPU tensors is done when the call returns: nothing is left to wait for."""

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point. Complete already on CPU."""


class EventOverlap:
    """What `dispatch`, `combine` and `get_dispatch_layout` return last.

    `event` is None when the call was synchronous (callers test exactly that), else an `EventHandle`. As a context manager it waits on exit,
    so that work inside the block overlaps with the operation. `extra_tensors` are only kept alive, as long as this object is.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event. Without an event the operation was synchronous: nothing to wait for."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.current_stream_wait()
