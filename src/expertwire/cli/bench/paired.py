"""Times engines beside each other in one run, iteration by iteration, and checks every payload outside of the timed window.

Every iteration carries other bytes (`variant`), so a row left over from the iteration before is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import Arm, Received
from expertwire.cli.launch import Rank
from expertwire.ep.layout import expert_bounds

CALC_DIFF_MAX = 5e-6  # DeepEP's own tolerance for BF16


@dataclass(frozen=True)
class Inputs:
    """What one rank sends: x bf16 [T, H], topk_idx i64 [T, K] (−1: none), topk_weights f32 [T, K]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What this rank must receive, derived from every rank's inputs alone, and where its own tokens go."""

    rows: torch.Tensor  # bf16 [N, H]
    topk_idx: torch.Tensor  # i64 [N, K], local ids
    topk_weights: torch.Tensor  # f32 [N, K]
    in_rank: torch.Tensor  # bool [T, R]: my tokens' destinations


@dataclass
class Samples:
    """Seconds of one arm on one rank: phase → one figure per measured iteration."""

    arm: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What a rank hands back."""

    samples: list[Samples]
    received_rows: int
    sent_rows: int  # one per token and destination rank: what a combine brings back
    wire_rows: int  # one per token and remote node: what crosses the fabric, each way
    copy_seconds: list[float]  # one plain copy of the received bytes, all ranks at once
    provider: str  # what carried our rows between nodes
    wire_operations: int  # what our provider was given to post, over all calls


def destinations(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """bool [T, R]: whether the token has an expert on the rank."""
    first = torch.tensor(expert_bounds(experts, ranks))
    owner = torch.bucketize(topk_idx, first[1:], right=True)
    in_rank = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool)
    return in_rank.scatter_(1, torch.where(topk_idx >= 0, owner, ranks), True)[:, :ranks].contiguous()


def expect(rank: int, ranks: int, experts: int, inputs: Callable[[int], Inputs]) -> Expected:
    """Derive what `rank` receives: rows ordered by source rank, then token."""
    bounds = expert_bounds(experts, ranks)
    first, last = bounds[rank], bounds[rank + 1]
    rows, ids, weights = [], [], []
    for source in range(ranks):
        theirs = inputs(source)
        mine = destinations(theirs.topk_idx, experts, ranks)[:, rank]
        chosen = theirs.topk_idx[mine]
        local = (chosen >= first) & (chosen < last)
        rows.append(theirs.x[mine])
        ids.append(torch.where(local, chosen - first, -1))
        weights.append(torch.where(local, theirs.topk_weights[mine], 0.0))
    own = destinations(inputs(rank).topk_idx, experts, ranks)
    return Expected(torch.cat(rows), torch.cat(ids), torch.cat(weights), own)


def variant(x: torch.Tensor, number: int) -> torch.Tensor:
    """The bytes of iteration `number`: moved along the row, the sign turned on odd numbers. Exact, and itself for 0."""
    moved = torch.roll(x, 17 * number, dims=1) if number else x
    return -moved if number % 2 else moved


def expert_rows(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Stands in for the experts of `rank` where only the exchange is measured: anyone can compute it from the row. bf16.

    It turns and moves with its argument (`variant`), and so does the sum of such rows.
    """
    return rows * (1.0 + rank / 8)


def ordered_sum(x: torch.Tensor, in_rank: torch.Tensor, node_of: list[int], rank: int) -> torch.Tensor:
    """What combine must give, bit for bit (ARCHITECTURE, "Order of sums"), for rows made by `expert_rows`. bf16 [T, H]."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for node in sorted(set(node_of)):
        part = torch.zeros(x.shape, dtype=torch.float32)
        members = [member for member in range(len(node_of)) if node_of[member] == node]
        for member in members:
            part += torch.where(in_rank[:, member : member + 1], expert_rows(x, member).float(), 0.0)
        total += part if node == node_of[rank] else part.to(x.dtype).float()
    return total.to(x.dtype)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 − 2·Σxy / Σ(x² + y²) in float64: 0 for equal tensors."""
    dot = square = 0.0
    for a, b in zip(torch.split(x, 1024), torch.split(y, 1024), strict=True):
        a64, b64 = a.double(), b.double()
        dot += float((a64 * b64).sum())
        square += float((a64 * a64 + b64 * b64).sum())
    return 1.0 - 2.0 * dot / square if square else 0.0


def check_dispatch(received: Received, expected: Expected, number: int) -> list[str]:
    """Faults of one dispatch: every byte of every row, id and weight is compared."""
    if received.rows.shape != expected.rows.shape:
        return [f"dispatch gave {tuple(received.rows.shape)} rows, expected {tuple(expected.rows.shape)}"]
    faults = []
    for start in range(0, expected.rows.shape[0], 1024):
        block = slice(start, start + 1024)
        wanted = variant(expected.rows[block], number)
        if not torch.equal(received.rows[block].view(torch.int16), wanted.view(torch.int16)):
            differs = (received.rows[block].view(torch.int16) != wanted.view(torch.int16)).any(1)
            faults.append(f"dispatch: {int(differs.sum())} rows differ, the first is row {start + int(differs.nonzero()[0])}")
    if not torch.equal(received.topk_idx.to(torch.int64), expected.topk_idx):
        faults.append("dispatch: expert ids differ")
    if not torch.equal(received.topk_weights, expected.topk_weights):
        faults.append("dispatch: weights differ")
    return faults


def check_combine(arm: Arm, combined: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """Faults of one combine: ours bit for bit, others (who sum in an order of their own) by `calc_diff`."""
    if combined.shape != wanted.shape:
        return [f"combine gave {tuple(combined.shape)}, expected {tuple(wanted.shape)}"]
    if arm.name == "expertwire":
        differs = (combined.view(torch.int16) != wanted.view(torch.int16)).any(1)
        # −0.0 and 0.0 are the same sum.
        differs &= (combined != wanted).any(1)
        return [f"combine: {int(differs.sum())} tokens differ, the first is {int(differs.nonzero()[0])}"] if differs.any() else []
    diff = calc_diff(combined, wanted)
    return [] if diff <= CALC_DIFF_MAX else [f"combine: calc_diff {diff:.2e} is over {CALC_DIFF_MAX:.0e}"]


def time_copies(rows: torch.Tensor, count: int) -> list[float]:
    """Seconds of plain copies of `rows` into memory that has been touched, all ranks at once."""
    target = rows.clone()
    seconds = []
    for _ in range(count):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(rows)
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(rank: Rank, arms: list[Arm], own: Inputs, expected: Expected, node_of: list[int], iterations: int, warmup: int) -> Measured:
    """Run every arm `warmup + iterations` times, turn about, one payload check after each timed call."""
    samples = {arm.name: Samples(arm.name) for arm in arms}
    total = warmup + iterations
    plain_sum = ordered_sum(own.x, expected.in_rank, node_of, rank.rank)
    for number in range(total, 0, -1):
        x = variant(own.x, number)
        wanted = variant(plain_sum, number)
        for arm in arms if number % 2 else arms[::-1]:
            kept = samples[arm.name]
            dist.barrier()
            received = arm.dispatch(x, own.topk_idx, own.topk_weights)
            kept.faults += check_dispatch(received, expected, number)
            y = expert_rows(received.rows, rank.rank)
            del received
            dist.barrier()
            combined = arm.combine(y)
            kept.faults += check_combine(arm, combined, wanted)
            if number <= iterations:
                for phase, seconds in arm.seconds.items():
                    kept.seconds.setdefault(phase, []).append(seconds)
        rank.progress("measuring", total - number + 1, total)
    nodes = torch.tensor(node_of)
    remote = [expected.in_rank[:, nodes == node].any(1).sum() for node in set(node_of) if node != node_of[rank.rank]]
    return Measured(
        list(samples.values()),
        expected.rows.shape[0],
        int(expected.in_rank.sum()),
        int(sum(remote)),
        time_copies(expected.rows, iterations),
        arms[0].provider,
        arms[0].wire_operations(),
    )
