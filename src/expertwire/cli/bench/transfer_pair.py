"""Starts the two processes of a pair, fresh, in a fresh directory, and says how both ended. Both are this command with `--role`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertwire.cli.bench.transfer_engines import ENGINES
from expertwire.cli.bench.transfer_plan import Settings
from expertwire.cli.report import Exit

ROLES = ("target", "source")
BLAME_GRACE_S = 5.0  # after one side has failed, for the other to say why
STOP_GRACE_S = 10.0
TAIL_LINES = 12


@dataclass(frozen=True)
class Ended:
    """How a pair ended: exit status by role, the source's rows, and the last words of whoever failed."""

    statuses: dict[str, int]
    rows: list[dict[str, Any]]
    why: str

    @property
    def clean_exits(self) -> int:
        """Of the two processes."""
        return sum(status == Exit.OK for status in self.statuses.values())

    @property
    def skipped(self) -> bool:
        """Whether the engine turned out not to run here."""
        return Exit.SKIPPED in self.statuses.values()


def command(settings: Settings, role: str, where: str, run: int) -> list[str]:
    """The command line of one process. Its environment is ours and what the engine's arm needs."""
    numbers = {"--bytes": settings.sizes, "--bulk-bytes": settings.bulk_sizes, "--op": settings.operations, "--peer": settings.peers}
    lists = [word for option, values in numbers.items() for word in (option, ",".join(map(str, values)))]
    given = {
        "--engine": settings.engine,
        "--provider": settings.provider,
        "--lanes": settings.lanes,
        "--warmup": settings.warmup,
        "--iterations": settings.iterations,
        "--seed": settings.seed,
        "--role": role,
        "--meet": where,
        "--run": run,
    }
    words = [word for option, value in given.items() for word in (option, str(value))]
    environment = ENGINES[settings.engine].environment(settings.provider)
    out = ["--json", str(Path(where) / "source.json")] if role == "source" else []
    return ["env", *environment, sys.executable, "-m", "expertwire.cli", "bench", "transfer", *lists, *words, *out]


def run_pair(settings: Settings, run: int, limit_s: float) -> Ended:
    """Start, wait for both, collect. Never leaves a process behind."""
    with tempfile.TemporaryDirectory(prefix="expertwire-") as where:
        logs = {role: Path(where) / f"{role}.log" for role in ROLES}
        with started(settings, where, run, logs) as processes:
            _wait(processes, limit_s)
        statuses = {role: process.returncode for role, process in processes.items()}
        rows: list[dict[str, Any]] = []
        out = Path(where) / "source.json"
        if out.exists():
            rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        failed = [role for role, status in statuses.items() if status != Exit.OK]
        return Ended(statuses, rows, "; ".join(f"{role} ended with {statuses[role]}: {tail(logs[role])}" for role in failed))


@contextmanager
def started(settings: Settings, where: str, run: int, logs: dict[str, Path]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Both processes, in our session, so that they have the priority that it has; ended at the end, whatever happens."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for role in ROLES:
            with logs[role].open("wb") as log:
                words = command(settings, role, where, run)
                processes[role] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        yield processes
    finally:
        for process in processes.values():
            _end(process)


def tail(log: Path) -> str:
    """The last lines, as one."""
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def _wait(processes: dict[str, subprocess.Popen[bytes]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        running = [process for process in processes.values() if process.poll() is None]
        if not running:
            return
        if any(process.returncode for process in processes.values() if process not in running):
            deadline = min(deadline, time.monotonic() + BLAME_GRACE_S)
        try:
            running[0].wait(0.05)
        except subprocess.TimeoutExpired:
            continue


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
