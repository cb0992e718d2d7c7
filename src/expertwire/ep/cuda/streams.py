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
        caller's stream uses of them, and what the block uses of the caller's, is said to the allocator. While a graph is recorded it would
        hold such memory back until the end, so the event keeps the tensors instead: in a replay all is ordered by the graph.
        """
        with torch.cuda.device(self.device):
            self.caller = torch.cuda.current_stream(self.device)
            recording = self.capturing()
            if previous_event is not None and previous_event.event is not None and previous_event.event.event is not None:
                self.stream.wait_event(previous_event.event.event)
                if recording and not _joined(self.stream):
                    self.stream.wait_stream(self.caller)
            else:
                self.stream.wait_stream(self.caller)
            order = Order()
            try:
                with torch.cuda.stream(self.stream):
                    yield order
            except BaseException:
                self.caller.wait_stream(self.stream)  # a capture that the caller ends needs all streams joined
                raise
            if not async_finish:
                self.caller.wait_stream(self.stream)
            else:
                done = torch.cuda.Event()
                done.record(self.stream)
                order.event = EventOverlap(EventHandle(done), order.kept if recording else None)
            if not recording:
                for tensor in order.kept:
                    tensor.record_stream(self.stream)
                    tensor.record_stream(self.caller)


def _joined(stream: torch.cuda.Stream) -> bool:
    """Whether the stream records a graph too."""
    with torch.cuda.stream(stream):
        return CommStream.capturing()
