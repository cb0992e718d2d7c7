"""Real processes for tests: one world of ranks, kept for the whole session and shared by tests.

Ranks are forked from a server that has torch loaded. They find each other over a file store in a temporary directory: no port. A rank ends
when this process does, however it does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from expertwire.cli.launch import start_server
from leftovers import forget_what_was_imported, of_the_core

WORLD_SIZE = 12
# Beside torch: what ranks of tests and of commands import.
PRELOADED = (
    "pytest",
    "numpy",
    "expertwire.ep.buffer",
    "expertwire.compat.nixl",
    "expertwire.fabric.endpoint",
    "expertwire.cli.bench.arms",
    "expertwire.cli.bench.paired",
)
AFTER_FAILURE_S = 5.0  # how long the other ranks are given once one has failed
END_S = 5.0


def server() -> Any:
    """The context of the one server that the ranks of all tests are forked from, and of what they launch.

    A process has one, which stays as whoever starts it wants it: without torch each rank of each later test would import that, 2 to 3 s of
    a core. (Fabric tests that came first had it so: 500 s in a run of the suite.)
    """
    start_server(*PRELOADED)
    return multiprocessing.get_context("forkserver")


@dataclass
class Rank:
    """What a function that runs on a rank is given."""

    rank: int
    size: int
    group: Any = None  # torch.distributed group of the first `size` ranks
    groups: dict[int, Any] = field(default_factory=dict, repr=False)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)  # what functions keep between runs, such as Buffers

    def buffer(self, node_of: Sequence[int], **options: Any) -> Any:
        """A Buffer over the group, made once for each (size, node table, options)."""
        from expertwire.ep import Buffer

        key = ("buffer", self.size, tuple(node_of), tuple(sorted(options.items())))
        if key not in self.kept:
            given = {"num_nvl_bytes": 32 << 20, "timeout_ms": 30_000, **options}
            self.kept[key] = Buffer(self.group, node_of=list(node_of), **given)
        return self.kept[key]


def forget_buffers(rank: Rank) -> None:
    """Destroy what `Rank.buffer` made on this rank, in the order of making, which is the same on all ranks that share a Buffer.

    Nothing of them may be left, beside what functions keep for themselves.
    """
    for key in [key for key in rank.kept if isinstance(key, tuple) and key[0] == "buffer"]:
        rank.kept.pop(key).destroy()
    if not rank.kept:
        more = of_the_core()
        assert not more, f"rank {rank.rank} left behind: {dict(more)}"


def stop(pid: int) -> None:
    """SIGSTOP; when this returns none of its threads runs. kill(2) returns before: one on another core may still do what it is about to."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + END_S
    while not all(entry.read_text().rpartition(")")[2].split()[0] == "T" for entry in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} has not stopped in {END_S} s"
        time.sleep(0.001)


class RanksFailedError(AssertionError):
    """At least one rank raised, died or hung; the message has the tracebacks."""


class World:
    """Processes in which functions run as ranks. A function must be importable by name there: keep it in a module beside the tests."""

    def __init__(self, size: int = WORLD_SIZE) -> None:
        self.size = size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0) -> list[Any]:
        """`function(Rank, *arguments)` on the first `ranks` ranks; what they return, by rank. Raises `RanksFailedError`."""
        self.start(ranks, function, *arguments)
        answers = self._collect(timeout_s)
        failed = [f"--- rank {rank}: {what}" for rank, (good, what) in sorted(answers.items()) if not good]
        if failed:
            self.close()
            raise RanksFailedError("\n".join([f"{len(failed)} of {ranks} ranks failed", *failed]))
        return [answers[rank][1] for rank in range(ranks)]

    def forget(self) -> None:
        """Give back the memory of the kept Buffers: a session's worth of them on twelve ranks is more than a small machine has."""
        if self._processes:
            self.run(self.size, forget_buffers)

    def close(self) -> None:
        """End every process, whatever it is doing."""
        for connection in self._connections:
            connection.close()  # a rank that waits for work leaves by itself
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def start(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a run that `finish` collects."""
        self._open()
        for rank, connection in enumerate(self._connections):
            connection.send((ranks, function if rank < ranks else None, arguments))

    def finish(self, timeout_s: float = 60.0, without: Sequence[int] = ()) -> dict[int, tuple[bool, Any]]:
        """(whether it returned, result or traceback) of each rank but those. A rank that fails does not end the others' time."""
        return self._collect(timeout_s, timeout_s, without)

    def wake(self, rank: int) -> None:
        """SIGCONT to a rank that has stopped."""
        os.kill(self._processes[rank].pid, signal.SIGCONT)

    def exit_codes(self) -> list[int | None]:
        """Tell all ranks to leave, and how each did, by rank."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._processes]

    def _open(self) -> None:
        if self._processes:
            return
        context = server()
        self._directory = tempfile.TemporaryDirectory(prefix="expertwire-tests-")
        store = str(Path(self._directory.name) / "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, self.size, store, theirs), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(
        self, timeout_s: float, after_failure_s: float = AFTER_FAILURE_S, without: Sequence[int] = ()
    ) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in without}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    answers[rank] = (False, "has not answered in time")
                return answers
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(END_S)
                    answers[rank] = (False, f"ended with exit code {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + after_failure_s)
        return answers


def _rank_main(rank: int, size: int, store: str, connection: Connection) -> None:
    # The server of all ranks may have been started by a test of the launcher, which blocks Ctrl-C in it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, name="follow parent", daemon=True).start()
    import torch
    import torch.distributed as dist

    forget_what_was_imported()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups: dict[int, Any] = {size: dist.group.WORLD}
    kept: dict[Any, Any] = {}
    while True:
        try:
            ranks, function, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            break
        try:
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(range(ranks)))  # collective over the world
            answer = None
            if function is not None:
                answer = function(Rank(rank, ranks, groups[ranks], groups, kept), *arguments)
            connection.send((True, answer))
        except BaseException:
            connection.send((False, traceback.format_exc()))
