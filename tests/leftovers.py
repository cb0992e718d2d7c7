"""What a process still holds of the core's: live objects, descriptors of its kinds, mappings, threads. Taken before and after a test."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

OURS = ("/memfd:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[pidfd]")  # pipes and sockets are the harness's too
THREAD = "ew-progress"
LEFT_OVER = 70  # exit code of a rank that leaves with something open


def held() -> Counter[str]:
    """Counts by kind; cheap, and of this process alone. Nothing where the core has not been loaded."""
    import sys

    core = sys.modules.get("expertwire._native")
    found: Counter[str] = Counter() if core is None else Counter(core.live_objects())
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        found.update(kind for kind in OURS if target.startswith(kind))
    for task in os.scandir("/proc/self/task"):
        try:
            found[THREAD] += Path(task.path, "comm").read_text().strip() == THREAD
        except OSError:
            continue
    return found


def left_over(before: Counter[str]) -> Counter[str]:
    """What is held beyond `before`, cycles collected."""
    more = held() - before
    if more:
        gc.collect()
        more = held() - before
    return more


def of_the_core() -> Counter[str]:
    """What is held where nothing should be; torch has descriptors of some of the kinds too, which do not count."""

    def ours() -> Counter[str]:
        return Counter({kind: count for kind, count in held().items() if count and kind not in OURS[1:]})

    more = ours()
    if more:
        gc.collect()
        more = ours()
    return more


def forget_what_was_imported() -> None:
    """Let cycles be looked for among what comes from now on alone: all that torch has made takes 0.2 s each time."""
    gc.freeze()
