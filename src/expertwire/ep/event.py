"""Events and their overlap, DeepEP's names. On CPU tensors an operation has finished when its call returns, so events are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch


class EventHandle:
    """A point in a stream's work: by default here, in the current CUDA stream. Work on CPU tensors is done when the call returns, and where
    CUDA has not been used there is nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        if event is None and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        self.event = event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point. Complete already on CPU."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


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


class Order:
    """Where one call stands among the streams. `event`, what the call returns last, is there when the block has ended."""

    def __init__(self) -> None:
        self.event = EventOverlap()
        self._kept: list[torch.Tensor] = []
        self._given: list[torch.Tensor] = []

    def keep(self, *tensors: torch.Tensor | None) -> None:
        """The caller's tensors that the call's work touches after it has returned."""
        self._kept += [tensor for tensor in tensors if tensor is not None]

    def give(self, *tensors: torch.Tensor | None) -> None:
        """Tensors that the call has made for the caller."""
        self._given += [tensor for tensor in tensors if tensor is not None]

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What the caller must not let go of before the work has ended."""
        return tuple(self._kept)

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """What the caller gets."""
        return tuple(self._given)


@contextmanager
def in_calling_thread(_previous_event: EventOverlap | None, async_finish: bool, _sms: int = 0) -> Iterator[Order]:
    """On CPU tensors: nothing to wait for, before or after."""
    order = Order()
    yield order
    if async_finish:
        order.event = EventOverlap(EventHandle())
