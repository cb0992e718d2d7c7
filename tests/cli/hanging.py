"""A rank that never returns, of a launcher that is a process of its own: what imports this does not wait for torch."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertwire.cli.launch import Rank


def hang(rank: Rank) -> None:
    rank.progress(str(os.getpid()), 1, 1)
    threading.Event().wait()
