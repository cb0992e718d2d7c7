"""A second process for the provider tests: a target that progresses all the time and does what its pipe says.

Region 0 is data, region 1 holds words. Both sides have the same two, and each side knows the other as peer 0, with the other's regions
under the same numbers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from expertwire import _native

DATA, WORDS = 0, 1
DATA_BYTES, WORD_BYTES = 4 << 20, 4096
DEADLINE_S = 20.0


class Side:
    """One provider with its two regions."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.probe = _native.ProviderProbe(kind, options)
        self.data = self.probe.create_region(DATA, DATA_BYTES)
        self.words = self.probe.create_region(WORDS, WORD_BYTES)

    def blob(self) -> tuple[bytes, bytes, bytes]:
        return self.probe.address(), self.probe.region_key(DATA), self.probe.region_key(WORDS)

    def connect(self, blob: tuple[bytes, bytes, bytes]) -> None:
        self.probe.add_peer(0, blob[0])
        for region in (DATA, WORDS):
            self.probe.add_remote_region(0, region, blob[1 + region])

    def store(self, offset: int, payload: bytes, region: int = DATA) -> None:
        ctypes.memmove((self.data if region == DATA else self.words) + offset, payload, len(payload))

    def load(self, offset: int, length: int, region: int = DATA) -> bytes:
        return ctypes.string_at((self.data if region == DATA else self.words) + offset, length)

    def word(self, offset: int) -> int:
        return int.from_bytes(self.load(offset, 8, WORDS), "little")


def serve(kind: str, options: dict[str, Any], pipe: Connection) -> None:
    side = Side(kind, options)
    pipe.send(side.blob())
    side.connect(pipe.recv())
    pipe.send("connected")
    arrivals: list[tuple[int, bytes]] = []
    while True:
        arrivals += side.probe.poll()[1]
        if not pipe.poll(0):
            side.probe.sleep(1)
            continue
        command, *arguments = pipe.recv()
        if command == "end":
            pipe.send(side.probe.close())
            return
        pipe.send(_answer(side, arrivals, command, arguments))


def _answer(side: Side, arrivals: list[tuple[int, bytes]], command: str, arguments: list[Any]) -> Any:
    match command:
        case "load":
            return side.load(*arguments)
        case "store":
            return side.store(*arguments)
        case "word":
            return side.word(*arguments)
        case "arrivals":
            taken, arrivals[:] = list(arrivals), []
            return taken
        case "deregister":
            return _deregister(side, arrivals, *arguments)
        case "remove_peer":
            return side.probe.remove_peer(0)
        case "counters":
            return side.probe.counters()
        case "silent":  # progresses nothing for as many seconds
            return time.sleep(*arguments)
    raise ValueError(command)


def _deregister(side: Side, arrivals: list[tuple[int, bytes]], region: int) -> int:
    """Polls until no peer can be writing any more; how often it had to."""
    polls = 0
    end = time.monotonic() + DEADLINE_S
    while not side.probe.deregister_region(region):
        assert time.monotonic() < end, "the peer does not answer the revocation"
        arrivals += side.probe.poll()[1]
        polls += 1
    return polls


class Pair:
    """This process's side, and the other process."""

    def __init__(self, kind: str, options: dict[str, Any], peer_options: dict[str, Any] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(kind, peer_options or options, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.side = Side(kind, options)
        self.probe = self.side.probe
        self.side.connect(self._answer())
        self.pipe.send(self.side.blob())
        assert self._answer() == "connected"

    def _answer(self) -> Any:
        """Waits for the other process while progressing our own side."""
        end = time.monotonic() + DEADLINE_S
        while not self.pipe.poll(0.001):
            self.probe.poll()
            assert time.monotonic() < end, "the other process does not answer"
        return self.pipe.recv()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self._answer()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def post(self, kind: str, slot: int = 0, **arguments: Any) -> tuple[str, str, int]:
        return self.probe.post(kind, slot, 0, **arguments)

    def collect(self, count: int, seconds: float = DEADLINE_S) -> list[tuple[int, int, str, int]]:
        """Polls until `count` completions are there; fewer when the time is over."""
        found: list[tuple[int, int, str, int]] = []
        end = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < end:
            found += self.probe.poll()[0]
        return found

    def run(self, kind: str, slot: int = 0, **arguments: Any) -> str:
        """Posts one operation, again while it says AGAIN, and gives its final status."""
        end = time.monotonic() + DEADLINE_S
        while True:
            outcome, status, _ = self.post(kind, slot, **arguments)
            if outcome == "failed":
                return status
            if outcome == "posted":
                break
            self.probe.poll()
            assert time.monotonic() < end, "AGAIN for too long"
        completions = self.collect(1)
        assert completions and completions[0][0] == slot, completions
        return completions[0][2]

    def close(self) -> None:
        self.probe.close()
        if self.process.is_alive():
            try:
                self.pipe.send(("end",))
                self.process.join(DEADLINE_S)
            except (BrokenPipeError, OSError):
                pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def pair(kind: str, options: dict[str, Any], peer_options: dict[str, Any] | None = None) -> Iterator[Pair]:
    both = Pair(kind, options, peer_options)
    try:
        yield both
    finally:
        both.close()


def site_library() -> str:
    """The libfabric of the `mpich` wheel in this environment, or ""."""
    path = os.path.join(sys.prefix, "lib", "mpich", "libfabric.so.1")
    return path if os.path.exists(path) else ""
