"""Whether a process of another rank has ended, as the kernel of this host says: certain, where silence is not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_START_FIELD = 19  # of /proc/<pid>/stat behind the name in parentheses, proc_pid_stat(5): starttime is field 22


@dataclass(frozen=True)
class Process:
    """Names a process of a host for ever: its pid may be given to another one, which began later."""

    boot: str
    namespace: int  # of pids; 0: unknown
    pid: int
    started: int  # in clock ticks since boot; 0: unknown


def own_process(boot: str) -> Process:
    """The calling one. `boot`: of this kernel."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return Process(boot, namespace, os.getpid(), _stat(os.getpid())[1])


def has_ended(process: Process, own: Process) -> bool:
    """True only where it is certain: the process is of this host and of our pid namespace, and is gone or a zombie."""
    if not process.boot or process.boot != own.boot or not process.namespace or process.namespace != own.namespace or not process.started:
        return False
    state, started = _stat(process.pid)
    if not started:
        return not _exists(process.pid)
    return started != process.started or state in "ZX"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _stat(pid: int) -> tuple[str, int]:
    """State and start time; ("", 0) where there is no such process, or nothing may be read of it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    fields = text[text.rfind(")") + 2 :].split()
    return fields[0], int(fields[_START_FIELD])
