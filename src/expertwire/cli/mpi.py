"""Starts the ranks of one job under `mpiexec`, so that they can talk MPI beside everything else that a rank of `launch` can.

A rank is `python -m expertwire.cli.mpi DIRECTORY`: it finds its job and a socket there, and from then on is what `launch` forks. With
MPICH, ranks are divided into "nodes" as ours are, so that rows between them cross the wire there too (MPIR_CVAR_NUM_CLIQUES: ranks of
different cliques do not share memory; MPIR_CVAR_CLIQUES_BY_BLOCK: consecutive ranks make one).
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from expertwire.cli.launch import STOP_GRACE_S, Job, collect, serve
from expertwire.errors import DeadlineError, UnavailableError

Result = TypeVar("Result")
START_S = 60.0  # for all ranks to import and to connect
LOOK_S = 0.2  # how often the launcher looks whether mpiexec still runs while it waits for ranks
SOCKET, JOB = "socket", "job"
OUTPUT_KEPT = 2000  # characters of what mpiexec said


def missing() -> str:
    """What is missing for `launch_mpi`; empty where nothing is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py cannot be imported: pip install mpi4py mpich"
    return "" if mpiexec() else "there is no mpiexec, neither beside this Python nor on the PATH: pip install mpich"


def mpiexec() -> str | None:
    """The one beside this Python, which belongs to its mpi4py, or the first on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


class _Mpiexec:
    """The process of mpiexec, which stands for each of its ranks: it ends when one of them fails."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            # In a session of its own: Ctrl-C is the launcher's affair.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def end(self, grace_s: float) -> None:
        """It is given time to leave by itself, then asked, which ends its ranks, then killed; ranks end when their launcher hangs up."""
        for ask in (None, signal.SIGTERM, signal.SIGKILL):
            if ask is not None and self.exitcode is None:
                self._process.send_signal(ask)
            self.join(grace_s if ask is None else STOP_GRACE_S)

    def said(self) -> str:
        """The end of what it and its ranks have written."""
        return self._output.read_text(encoding="utf-8", errors="replace").strip()[-OUTPUT_KEPT:]


def launch_mpi(
    target: Callable[..., Result],
    arguments: tuple[Any, ...],
    node_of: Sequence[int],
    *,
    on_progress: Callable[[int, str, int, int], None] | None = None,
    timeout_s: float = 600.0,
) -> list[Result]:
    """`launch` of a rank for each entry of `node_of`, each a rank of MPI's world too, which has the same number there.

    Raises as `launch` does, and `UnavailableError` where there is no MPI, or its ranks do not start.
    """
    program = mpiexec()
    if missing() or program is None:
        raise UnavailableError(missing())
    with tempfile.TemporaryDirectory(prefix="expertwire-") as directory, ExitStack() as stack:
        folder = Path(directory)
        jobs = [Job(target, arguments, rank, len(node_of), str(folder / "store"), timeout_s) for rank in range(len(node_of))]
        (folder / JOB).write_bytes(pickle.dumps((list(sys.path), pickle.dumps(jobs))))  # the jobs need the path
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / SOCKET))
        listener.listen(len(node_of))
        nodes = len(set(node_of))
        variables = {"MPIR_CVAR_CH4_NETMOD": "ofi"}  # of MPICH's two the faster one over tcp (benchmarks/README.md)
        if nodes > 1:
            variables |= {"MPIR_CVAR_NUM_CLIQUES": str(nodes), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}
        given = [word for name, value in variables.items() for word in ("-genv", name, value)]
        command = [program, "-n", str(len(node_of)), *given, sys.executable, "-m", "expertwire.cli.mpi", directory]
        running = _Mpiexec(command, folder / "output")
        grace_s = 0.0
        try:
            connections = _accept(listener, running, len(node_of))
            for connection in connections:
                stack.callback(connection.close)
            results: list[Result] = collect([running] * len(node_of), connections, on_progress, timeout_s)
            grace_s = STOP_GRACE_S
            return results
        finally:
            running.end(grace_s)


def _accept(listener: socket.socket, running: _Mpiexec, ranks: int) -> list[Connection]:
    """A connection to each rank, by rank."""
    found: dict[int, Connection] = {}
    deadline = time.monotonic() + START_S
    listener.settimeout(LOOK_S)
    while len(found) < ranks:
        if running.exitcode is not None:
            raise UnavailableError(f"mpiexec ended with status {running.exitcode} before all {ranks} ranks had started: {running.said()}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"{len(found)} of {ranks} ranks have started under mpiexec within {START_S:.0f} s: {running.said()}")
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            continue
        accepted.settimeout(None)
        connection = Connection(accepted.detach())
        found[connection.recv()] = connection
    return [found[rank] for rank in range(ranks)]


def node_map() -> list[int]:
    """For each rank of MPI's world the first one that it shares memory with there: equal numbers mean one node. Collective."""
    from mpi4py import MPI

    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    first: int = here.allreduce(MPI.COMM_WORLD.rank, MPI.MIN)
    here.Free()
    found: list[int] = MPI.COMM_WORLD.allgather(first)
    return found


def main(directory: str) -> int:
    """A rank's whole life."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # what it is used from, and the least that it can pay for locks
    from mpi4py import MPI

    folder = Path(directory)
    sys.path[:], jobs = pickle.loads((folder / JOB).read_bytes())
    job: Job = pickle.loads(jobs)[MPI.COMM_WORLD.rank]
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(folder / SOCKET))
        connection = Connection(caller.detach())
    connection.send(job.rank)

    def follow_launcher() -> None:
        connection.poll(None)  # it never sends: readable means that it has gone
        os._exit(1)

    follower = threading.Thread(target=follow_launcher, name="follow launcher", daemon=True)
    follower.start()
    if not serve(job, connection):
        follower.join()  # mpiexec ends every rank when one leaves: the launcher shall have heard them all before
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
