"""Shows how far the ranks have come: a bar on a terminal that is wide enough, one line per stage elsewhere.

On stderr, so that stdout stays a table.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

BAR_COLUMNS = 84  # of a terminal: below it bars would be cut, or wrap at every step


class RankProgress:
    """`update(rank, what, done, total)` is what `launch` calls. A stage stands where its slowest rank does."""

    def __init__(self, ranks: int) -> None:
        console = Console(file=sys.stderr)
        self._plain = not console.is_terminal or console.width < BAR_COLUMNS
        self._bar = Progress(
            TextColumn("{task.description:>32}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
            console=console, disable=self._plain,
        )  # fmt: skip
        self._ranks = ranks
        self._done: dict[str, list[int]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._begin = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, rank: int, what: str, done: int, total: int) -> None:
        """Note that `rank` has done so many steps of the stage `what`."""
        if what not in self._tasks:
            self._done[what] = [0] * self._ranks
            self._tasks[what] = self._bar.add_task(what, total=total)
        before = min(self._done[what])
        self._done[what][rank] = done
        now = min(self._done[what])
        self._bar.update(self._tasks[what], completed=now)
        if self._plain and now == total and before < total:
            self.say(what)

    def stage(self, what: str, done: int = 0, total: int = 1) -> None:
        """The same for what the parent itself does."""
        for rank in range(self._ranks):
            self.update(rank, what, done, total)

    def say(self, what: str) -> None:
        """One line, with the seconds since the start."""
        with contextlib.suppress(OSError):  # nobody reads it: what is measured does not end for that
            print(f"[{time.monotonic() - self._begin:5.1f} s] {what}", file=sys.stderr, flush=True)


def memory_bytes() -> int:
    """What this process takes of the machine's memory now: its proportional set size, in which pages shared by n processes count 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
