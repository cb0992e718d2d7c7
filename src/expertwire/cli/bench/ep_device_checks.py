"""What `bench ep --device cuda` holds engines' results to, and counts of the rows that must move."""

from __future__ import annotations

import statistics

import torch

from expertwire.cli.bench.ep_device import DeviceSetup
from expertwire.cli.bench.ep_device_clock import Clock
from expertwire.cli.bench.ep_device_engines import Given, LowLatency, Throughput, make
from expertwire.ep.layout import expert_bounds
from expertwire.ep.low_latency_reference import quantise

TOLERANCE = {"bf16": 1e-5, "fp8": 1e-3}  # of low latency's sums, whose order is each engine's own (DeepEP's tests allow 1e-5 and 9e-4)


class Traffic:
    """Rows that a dispatch of these inputs moves, from every rank's inputs."""

    def __init__(self, setup: DeviceSetup, rank: int, given: Given, clock: Clock) -> None:
        bounds = torch.tensor(expert_bounds(setup.experts, setup.ranks)[1:], device=given.x.device)
        owner = torch.bucketize(given.topk_idx, bounds, right=True)
        in_rank = torch.zeros((given.tokens, setup.ranks), dtype=torch.bool, device=given.x.device).scatter_(1, owner, True)
        self.times = in_rank.sum(1, keepdim=True)  # how many ranks a token goes to
        self.matrix: list[list[int]] = clock.gather(in_rank.sum(0).tolist())
        self.received = [sum(row[one] for row in self.matrix) for one in range(setup.ranks)]
        self.mine = self.received[rank]
        self.tokens, self.ranks = given.tokens, setup.ranks

    @property
    def mean(self) -> float:
        """Rows received a rank."""
        return statistics.mean(self.received)

    def floor_us(self, row_bytes: float, cards: list[str], card: float, peer: float) -> float:
        """The least time for rows of that many bytes, by rates in bytes a µs."""
        least = 0.0
        for one in set(cards):
            here = [rank for rank in range(self.ranks) if cards[rank] == one]
            moved = sum(self.tokens + self.received[rank] for rank in here) * row_bytes
            crossing = sum(self.matrix[source][to] for to in here for source in range(self.ranks) if cards[source] != one) * row_bytes
            least = max(least, moved / card if card else 0.0, crossing / peer if peer else 0.0)
        return least


def check_throughput(engine: Throughput, setup: DeviceSetup, rank: int, traffic: Traffic) -> list[str]:
    """Faults of one dispatch of each dtype and one combine, every byte looked at."""
    bounds = expert_bounds(setup.experts, setup.ranks)
    first, last = bounds[rank], bounds[rank + 1]
    sources = [make(setup, engine.given.tokens, source, engine.given.x.device) for source in range(setup.ranks)]
    mine = [(one.topk_idx >= first) & (one.topk_idx < last) for one in sources]
    picks = [one.any(1).nonzero().flatten() for one in mine]
    faults = []
    engine.keep()
    rows, ids, weights = engine.kept[:3]
    wanted = torch.cat([one.x[pick] for one, pick in zip(sources, picks, strict=True)])
    if rows.shape != wanted.shape or not torch.equal(rows.view(torch.int16), wanted.view(torch.int16)):
        return [f"dispatch: rows differ (got {list(rows.shape)}, expected {list(wanted.shape)})"]
    chosen = [torch.where(own, one.topk_idx - first, -1)[pick] for one, own, pick in zip(sources, mine, picks, strict=True)]
    if not torch.equal(ids, torch.cat(chosen).to(ids.dtype)):
        faults.append("dispatch: ids differ")
    shares = [torch.where(own, one.topk_weights, 0.0)[pick] for one, own, pick in zip(sources, mine, picks, strict=True)]
    if not torch.equal(torch.where(ids >= 0, weights, 0.0), torch.cat(shares)):
        faults.append("dispatch: weights differ")
    sums = (engine.given.x.float() * traffic.times).bfloat16()  # exact in any order: a small multiple of one bf16 row
    for place in ("received", "elsewhere"):
        engine.combine(place)
        if not torch.equal(engine.combined, sums):
            faults.append(f"combine: sums of rows {place} differ")
    del sources, wanted
    if "fp8" in setup.dtypes:
        packed, factors = packed_rows(engine, picks, rank)
        got, scales = engine.dispatch("fp8")[0]
        if not torch.equal(got.view(torch.uint8), packed) or not torch.equal(scales, factors):
            faults.append("dispatch of fp8: rows or scales differ")
        engine.latest = None
    return faults


def packed_rows(engine: Throughput, picks: list[torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rank's quantised rows are, those for this rank: e4m3 [N, H] and their scales."""
    device = engine.given.x.device
    rows, scales = [], []
    for source, pick in enumerate(picks):
        own = engine.fp8 if source == rank else None
        values, factors = own or quantise(make(engine.setup, engine.given.tokens, source, device).x.cpu())
        rows.append(values.view(torch.uint8).to(device)[pick])
        scales.append(factors.to(device)[pick])
    return torch.cat(rows), torch.cat(scales)


def check_low_latency(engine: LowLatency, setup: DeviceSetup, rank: int, dtype: str, clock: Clock) -> list[str]:
    """Faults of one dispatch and one combine: counts exact, sums near."""
    given, bounds = engine.given, expert_bounds(setup.experts, setup.ranks)
    everywhere = torch.stack(clock.gather(torch.bincount(given.topk_idx.flatten(), minlength=setup.experts).cpu())).sum(0)
    engine.keep(dtype)
    faults = []
    if engine.kept[1].tolist() != (wanted := everywhere[bounds[rank] : bounds[rank + 1]].tolist()):
        faults.append(f"dispatch: counts are {engine.kept[1].tolist()}, expected {wanted}")
    for hook in (False, True):
        engine.combine(hook)
        sums = given.x.double() * given.topk_weights.double().sum(1, keepdim=True)
        got = engine.combined.double()
        apart = float(((got - sums) ** 2).sum() / (got**2 + sums**2).sum())
        if not apart <= TOLERANCE[dtype]:
            faults.append(f"combine{' by its hook' if hook else ''}: sums are {apart} apart, at most {TOLERANCE[dtype]} is rounding")
    return faults
