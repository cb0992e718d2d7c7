"""What the proxy says of itself: one JSON object a line. No prompt, no header but the request id, no upstream's answer.

Lines are written by a thread of their own: whoever reads them slowly may not hold up the loop. Too many of them are dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

LEVELS: Final = ("debug", "info", "warning", "error")
PIPE_BUF: Final = 4096
WAITING_MAX: Final = 256  # batches that were not written yet


class Log:
    """Collects lines; `flush` hands them to the thread. Not to be shared between loops."""

    def __init__(self, write: Callable[[bytes], object], level: str, worker: int = 0) -> None:
        """`write` may block. `level`: one of LEVELS; what is below is not collected."""
        self._write = write
        self._least = LEVELS.index(level)
        self._worker = worker
        self._lines: list[bytes] = []
        self._batches: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def takes(self, level: str) -> bool:
        """Whether lines of that level are written."""
        return LEVELS.index(level) >= self._least

    def event(self, level: str, event: str, **fields: Any) -> None:
        """One line. Values are what JSON has."""
        if LEVELS.index(level) < self._least:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": level, "event": event, "worker": self._worker, **fields}
        self._lines.append(orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE))

    def records(self, level: str, event: str, records: Sequence[object]) -> None:
        """A line for each of these dataclasses, all of one time: a dict made of each would cost ten times as much."""
        if not records or LEVELS.index(level) < self._least:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = orjson.dumps({"time": now, "level": level, "event": event, "worker": self._worker})[:-1] + b","
        self._lines += [b"%b%b\n" % (head, orjson.dumps(record)[1:]) for record in records]

    def flush(self) -> None:
        """Hand over what has been collected."""
        if self._batches.qsize() >= WAITING_MAX:
            self._dropped += len(self._lines)
            self._lines.clear()
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self.event("warning", "log_lines_dropped", count=dropped)
        if not self._lines:
            return
        batch = b"".join(self._lines)
        self._lines.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()
        self._batches.put(batch)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is there, as far as the time allows."""
        self.flush()
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                for piece in _pieces(batch):
                    self._write(piece)
            except OSError:
                time.sleep(0.1)  # the disk is full, or nobody reads any more; the proxy goes on


def _pieces(batch: bytes) -> Iterator[bytes]:
    """Whole lines, where they fit into what pipe(7) writes as one: several workers may share the pipe."""
    at = 0
    while len(batch) - at > PIPE_BUF:
        end = batch.rfind(b"\n", at, at + PIPE_BUF) + 1 or batch.index(b"\n", at) + 1
        yield batch[at:end]
        at = end
    if at < len(batch):
        yield batch[at:]
