"""What a network interface has sent, by the kernel's own counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sent:
    """Since the interface came up."""

    nbytes: int = 0
    packets: int = 0

    def __sub__(self, before: Sent) -> Sent:
        return Sent(self.nbytes - before.nbytes, self.packets - before.packets)


def sent_by(interface: str) -> Sent:
    """Of an interface of this process's network namespace; zeros where there is none. /sys shows that of the namespace that mounted it."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()  # proc(5): eight of reception, then bytes and packets of transmission
            return Sent(int(fields[8]), int(fields[9]))
    return Sent()
