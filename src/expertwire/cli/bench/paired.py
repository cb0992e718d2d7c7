"""Times engines beside each other in one run, iteration by iteration, and checks every payload outside of the timed window.

Every iteration carries other bytes (`variant`), so a row left over from the iteration before is seen. What is wanted is kept in one place
and turned there from iteration to iteration: checking every byte shall cost little beside what is measured, and fresh pages cost much.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import Arm, Received
from expertwire.cli.bench.ep import PEERS, RECEIVED, combine_phase
from expertwire.cli.launch import Rank
from expertwire.ep.layout import expert_bounds
from expertwire.ep.low_latency_reference import dequantise, quantise

CALC_DIFF_MAX = 5e-6  # DeepEP's own tolerance for BF16
VARIANT_SCALES = 31  # odd, beside two signs: bytes come again after 62 iterations; 2^30 is far from any overflow
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BLOCK_TOKENS = 32  # of the checks in fp32: what a block needs stays in the cache


@dataclass(frozen=True)
class Inputs:
    """What one rank sends: x bf16 [T, H], topk_idx i64 [T, K] (−1: none), topk_weights f32 [T, K]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass
class Expected:
    """What this rank must receive, derived from every rank's inputs alone, and where its own tokens go."""

    rows: torch.Tensor  # bf16 or e4m3 [N, H], in the variant `number`
    topk_idx: torch.Tensor  # i64 [N, K], local ids
    topk_weights: torch.Tensor  # f32 [N, K]
    in_rank: torch.Tensor  # bool [T, R]: my tokens' destinations
    number: int = 0
    scales: torch.Tensor | None = None  # f32 [N, S], of e4m3 rows

    def turn(self, number: int) -> None:
        """Make `rows` those of iteration `number`, in place."""
        turn_sent(self.rows, self.scales, self.number, number)
        self.number = number


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
    worst_faults: list[str] = field(default_factory=list)  # of the run with num_worst_tokens
    peers: dict[str, str] = field(default_factory=dict)  # engine that is not ours → what carried its rows


def destinations(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """bool [T, R]: whether the token has an expert on the rank."""
    first = torch.tensor(expert_bounds(experts, ranks))
    owner = torch.bucketize(topk_idx, first[1:], right=True)
    in_rank = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool)
    return in_rank.scatter_(1, torch.where(topk_idx >= 0, owner, ranks), True)[:, :ranks].contiguous()


def expect(rank: int, ranks: int, experts: int, inputs: Callable[[int], Inputs], dtype: str = "bf16") -> Expected:
    """Derive what `rank` receives: rows ordered by source rank, then token."""
    bounds = expert_bounds(experts, ranks)
    first, last = bounds[rank], bounds[rank + 1]
    sources = [inputs(source) for source in range(ranks)]
    in_ranks = [destinations(source.topk_idx, experts, ranks) for source in sources]
    mine = [in_rank[:, rank].nonzero()[:, 0] for in_rank in in_ranks]
    ends = list(itertools.accumulate(places.numel() for places in mine))
    rows = torch.empty(ends[-1], sources[rank].x.shape[1], dtype=ROW_TYPES[dtype])
    ids, weights, scales = [], [], []
    for source, places, end in zip(sources, mine, ends, strict=True):
        to = rows[end - places.numel() : end]
        if dtype == "bf16":
            torch.index_select(source.x, 0, places, out=to)
        else:
            to[:], of_rows = quantise(source.x[places])
            scales.append(of_rows)
        chosen = source.topk_idx[places]
        local = (chosen >= first) & (chosen < last)
        ids.append(torch.where(local, chosen - first, -1))
        weights.append(torch.where(local, source.topk_weights[places], 0.0))
    return Expected(rows, torch.cat(ids), torch.cat(weights), in_ranks[rank], scales=torch.cat(scales) if scales else None)


def variant_scale(number: int) -> float:
    """What `variant` multiplies by: another power of two and the other sign than the iterations beside this one; 1 for 0."""
    return math.ldexp(-1.0 if number % 2 else 1.0, number % VARIANT_SCALES)


def variant(x: torch.Tensor, number: int) -> torch.Tensor:
    """The rows of iteration `number`: exact, other bytes in every element that is not 0, and `x` itself for 0."""
    return x * variant_scale(number) if number else x


def turn(x: torch.Tensor, before: int, after: int) -> None:
    """Make the variant `after` of the variant `before`, in place."""
    x.mul_(variant_scale(after) / variant_scale(before))


def sent(x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a caller gives a dispatch of `dtype`: bf16 rows as they are, or e4m3 rows with a scale for each 128 columns."""
    return (x, None) if dtype == "bf16" else quantise(x)


def turn_sent(rows: torch.Tensor, scales: torch.Tensor | None, before: int, after: int) -> None:
    """`turn` of what `sent` gave: a quantised row turns its sign in its elements and the power of two in its scales."""
    if scales is None:
        turn(rows, before, after)
        return
    factor = variant_scale(after) / variant_scale(before)
    scales.mul_(abs(factor))
    if factor < 0:
        rows.view(torch.uint8).bitwise_xor_(0x80)


def plain(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What experts see of received rows: bf16."""
    if scales is None:
        return rows
    out = torch.empty(rows.shape, dtype=torch.bfloat16)
    for part, factors, to in zip(*(torch.split(whole, BLOCK_TOKENS) for whole in (rows, scales, out)), strict=True):
        to.copy_(dequantise(part, factors))
    return out


def expert_rows(rows: torch.Tensor, rank: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Stands in for the experts of `rank` where only the exchange is measured: anyone can compute it from the row. bf16.

    It turns with its argument (`variant`), and so does the sum of such rows. `out` is memory for it, used if it has the shape.
    """
    return torch.mul(rows, 1.0 + rank / 8, out=out if out is not None and out.shape == rows.shape else None)


def ordered_sum(x: torch.Tensor, in_rank: torch.Tensor, node_of: list[int], rank: int) -> torch.Tensor:
    """What combine must give, bit for bit (ARCHITECTURE, "Order of sums"), for rows made by `expert_rows`. bf16 [T, H]."""
    members = [[member for member, its in enumerate(node_of) if its == node] for node in sorted(set(node_of))]
    out = torch.empty_like(x)
    for rows, chosen, to in zip(*(torch.split(whole, BLOCK_TOKENS) for whole in (x, in_rank, out)), strict=True):
        total = torch.zeros(rows.shape, dtype=torch.float32)
        for node in members:
            part = torch.zeros(rows.shape, dtype=torch.float32)
            for member in node:
                part += torch.where(chosen[:, member : member + 1], expert_rows(rows, member).float(), 0.0)
            total += part if rank in node else part.to(x.dtype).float()
        to.copy_(total)
    return out


def token_diffs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By token, Σ(x − y)² and Σ(x² + y²): f64 [T] each, for rows [T, H] of any floats."""
    apart = torch.empty(x.shape[0], dtype=torch.float64)
    size = torch.empty_like(apart)
    for a, b, to_apart, to_size in zip(*(torch.split(whole, BLOCK_TOKENS) for whole in (x, y, apart, size)), strict=True):
        a32, b32 = a.float(), b.float()
        to_size.copy_(a32.square().sum(1) + b32.square().sum(1))
        to_apart.copy_((a32 - b32).square_().sum(1))
    return apart, size


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 − 2·Σxy / Σ(x² + y²), as Σ(x − y)² / Σ(x² + y²), which loses nothing by cancelling: 0 for equal tensors."""
    apart, size = token_diffs(x, y)
    return float(apart.sum() / size.sum()) if size.any() else 0.0


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one shape and type are the same bytes; compared eight at a time where rows allow it."""
    each = 8 // x.element_size()
    wide = x.shape[-1] % each == 0 and all(tensor.data_ptr() % 8 == 0 and tensor.storage_offset() % each == 0 for tensor in (x, y))
    word = torch.int64 if wide else WORDS[x.element_size()]
    return torch.equal(x.view(word), y.view(word))


def check_dispatch(received: Received, expected: Expected) -> list[str]:
    """Faults of one dispatch: every byte of every row, id and weight is compared."""
    rows, wanted = received.rows, expected.rows
    if rows.shape != wanted.shape:
        return [f"dispatch gave {tuple(rows.shape)} rows, expected {tuple(wanted.shape)}"]
    faults = []
    word = WORDS[wanted.element_size()]
    if not same_bytes(rows, wanted):
        differs = (rows.view(word) != wanted.view(word)).any(1)
        faults.append(f"dispatch: {int(differs.sum())} rows differ, the first is row {int(differs.nonzero()[0])}")
    if expected.scales is not None and (received.scales is None or not torch.equal(received.scales, expected.scales)):
        faults.append("dispatch: scales differ")
    if not torch.equal(received.topk_idx.to(torch.int64), expected.topk_idx):
        faults.append("dispatch: expert ids differ")
    if not torch.equal(received.topk_weights, expected.topk_weights):
        faults.append("dispatch: weights differ")
    return faults


class Named(Protocol):
    """Whatever has an arm's name."""

    name: str


def check_combine(arm: Named, combined: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """Faults of one combine: ours bit for bit, others (who sum in an order of their own) by `calc_diff`."""
    if combined.shape != wanted.shape:
        return [f"combine gave {tuple(combined.shape)}, expected {tuple(wanted.shape)}"]
    if arm.name not in PEERS:
        if same_bytes(combined, wanted):
            return []
        differs = (combined.view(torch.int16) != wanted.view(torch.int16)).any(1)
        # −0.0 and 0.0 are the same sum.
        differs &= (combined != wanted).any(1)
        return [f"combine: {int(differs.sum())} tokens differ, the first is {int(differs.nonzero()[0])}"] if differs.any() else []
    diff = calc_diff(combined, wanted)
    return [] if diff <= CALC_DIFF_MAX else [f"combine: calc_diff {diff:.2e} is over {CALC_DIFF_MAX:.0e}"]


def time_copies(rows: torch.Tensor, target: torch.Tensor, count: int) -> list[float]:
    """Seconds of plain copies of `rows` to memory that has been touched, all ranks at once."""
    seconds = []
    for _ in range(count):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(rows)
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(rank: Rank, arms: list[Arm], own: Inputs, expected: Expected, node_of: list[int], iterations: int, warmup: int) -> Measured:
    """Run every arm `warmup + iterations` times, turn about, one payload check after each timed call. Leaves `expected` at variant 0."""
    samples = {arm.name: Samples(arm.name) for arm in arms}
    total = warmup + iterations
    x, scales = sent(own.x.clone(), "bf16" if expected.scales is None else "fp8")
    wanted = ordered_sum(plain(x, scales), expected.in_rank, node_of, rank.rank)
    made = torch.zeros(expected.rows.shape, dtype=torch.bfloat16)  # what the experts give
    for number in range(total, 0, -1):
        before = expected.number
        expected.turn(number)
        turn_sent(x, scales, before, number)
        turn(wanted, before, number)
        for arm in arms if number % 2 else arms[::-1]:
            kept = samples[arm.name]
            dist.barrier()
            received = arm.dispatch(x if scales is None else (x, scales), own.topk_idx, own.topk_weights)
            kept.faults += check_dispatch(received, expected)
            rows = plain(received.rows, received.scales)
            outputs = {place: expert_rows(rows, rank.rank, made) for place in arm.combine_inputs if place != RECEIVED}
            if RECEIVED in arm.combine_inputs:  # last, for it writes over what the others are made of
                outputs[RECEIVED] = expert_rows(rows, rank.rank, rows)
            del received, rows
            for place in arm.combine_inputs if number % 2 else arm.combine_inputs[::-1]:
                dist.barrier()
                combined = arm.combine(outputs[place])
                kept.faults += check_combine(arm, combined, wanted)
                arm.seconds[combine_phase(place)] = arm.seconds["combine"]
            del outputs, combined
            if number <= iterations:
                for phase, seconds in arm.seconds.items():
                    kept.seconds.setdefault(phase, []).append(seconds)
        rank.progress("measuring", total - number + 1, total)
    expected.turn(0)
    nodes = torch.tensor(node_of)
    remote = [expected.in_rank[:, nodes == node].any(1).sum() for node in set(node_of) if node != node_of[rank.rank]]
    return Measured(
        list(samples.values()),
        expected.rows.shape[0],
        int(expected.in_rank.sum()),
        int(sum(remote)),
        time_copies(expected.rows, made if scales is None else torch.zeros_like(expected.rows), iterations),
        arms[0].provider,
        arms[0].wire_operations(),
        peers={arm.name: arm.provider for arm in arms if arm.name in PEERS},
    )


def check_worst(arm: Arm, own: Inputs, expected: Expected, node_of: list[int], rank: int) -> list[str]:
    """Faults of one dispatch and combine whose results have as many rows as the fullest rank receives, whatever comes."""
    valid = expected.rows.shape[0]
    most = torch.tensor(max(1, valid))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    x, scales = sent(own.x, "bf16" if expected.scales is None else "fp8")
    received = arm.dispatch(x if scales is None else (x, scales), own.topk_idx, own.topk_weights, worst=int(most))
    if received.rows.shape[0] != int(most):
        return [f"dispatch gave {received.rows.shape[0]} rows, num_worst_tokens is {int(most)}"]
    of_valid = None if received.scales is None else received.scales[:valid]
    faults = check_dispatch(Received(received.rows[:valid], received.topk_idx[:valid], received.topk_weights[:valid], of_valid), expected)
    if (received.topk_idx[valid:] != -1).any():
        faults.append("dispatch: an expert id behind the last row is not -1")
    made = torch.zeros(received.rows.shape, dtype=torch.bfloat16)
    expert_rows(plain(received.rows[:valid], of_valid), rank, made[:valid])
    combined = arm.combine(made)
    return faults + check_combine(arm, combined, ordered_sum(plain(x, scales), expected.in_rank, node_of, rank))
