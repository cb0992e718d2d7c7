"""`bench ep --mode ll`: the low-latency mode, beside the high-throughput one or its own synchronous fallback in the same run.

A dispatch is timed from its call to the end of its hook, which is called at once; so is a combine. Both are checked outside of that window,
every row of every expert and every sum, and each iteration carries other bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import OursArm
from expertwire.cli.bench.ep import HIGH_THROUGHPUT, ORDINARY, RECEIVED, ZERO_COPY, Setup, make_inputs
from expertwire.cli.bench.paired import (
    BLOCK_TOKENS,
    Expected,
    Inputs,
    Measured,
    Samples,
    check_combine,
    check_dispatch,
    destinations,
    expect,
    expert_rows,
    ordered_sum,
    plain,
    same_bytes,
    sent,
    time_copies,
    turn,
    turn_sent,
)
from expertwire.cli.launch import Rank
from expertwire.ep import Buffer
from expertwire.ep.layout import expert_bounds

if TYPE_CHECKING:
    from expertwire.ep.low_latency_handle import LowLatencyHandle


@dataclass
class Wanted:
    """What this rank must receive and sum, derived from every rank's inputs alone."""

    counts: list[int]  # of each local expert
    rows: torch.Tensor  # bf16 or e4m3 [N, H], by expert, then source, then token
    scales: torch.Tensor | None  # f32 [N, S], of e4m3 rows
    sums: torch.Tensor  # bf16 [T, H]
    number: int = 0

    def turn(self, number: int) -> None:
        """Make everything that of iteration `number`, in place."""
        turn_sent(self.rows, self.scales, self.number, number)
        turn(self.sums, self.number, number)
        self.number = number


def want(setup: Setup, rank: int, inputs: Callable[[int], Inputs]) -> Wanted:
    """Derive what `rank` must get."""
    bounds = expert_bounds(setup.experts, setup.ranks)
    sources = [inputs(source) for source in range(setup.ranks)]
    counts, parts = [], []
    for expert in range(bounds[rank], bounds[rank + 1]):
        places = [(source.topk_idx == expert).nonzero()[:, 0] for source in sources]
        counts.append(sum(place.numel() for place in places))
        parts += [source.x[place] for source, place in zip(sources, places, strict=True)]
    received = torch.cat(parts) if parts else torch.empty(0, setup.hidden, dtype=torch.bfloat16)
    return Wanted(counts, *sent(received, setup.dtype), weighted_sum(sources[rank], bounds, setup.dtype))


def weighted_sum(own: Inputs, bounds: list[int], dtype: str) -> torch.Tensor:
    """What a combine must give, bit for bit, for rows made by `expert_rows`: fp32 products, added in top-k order. bf16 [T, H]."""
    owners = torch.bucketize(own.topk_idx, torch.tensor(bounds[1:]), right=True)
    seen = plain(*sent(own.x, dtype))
    out = torch.empty(own.x.shape, dtype=torch.bfloat16)
    blocks = zip(*(torch.split(whole, BLOCK_TOKENS) for whole in (seen, own.topk_idx, owners, own.topk_weights, out)), strict=True)
    for rows, ids, owner, weights, to in blocks:
        total = torch.zeros(rows.shape, dtype=torch.float32)
        for k in range(ids.shape[1]):
            made = (rows.float() * (1.0 + owner[:, k, None].float() / 8)).bfloat16()
            total += torch.where(ids[:, k, None] >= 0, weights[:, k, None] * made.float(), 0.0)
        to.copy_(total)
    return out


class LowLatencyArm:
    """`expertwire.ep.Buffer` in its low-latency mode, called as a user calls it with the receive hook."""

    def __init__(self, setup: Setup, wanted: Wanted, own: Inputs, *, sync: bool | None = None) -> None:
        self.name = "sync" if sync else "expertwire"
        self.setup, self.wanted, self.own = setup, wanted, own
        self.rank = dist.get_rank()
        self.tokens_max = max(1, *setup.tokens)
        self.combine_inputs: tuple[str, ...] = (RECEIVED, ORDINARY, ZERO_COPY) if setup.dtype == "bf16" else (ORDINARY, ZERO_COPY)
        self.seconds: dict[str, float] = {"layout": 0.0}
        local_experts_max = max(1, -(-setup.experts // setup.ranks))
        # As if every rank had the most: else the combine buffer may lack room where experts are not divisible by ranks.
        hint = Buffer.get_low_latency_rdma_size_hint(self.tokens_max, setup.hidden, setup.ranks, local_experts_max * setup.ranks)
        self.buffer = Buffer(
            dist.group.WORLD,
            num_rdma_bytes=hint,
            low_latency_mode=True,
            num_qps_per_rank=local_experts_max,
            explicitly_destroy=True,
            node_of=setup.node_of,
            provider=setup.provider,
            max_local_experts=local_experts_max,
            sync_writes=sync,
        )
        self.provider = self.buffer.provider
        self.handle: LowLatencyHandle | None = None
        self._rows: torch.Tensor | None = None  # received, bf16: a combine's rows may be written over them
        self._ordinary = torch.zeros(len(wanted.counts), setup.ranks * self.tokens_max, setup.hidden, dtype=torch.bfloat16)
        self._made = torch.zeros(wanted.rows.shape, dtype=torch.bfloat16)  # what the experts give

    def wire_operations(self) -> int:
        """Writes and signals that this rank has given its provider so far."""
        return self.buffer.statistics()["provider_posted"]

    def dispatch(self, x: torch.Tensor) -> list[str]:
        """One dispatch of bf16 rows, and its faults. Collective."""
        begin = time.perf_counter()
        received, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x, self.own.topk_idx, self.tokens_max, self.setup.experts, use_fp8=self.setup.dtype == "fp8", return_recv_hook=True
        )
        middle = time.perf_counter()
        assert hook is not None
        hook()
        self._took("dispatch", begin, middle)
        rows, scales = received if isinstance(received, tuple) else (received, None)
        self.handle, self._rows = handle, rows
        faults = self._check(rows, scales, counts)
        expert_rows(plain(self.wanted.rows, self.wanted.scales), self.rank, self._made)
        return faults

    def turn(self, number: int) -> None:
        """Nothing: what is wanted has been turned for all arms of this mode."""

    def combine(self, place: str) -> list[str]:
        """One combine of rows that lie at `place`, and its faults. Collective."""
        assert self.handle is not None
        assert self._rows is not None
        if place == ZERO_COPY:
            y = self.buffer.get_next_low_latency_combine_buffer(self.handle)
        else:
            y = self._rows if place == RECEIVED else self._ordinary
        for expert, (count, end) in enumerate(self._segments()):
            y[expert, :count] = self._made[end - count : end]
        dist.barrier()
        begin = time.perf_counter()
        combined, _, hook = self.buffer.low_latency_combine(
            y, self.own.topk_idx, self.own.topk_weights, self.handle, zero_copy=place == ZERO_COPY, return_recv_hook=True
        )
        middle = time.perf_counter()
        assert hook is not None
        hook()
        self._took("combine", begin, middle)
        return check_combine(self, combined, self.wanted.sums)

    def close(self) -> None:
        """Release everything. Collective."""
        self.handle = self._rows = None
        self.buffer.destroy()

    def _took(self, phase: str, begin: float, middle: float) -> None:
        end = time.perf_counter()
        self.seconds |= {phase: end - begin, f"{phase}_send": middle - begin, f"{phase}_hook": end - middle}

    def _segments(self) -> list[tuple[int, int]]:
        """By local expert: how many rows, and where they end in `wanted.rows`."""
        return list(zip(self.wanted.counts, itertools.accumulate(self.wanted.counts), strict=True))

    def _check(self, rows: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor) -> list[str]:
        """Every byte of every row, every scale and count."""
        wanted = self.wanted
        if counts.tolist() != wanted.counts:
            return [f"dispatch gave counts {counts.tolist()}, expected {wanted.counts}"]
        faults = []
        for expert, (count, end) in enumerate(self._segments()):
            part = slice(end - count, end)
            if not same_bytes(rows[expert, :count], wanted.rows[part]):
                faults.append(f"dispatch: rows of local expert {expert} differ")
            if wanted.scales is not None and (scales is None or not torch.equal(scales[expert, :count], wanted.scales[part])):
                faults.append(f"dispatch: scales of local expert {expert} differ")
        return faults


class HighThroughputArm:
    """The other mode on the same inputs: a row for each rank and not for each expert, summed without weights, checked likewise."""

    def __init__(self, setup: Setup, expected: Expected, own: Inputs) -> None:
        self.name = HIGH_THROUGHPUT
        self.setup, self.expected, self.own = setup, expected, own
        most = torch.tensor(max(1, expected.rows.shape[0]))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self.rank = dist.get_rank()
        self.ours = OursArm(setup, int(most), name=HIGH_THROUGHPUT)
        self.combine_inputs = self.ours.combine_inputs
        self.provider = self.ours.provider
        self.seconds = self.ours.seconds
        self._sums = ordered_sum(plain(*sent(own.x, setup.dtype)), expected.in_rank, list(setup.node_of), self.rank)
        self._made: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def wire_operations(self) -> int:
        """See `LowLatencyArm`."""
        return self.ours.wire_operations()

    def dispatch(self, x: torch.Tensor) -> list[str]:
        """See `LowLatencyArm`. Rows are quantised before the clock starts: here that is the caller's work."""
        rows, scales = sent(x, self.setup.dtype)
        received = self.ours.dispatch(rows if scales is None else (rows, scales), self.own.topk_idx, self.own.topk_weights)
        faults = check_dispatch(received, self.expected)
        self._made = expert_rows(plain(received.rows, received.scales), self.rank)
        self._rows = received.rows
        return faults

    def turn(self, number: int) -> None:
        """What comes next is of iteration `number`."""
        turn(self._sums, self.expected.number, number)
        self.expected.turn(number)

    def combine(self, place: str) -> list[str]:
        """See `LowLatencyArm`."""
        assert self._made is not None
        assert self._rows is not None
        y = self._rows.copy_(self._made) if place == RECEIVED else self._made
        dist.barrier()
        combined = self.ours.combine(y)
        return check_combine(self, combined, self._sums)

    def close(self) -> None:
        """See `LowLatencyArm`."""
        self._rows = None
        self.ours.close()


def measure(
    rank: Rank, arms: list[LowLatencyArm | HighThroughputArm], setup: Setup, own: Inputs, wanted: Wanted
) -> tuple[list[Samples], list[float]]:
    """Every arm `warmup + iterations` times, turn about. Leaves everything at variant 0."""
    samples = [Samples(arm.name) for arm in arms]
    total = setup.warmup + setup.iterations
    x = own.x.clone()
    for number in range(total, 0, -1):
        turn(x, wanted.number, number)
        wanted.turn(number)
        pairs = list(zip(arms, samples, strict=True))
        for arm, kept in pairs if number % 2 else pairs[::-1]:
            arm.turn(number)
            dist.barrier()
            kept.faults += arm.dispatch(x)
            for place in arm.combine_inputs:
                kept.faults += arm.combine(place)
                for phase in [phase for phase in arm.seconds if phase in ("combine", "combine_send", "combine_hook")]:
                    arm.seconds[f"{phase}_{place}"] = arm.seconds[phase]
            if number <= setup.iterations:
                for phase, seconds in arm.seconds.items():
                    kept.seconds.setdefault(phase, []).append(seconds)
        rank.progress("measuring", total - number + 1, total)
    wanted.turn(0)
    return samples, time_copies(wanted.rows, torch.zeros_like(wanted.rows), setup.iterations)


def rank_main(rank: Rank, setup: Setup) -> Measured:
    """A rank's whole run."""
    own = make_inputs(setup, rank.rank)

    def inputs(source: int) -> Inputs:
        return own if source == rank.rank else make_inputs(setup, source)

    wanted = want(setup, rank.rank, inputs)
    arms: list[LowLatencyArm | HighThroughputArm] = [LowLatencyArm(setup, wanted, own, sync=False if "sync" in setup.against else None)]
    if "sync" in setup.against:
        arms.append(LowLatencyArm(setup, wanted, own, sync=True))
    if "ht" in setup.against:
        arms.append(HighThroughputArm(setup, expect(rank.rank, setup.ranks, setup.experts, inputs, setup.dtype), own))
    rank.progress("ranks and fabric ready", 1, 1)
    try:
        samples, copies = measure(rank, arms, setup, own, wanted)
        far = torch.tensor([node != setup.node_of[rank.rank] for node in setup.node_of])
        # A token goes to a rank once, and comes back once for each expert.
        remote = int(destinations(own.topk_idx, setup.experts, setup.ranks)[:, far].sum())
        chosen = own.topk_idx[own.topk_idx >= 0]
        return Measured(samples, wanted.rows.shape[0], chosen.numel(), remote, copies, arms[0].provider, arms[0].wire_operations())
    finally:
        for arm in arms:
            arm.close()
