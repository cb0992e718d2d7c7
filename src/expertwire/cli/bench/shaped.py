"""A network namespace of this process alone, whose loopback has a limited rate; and what the loopback has carried."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

from expertwire.cli.interfaces import sent_by
from expertwire.errors import InvalidArgumentError, UnavailableError

CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000  # sched.h
BURST, LATENCY = "256kb", "50ms"
COMMAND_S = 20


def check_rate(rate: str) -> None:
    """Raises `InvalidArgumentError` where `rate` is none of tc's."""
    if not re.fullmatch(r"\d+(\.\d+)?(k|m|g|t)?bit", rate):
        raise InvalidArgumentError(f"--shape is {rate!r}; give a rate as tc takes it, such as 2gbit or 500mbit")


def enter_shaped(rate: str) -> None:
    """Move this process, and whatever it starts from now on, into a namespace whose loopback passes `rate` (tc's word: "2gbit").

    Raises `InvalidArgumentError` (no such rate), `UnavailableError` where the right, `ip`, `tc` or the kernel's queue is missing.
    """
    check_rate(rate)
    _unshare()
    _do("ip", "link", "set", "lo", "up")
    _do("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)


def _unshare() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(CLONE_NEWNET) == 0:
        return
    user, group = os.getuid(), os.getgid()
    if library.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:  # whoever is not root may be root in a user namespace
        why = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"--shape needs a network namespace and unshare() says {why}: run as root, or allow user namespaces")
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")
    except OSError as error:
        raise UnavailableError(f"--shape needs a user namespace, whose map cannot be written: {error}; run as root") from None


def _do(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError:
        raise UnavailableError(f"--shape needs `{words[0]}`, which is not installed (apt install iproute2)") from None
    if done.returncode != 0:
        raise UnavailableError(f"--shape: `{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")


def loopback_bytes() -> int:
    """What the loopback of this process's namespace has sent so far. /sys shows that of the namespace that mounted it; this does not."""
    return sent_by("lo").nbytes
