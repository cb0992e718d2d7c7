"""What launched ranks run in the tests of the launcher."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import GlooArm
from expertwire.cli.bench.ep import Setup, make_inputs
from expertwire.cli.bench.paired import check_combine, check_dispatch, expect, expert_rows, ordered_sum, variant
from expertwire.cli.launch import Rank
from expertwire.cli.soak import ep_worker as exchanging
from expertwire.cli.soak import worker as soaking
from expertwire.ep import Buffer
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


def gloo_exchange(rank: Rank, shapes: list[tuple[tuple[int, ...], int, int]]) -> list[str]:
    """Faults of the baseline over some (tokens by rank, experts, top-k), twice each, since its buffers are kept."""
    faults: list[str] = []
    for tokens, experts, topk in shapes:
        setup = Setup(tuple(range(rank.size)), tokens, 40, experts, topk, "holes", None, ("gloo",), 1, 0, 9)
        inputs = [make_inputs(setup, source) for source in range(rank.size)]
        own = inputs[rank.rank]
        expected = expect(rank.rank, rank.size, experts, inputs.__getitem__)
        arm = GlooArm(rank.size, experts)
        for number in (2, 1):
            expected.turn(number)
            received = arm.dispatch(variant(own.x, number), own.topk_idx, own.topk_weights)
            faults += check_dispatch(received, expected)
            combined = arm.combine(expert_rows(received.rows, rank.rank))
            total = ordered_sum(own.x, expected.in_rank, [0] * rank.size, rank.rank)
            faults += check_combine(arm, combined, variant(total, number))
    return faults


def readme_example(rank: Rank, code: str) -> bool:
    """Runs the README's code: with experts that change nothing, a token comes home once for every rank that it went to."""
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    exchange = names["exchange"]
    assert callable(exchange)
    x = torch.full((6, 16), float(rank.rank + 1), dtype=torch.bfloat16)
    ids = torch.tensor([[0, 1], [0, 3], [5, 5], [-1, -1], [2, 4], [1, -1]])
    buffer = Buffer(dist.group.WORLD)
    combined = exchange(buffer, x, ids, torch.rand(6, 2), 6)
    buffer.destroy()
    copies = torch.tensor([1.0, 2.0, 1.0, 0.0, 2.0, 1.0])[:, None]
    return torch.equal(combined.float(), x.float() * copies)


class _Damaged(soaking.Worker):
    """A rank whose memory changes under it, once, before the last check."""

    damage = ""

    def _check_everything(self, outgoing: Any, incoming: Any, faults: Any) -> None:
        if self.rank == 1 and self._iteration == 1:
            pieces = [piece for transfer in incoming[0] if transfer.kind == "write" for piece in transfer.pieces]
            if self.damage == "a counter":
                self._counters[0] += 1
            elif self.damage == "a byte beside them":
                self._bytes["receive"][max(piece.place + piece.nbytes for piece in pieces)] ^= 1
            else:
                self._bytes["receive"][pieces[0].place] ^= 0x80
        super()._check_everything(outgoing, incoming, faults)


def soak_with_damage(rank: Rank, setup: soaking.Setup, what: str) -> soaking.Outcome:
    """Two iterations of the soak, in which rank 1 must see one failure."""
    worker = _Damaged(rank.rank, setup)
    worker.damage = what
    while worker.iterate(0.0):
        continue
    return worker.finish()


class _DamagedExchange(exchanging.Worker):
    """Rank 1 finds a bit changed in what it received, once for each of these."""

    damages: set[str]

    def _check(self, of: object, **pairs: tuple[object, object]) -> None:
        for what, (got, want) in pairs.items():
            if self.rank == 1 and what in self.damages and isinstance(got, torch.Tensor) and got.numel():
                self.damages.remove(what)
                changed = exchanging.raw(got)
                changed[-1, -1] ^= 1
                pairs[what] = changed.view(got.dtype), want
        super()._check(of, **pairs)


def soak_ep_with_damage(rank: Rank, setup: exchanging.Setup, damages: set[str]) -> tuple[exchanging.Outcome, list[str]]:
    """Some iterations of `soak ep`, in which rank 1 must see a failure for each of `damages`; and what it said at once."""
    said: list[str] = []
    worker = _DamagedExchange(rank.rank, setup, said.append)
    worker.damages = damages
    for _ in range(setup.iterations):
        worker.iterate()
    return worker.finish(), said
