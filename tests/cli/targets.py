"""What launched ranks run in the tests of the launcher."""

from __future__ import annotations

import os
import signal
import threading

import torch
import torch.distributed as dist

from expertwire.cli.launch import Rank
from expertwire.errors import InvalidArgumentError, PeerError


def add_up(rank: Rank, base: int) -> tuple[int, int, int]:
    total = torch.tensor([base + rank.rank])
    dist.all_reduce(total)
    rank.progress("adding", 1, 1)
    return rank.rank, int(total), torch.get_num_threads()


def fail_on(rank: Rank, which: int) -> None:
    if rank.rank == which:
        raise ArithmeticError(f"rank {which} cannot go on")
    dist.barrier()


def refuse(rank: Rank) -> None:
    raise InvalidArgumentError("topk is 9; the limit is 8")


def blame(rank: Rank, which: int) -> None:
    """All but one report a dead peer at once; the one that explains it follows when they have."""
    if rank.rank != which:
        raise PeerError(f"rank {which} is gone", which)
    raise ArithmeticError("the real reason")


def die_on(rank: Rank, which: int) -> None:
    rank.progress(str(os.getpid()), 1, 1)
    if rank.rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank: Rank) -> None:
    rank.progress(str(os.getpid()), 1, 1)
    threading.Event().wait()
