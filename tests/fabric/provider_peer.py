"""A second process for the provider tests: a target that progresses all the time and does what its pipe says.

Region 0 is data, region 1 holds words. Both sides have the same two, and each side knows the other as peer 0, with the other's regions
under the same numbers.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy

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


def work(pipe: Connection) -> None:
    """The second process: one side after the other, until the pipe is closed."""
    try:
        while True:
            serve(*pipe.recv(), pipe)
    except EOFError:
        return


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
        if command == "signal_later":  # answered at once; the signal leaves after some milliseconds of the other side's sleep
            pipe.send(None)
            time.sleep(arguments[0])
            end = time.monotonic() + DEADLINE_S
            while side.probe.post("signal", 0, 0, remote=WORDS, operand=1)[0] == "again" and time.monotonic() < end:
                side.probe.poll()  # where it never leaves, the other side says that nothing woke it
            continue
        pipe.send(_answer(side, arrivals, command, arguments))


@dataclass
class Worker:
    """A second process and the way to talk to it."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection


_idle: list[Worker] = []  # kept for the next pair: starting Python and loading libfabric takes longer than most tests


def _worker() -> Worker:
    while _idle:
        worker = _idle.pop()
        if worker.process.is_alive():
            return worker
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


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
        case "register":  # again under the same number; gives the new key
            address = side.probe.create_region(*arguments)
            side.data = address if arguments[0] == DATA else side.data
            return side.probe.region_key(arguments[0])
        case "await_word":  # until the word is there, then what the data looked like at that moment
            offset, value, length = arguments
            end = time.monotonic() + DEADLINE_S
            while side.word(offset) < value and time.monotonic() < end:
                arrivals += side.probe.poll()[1]
            return side.load(0, length)
        case "write_on":  # until killed
            while True:
                side.probe.post("write", 0, 0, local=DATA, remote=DATA, bytes=DATA_BYTES)
                side.probe.poll()
        case "watch_stamps":
            return _watch_stamps(side, *arguments)
        case "counters":
            return side.probe.counters()
        case "post":  # what the post said; the other side need not look meanwhile
            kind, slot, more = arguments
            return side.probe.post(kind, slot, 0, **more)[0]
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


def _watch_stamps(side: Side, offset: int, length: int, start: int, rounds: int) -> tuple[int, int]:
    """(signals looked at, signals that were here before their payload).

    Round n's payload is 64-bit words of at least n. Nothing lands here but inside poll(), so what is seen after it is exact.
    """
    stamps = numpy.frombuffer((ctypes.c_char * length).from_address(side.data), dtype=numpy.uint64)
    seen, looked, early = start, 0, 0
    end = time.monotonic() + DEADLINE_S
    while seen < start + rounds:
        side.probe.poll()
        now = side.word(offset)
        if now == seen:
            assert time.monotonic() < end, f"signal {seen + 1} of {start + rounds} has not come"
            side.probe.sleep(1)  # the other side may need this core
            continue
        seen, end = now, time.monotonic() + DEADLINE_S
        looked += 1
        early += int(stamps.min()) < seen
    return looked, early


def remove_shared_files(pid: int) -> None:
    """What libfabric's shm leaves in /dev/shm when a process goes without closing it: files named PID:UID:number (fi_shm(7))."""
    for left in Path("/dev/shm").glob(f"{pid}:*"):
        left.unlink(missing_ok=True)


def claim_place(pid: int) -> bool:
    """A place in the command queue of that process's shm, as by a writer that was killed before it filled it. False: not a layout we know.

    prov/shm/src/smr_util.h (version 10, libfabric 2.5): byte 0 is the version, bytes 128 to 135 say where the queue is, which begins
    with the number of the next place.
    """
    (path,) = Path("/dev/shm").glob(f"{pid}:*")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as region:
        if region[0] != 10:
            return False
        (queue,) = struct.unpack_from("<Q", region, 128)
        struct.pack_into("<q", region, queue, struct.unpack_from("<q", region, queue)[0] + 1)
    return True


class Pair:
    """This process's side, and the other process."""

    def __init__(self, kind: str, options: dict[str, Any], peer_options: dict[str, Any] | None = None) -> None:
        self.worker = _worker()
        self.process, self.pipe = self.worker.process, self.worker.pipe
        self.pipe.send((kind, peer_options or options))
        self.side = Side(kind, options)
        self.probe = self.side.probe
        self.peer_blob: tuple[bytes, bytes, bytes] = self._answer()
        self.side.connect(self.peer_blob)
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

    def ask_without_looking(self, *command: Any) -> Any:
        """Our own side progresses nothing meanwhile."""
        self.pipe.send(command)
        assert self.pipe.poll(DEADLINE_S), "the other process does not answer"
        return self.pipe.recv()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Stops the other process; when this returns it does nothing more."""
        self.send_signal(signal.SIGSTOP)
        assert self.process.pid is not None
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        self.process.join(DEADLINE_S)
        assert self.process.pid is not None
        remove_shared_files(self.process.pid)

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
        assert [entry[0] for entry in completions] == [slot]
        return completions[0][2]

    def close(self) -> None:
        """Ends both sides; the process is kept where it is well."""
        self.probe.close()
        try:
            self.pipe.send(("end",))
            while self.pipe.poll(DEADLINE_S):  # answers of a test that failed in the middle, then that of "end"
                if isinstance(self.pipe.recv(), float):
                    _idle.append(self.worker)
                    return
        except (BrokenPipeError, EOFError, OSError):
            pass
        self.process.kill()
        self._reap()


@contextmanager
def pair(kind: str, options: dict[str, Any], peer_options: dict[str, Any] | None = None) -> Iterator[Pair]:
    both = Pair(kind, options, peer_options)
    try:
        yield both
    finally:
        both.close()
