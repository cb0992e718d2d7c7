"""Operations of one Buffer run in order: on its comm stream, for which callers' streams wait, and it for them, by events; or, where the
caller's stream would wait at once, on that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from expertwire.ep.event import EventHandle, EventOverlap, Order


class CommStream:
    """The stream of a Buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.caller = torch.cuda.current_stream(device)  # of the call that runs now
        self._running = self.stream  # what that call runs on
        self._tail = torch.cuda.Event()  # the end of the last call outside graphs, and the stream of it
        self._tail_stream: torch.cuda.Stream | None = None

    @staticmethod
    def capturing() -> bool:
        """Whether the current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def point() -> torch.cuda.Event:
        """To be recorded where the host will wait for it."""
        return torch.cuda.Event()

    def mark(self, stream: object = None) -> torch.cuda.Event:
        """A point in that stream's work, now; of none in the caller's."""
        event = torch.cuda.Event()
        event.record(stream if isinstance(stream, torch.cuda.Stream) else self.caller)
        return event

    def wait_for(self, mark: object) -> None:
        """What is launched from now on begins behind that point."""
        assert isinstance(mark, torch.cuda.Event)
        self._running.wait_event(mark)

    def synchronize(self) -> None:
        """Wait for all of this GPU's work, replays on other streams too."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def ordered(self, previous_event: EventOverlap | None, async_finish: bool) -> Iterator[Order]:
        """One call, behind the last one, and behind `previous_event`, else all that the caller's stream has been given. The block runs with
        the stream current that it is to launch on; what the caller's stream is given later comes behind it, or, with `async_finish`, an
        event stands for the wait.

        A call that the caller's stream would wait for at once runs on that stream: no event and no other stream's memory costs the host
        anything. Graphs are recorded on the comm stream.
        """
        with torch.cuda.device(self.device):
            self.caller = torch.cuda.current_stream(self.device)
            given = None if previous_event is None or previous_event.event is None else previous_event.event.event
            recording = self.capturing()
            order = Order()
            if recording or async_finish or given is not None:
                with self._aside(order, given, async_finish, recording):
                    yield order
            else:
                with self._inline(order):
                    yield order

    @contextmanager
    def _inline(self, order: Order) -> Iterator[None]:
        self._running = self.caller
        self._follow_tail()
        try:
            yield
        finally:
            self._tail.record(self.caller)
        for tensor in order.kept:  # of an earlier call's, made on another stream
            tensor.record_stream(self.caller)

    @contextmanager
    def _aside(self, order: Order, given: torch.cuda.Event | None, async_finish: bool, recording: bool) -> Iterator[None]:
        """Tensors made in the block belong to the comm stream's part of torch's allocator, so none is used again too early there; what the
        caller's stream uses of them, and the block of the caller's, is said to the allocator. While a graph is recorded it would hold such
        memory back until the end, so the event keeps the tensors instead: in a replay all is ordered by the graph."""
        self._running = self.stream
        if given is not None:
            self.stream.wait_event(given)
            if recording and not _joined(self.stream):
                self.stream.wait_stream(self.caller)
        else:
            self.stream.wait_stream(self.caller)
        if not recording:
            self._follow_tail()
        try:
            with torch.cuda.stream(self.stream):
                yield
        except BaseException:
            self.caller.wait_stream(self.stream)  # a capture that the caller ends needs all streams joined
            raise
        finally:
            if not recording:
                self._tail.record(self.stream)
        if not async_finish:
            self.caller.wait_stream(self.stream)
        else:
            done = torch.cuda.Event()
            done.record(self.stream)
            order.event = EventOverlap(EventHandle(done), (*order.kept, *order.given) if recording else None)
        if not recording:
            for tensor in (*order.kept, *order.given):
                tensor.record_stream(self.stream)
                tensor.record_stream(self.caller)

    def _follow_tail(self) -> None:
        """Come behind the last call, wherever it runs; an event is recorded anew by each, and a wait is for what it stood for then."""
        if self._tail_stream is not None and self._tail_stream != self._running:
            self._running.wait_event(self._tail)
        self._tail_stream = self._running


def _joined(stream: torch.cuda.Stream) -> bool:
    """Whether the stream records a graph too."""
    with torch.cuda.stream(stream):
        return CommStream.capturing()
