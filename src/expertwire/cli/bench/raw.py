"""The raw ceiling as the benches drive it: one side of a pair of `_raw_loop` processes (csrc/raw/raw_loop.cpp)."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from expertwire.errors import TransferError, UnavailableError

STOP_S = 5.0


@dataclass(frozen=True)
class RawSample:
    """What one side sent: writes that completed, posts that the provider took and refused, reads of the queue, seconds."""

    operations: int
    posts: int
    polls: int
    again: int
    seconds: float


def raw_loop_path() -> Path:
    """The built executable. Raises `UnavailableError` where it was not built."""
    path = Path(str(resources.files("expertwire").joinpath("_raw_loop")))
    if not path.exists():
        raise UnavailableError(f"the raw loop is missing: {path} does not exist; build the package anew")
    return path


class RawSide:
    """One process of the pair. `bytes_max` is how much it can send from, and as much is received into; a context manager."""

    def __init__(self, library: str, provider: str, source_address: str, bytes_max: int) -> None:
        command = [str(raw_loop_path()), library, provider, source_address, str(bytes_max)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        try:
            self.address = self._words("address")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def connect(self, address: list[str]) -> None:
        """Make the other side, which has that `address`, reachable."""
        self._say("peer", *address)
        self._words("ready")

    def fill(self, nbytes: int, seed: int) -> None:
        """Give the first `nbytes` to send the bytes of `seed`, and zero as many of those received."""
        self._say("fill", nbytes, seed)
        self._words("filled")

    def wrong_words(self, nbytes: int, seed: int) -> int:
        """How many 8-byte words of the first `nbytes` received are not those of `seed`."""
        self._say("check", nbytes, seed)
        return int(self._words("checked")[0])

    def start(self, nbytes: int, window: int, slots: int, milliseconds: int) -> None:
        """Begin to send writes of `nbytes`, `window` in flight, from and to `slots` places in turn; `sent()` waits for the end."""
        self._say("run", nbytes, window, slots, milliseconds)
        self._words("started")

    def serve(self) -> None:
        """Begin to make progress for the other side only."""
        self._say("serve")
        self._words("started")

    def sent(self) -> RawSample:
        """What was sent. The process goes on serving until `stop()`."""
        operations, posts, polls, again, nanoseconds = map(int, self._words("sent"))
        return RawSample(operations, posts, polls, again, nanoseconds / 1e9)

    def stop(self) -> int:
        """End the service; how often it read the queue meanwhile."""
        self._say("")
        return int(self._words("served")[0])

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _say(self, *words: object) -> None:
        assert self._process.stdin is not None
        try:
            print(*words, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return  # it has said why: whoever reads the answer finds it

    def _words(self, expected: str) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(expected):
            raise TransferError(f"the raw loop was to say {expected!r} and said {line.strip() or 'nothing: it has ended'!r}")
        return line.split()[1:]
