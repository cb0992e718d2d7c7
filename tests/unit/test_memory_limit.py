"""What is left of the machine's memory, read beside torch: its C++ runtime must not change what a number is."""

from __future__ import annotations

from pathlib import Path

import torch

from expertwire.fabric.native import memory_available


def _field(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == key), 0)


def _left_of_groups() -> int | None:
    """The least that any group of this process with a limit has left; None where none has one."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup") if controllers == "" else Path("/sys/fs/cgroup/memory")
        names = ("memory.max", "memory.current") if controllers == "" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = root / path.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            limit, used = folder / names[0], folder / names[1]
            if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
                continue
            cached = _field(folder / "memory.stat", "inactive_file") + _field(folder / "memory.stat", "active_file")
            left.append(max(0, int(limit.read_text()) - max(0, int(used.read_text()) - cached)))
    return min(left, default=None)


def test_no_limit_is_no_limit_of_zero() -> None:
    assert torch.zeros(1).sum() == 0  # torch is loaded
    available, source = memory_available()
    free = _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    groups = _left_of_groups()
    expected = free if groups is None else min(free, groups)
    assert abs(available - expected) <= max(1 << 30, expected // 4), f"{source}: other processes take and give meanwhile"
    if groups is None or abs(groups - free) >= 1 << 30:  # else either may be the less by now
        assert ("cgroup" in source) == (groups is not None and groups < free), source
