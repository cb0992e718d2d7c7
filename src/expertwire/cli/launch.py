"""Starts the ranks of one job on this machine, collects what they return, and never leaves a process behind.

Ranks are forked from a server that has torch loaded already (a spawn would import it once per rank). They find each other over a file
store in a temporary directory: no port, no environment. Ctrl-C is the launcher's affair alone: server and ranks have it blocked, and are
ended by the launcher.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from expertwire.errors import DeadlineError, ExpertwireError, InvalidArgumentError, InvalidTypeError, UnavailableError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

Result = TypeVar("Result")
STOP_GRACE_S = 3.0  # to leave by itself; and between asking a rank to end and killing it
BLAME_GRACE_S = 1.0  # after the first failure, for the rank that caused it to speak


class RankError(ExpertwireError):
    """A rank of a launched job raised, or its process ended without a result. `rank` is that rank."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Rank:
    """What a rank's function is given: who it is, and a way to say how far it has come."""

    rank: int
    size: int
    progress: Callable[[str, int, int], None]  # (what, steps done, steps in all)


@dataclass(frozen=True)
class Job:
    """What one rank is to do, and where it meets the others."""

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    size: int
    store: str
    timeout_s: float


def start_server(*modules: str) -> None:
    """Let the server that ranks are forked from load torch and `modules`, beside what the caller does until it launches.

    A server that runs already stays as it is.
    """
    forkserver.set_forkserver_preload(["torch", "torch.distributed", *modules])
    resource_tracker.ensure_running()  # it changes the signal mask, so it comes first
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_server() -> None:
    """End the server at once, where its imports would keep it for seconds after an interrupt. A later launch starts another."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # it has no public way to be ended
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def launch(
    target: Callable[..., Result],
    arguments: tuple[Any, ...],
    ranks: int,
    *,
    on_progress: Callable[[int, str, int, int], None] | None = None,
    timeout_s: float = 600.0,
) -> list[Result]:
    """Run `target(rank: Rank, *arguments)` in `ranks` processes with torch.distributed (gloo) initialised; results by rank.

    `target` must be a module-level function, its arguments and result picklable. `on_progress(rank, what, done, total)` is called here for
    every `Rank.progress` there. Raises `RankError` with the rank's own traceback when one fails, `DeadlineError` after `timeout_s`; either
    way, and on Ctrl-C, all ranks are ended first.
    """
    start_server(target.__module__)
    try:
        return _launch(target, arguments, ranks, on_progress, timeout_s)
    except KeyboardInterrupt:
        end_server()
        raise


def _launch(
    target: Callable[..., Result],
    arguments: tuple[Any, ...],
    ranks: int,
    on_progress: Callable[[int, str, int, int], None] | None,
    timeout_s: float,
) -> list[Result]:
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="expertwire-") as directory:
        store = str(Path(directory) / "store")
        jobs = [Job(target, arguments, rank, ranks, store, timeout_s) for rank in range(ranks)]
        processes, connections = _start(context, jobs)
        grace_s = 0.0
        try:
            results = collect(processes, connections, on_progress, timeout_s)
            grace_s = STOP_GRACE_S
            return results
        finally:
            _stop(processes, grace_s)
            for connection in connections:
                connection.close()


def _start(context: ForkServerContext, jobs: list[Job]) -> tuple[list[ForkServerProcess], list[Connection]]:
    processes: list[ForkServerProcess] = []
    connections: list[Connection] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(job, theirs), name=f"rank {job.rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
    except BaseException:
        _stop(processes, 0.0)
        raise
    return processes, connections


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: str  # the exception's class, or "" where the process ended without a word
    message: str
    trace: str

    @property
    def precedence(self) -> int:
        """A rank that died or has a reason of its own explains the others, who only miss it."""
        if not self.kind:
            return 0
        return 2 if self.kind in ("PeerError", "ConnectionError", "DeadlineError", "DistBackendError", "RuntimeError") else 1


class Ended(Protocol):
    """A process that is looked at when it has hung up."""

    @property
    def exitcode(self) -> int | None:
        """As `multiprocessing.Process` has it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...


def collect(
    processes: Sequence[Ended],
    connections: list[Connection],
    on_progress: Callable[[int, str, int, int], None] | None,
    timeout_s: float,
) -> list[Any]:
    """What each rank has sent over its connection: results by rank, once all have. Raises as `launch` does."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    open_ranks = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + timeout_s
    while open_ranks:
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(open_ranks), left)
        if not ready and failures:
            break
        if not ready:
            raise DeadlineError(f"ranks {sorted(open_ranks.values())} have not returned within {timeout_s:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks[connection]
            try:
                kind, *content = connection.recv()
            except EOFError:
                processes[rank].join(STOP_GRACE_S)
                kind, content = "error", ["", f"the process ended with exit code {processes[rank].exitcode} and no result", ""]
            if kind == "progress":
                if on_progress is not None:
                    on_progress(rank, *content)
                continue
            del open_ranks[connection]
            if kind == "result":
                results[rank] = pickle.loads(content[0])
            else:
                failures.append(_Failure(rank, *content))
                deadline = min(deadline, time.monotonic() + BLAME_GRACE_S)
    if failures:
        _raise(failures)
    return [results[rank] for rank in range(len(connections))]


def _raise(failures: list[_Failure]) -> NoReturn:
    first = min(failures, key=lambda failure: failure.precedence)
    same_class = {kind.__name__: kind for kind in (UnavailableError, InvalidArgumentError, InvalidTypeError)}
    if first.kind in same_class:
        raise same_class[first.kind](f"rank {first.rank}: {first.message}")
    others = "".join(f"\n  and rank {other.rank}: {other.kind}: {other.message}" for other in failures if other is not first)
    what = f"{first.kind}: {first.message}" if first.kind else first.message
    raise RankError(f"rank {first.rank} failed: {what}{others}\n{first.trace}".rstrip(), first.rank)


def _stop(processes: list[ForkServerProcess], grace_s: float) -> None:
    """End what still runs: ranks with a result are given time to leave by themselves, then comes SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(job: Job, connection: Connection) -> None:
    """A rank's whole life. It ends when its parent does, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, name="follow parent", daemon=True).start()
    if not serve(job, connection):
        os._exit(1)  # peers may be gone: no collective teardown


def serve(job: Job, connection: Connection) -> bool:
    """Do the job as one rank of a torch.distributed group, and send what comes of it. False where it failed."""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        limit = timedelta(seconds=job.timeout_s)
        dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.size, timeout=limit)
        rank = Rank(job.rank, job.size, lambda what, done, total: connection.send(("progress", what, done, total)))
        result = job.target(rank, *job.arguments)
        connection.send(("result", pickle.dumps(result)))
        dist.destroy_process_group()
    except BaseException as error:
        connection.send(("error", type(error).__name__, str(error), traceback.format_exc()))
        return False
    return True
