"""Operations of one Buffer run in order on its comm stream; callers' streams wait for it, and it for them, by events."""

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
        self._reused = torch.cuda.Event(), torch.cuda.Event()

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
        self.stream.wait_event(mark)

    def synchronize(self) -> None:
        """Wait for all of this GPU's work, replays on other streams too."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def ordered(self, previous_event: EventOverlap | None, async_finish: bool) -> Iterator[Order]:
        """The comm stream waits for `previous_event`, else for all that the caller's stream has been given; then the block runs with the
        comm stream current; then the caller's stream waits for it, or, with `async_finish`, an event stands for the wait.

        Tensors made in the block belong to the comm stream's part of torch's allocator, so none is used again too early there; what the
        caller's stream uses of them, and what work that it does not wait for uses of the caller's, is said to the allocator. While a graph
        is recorded it would hold such memory back until the end, so the event keeps the tensors instead: in a replay all is ordered by the
        graph.
        """
        with torch.cuda.device(self.device):
            self.caller = torch.cuda.current_stream(self.device)
            recording = self.capturing()
            reused = (None, None) if recording else self._reused
            if previous_event is not None and previous_event.event is not None and previous_event.event.event is not None:
                self.stream.wait_event(previous_event.event.event)
                if recording and not _joined(self.stream):
                    self.stream.wait_stream(self.caller)
            else:
                _behind(self.stream, self.caller, reused[0])
            order = Order()
            try:
                with torch.cuda.stream(self.stream):
                    yield order
            except BaseException:
                self.caller.wait_stream(self.stream)  # a capture that the caller ends needs all streams joined
                raise
            if not async_finish:
                _behind(self.caller, self.stream, reused[1])
            else:
                done = torch.cuda.Event()
                done.record(self.stream)
                order.event = EventOverlap(EventHandle(done), (*order.kept, *order.given) if recording else None)
            if not recording:
                for tensor in order.given:
                    tensor.record_stream(self.caller)
                for tensor in order.kept if async_finish else ():  # else the caller's stream is behind the work already
                    tensor.record_stream(self.stream)


def _behind(stream: torch.cuda.Stream, other: torch.cuda.Stream, event: torch.cuda.Event | None) -> None:
    """What `stream` is given from now on comes behind all that `other` has been given. An event may be recorded again at once, for a wait
    is for what it stood for then; in a graph each has its own."""
    event = torch.cuda.Event() if event is None else event
    event.record(other)
    stream.wait_event(event)


def _joined(stream: torch.cuda.Stream) -> bool:
    """Whether the stream records a graph too."""
    with torch.cuda.stream(stream):
        return CommStream.capturing()
