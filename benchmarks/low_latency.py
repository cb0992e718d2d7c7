"""Dispatch and combine of a few tokens in both modes, side by side: what a decoding step pays.

    python benchmarks/low_latency.py [--ranks 8] [--ranks-per-node 4] [--tokens 32] [--hidden 7168] [--experts 64] [--topk 8]
                                     [--iterations 30] [--provider tcp] [--json FILE]

Arms alternate within one run, each iteration begins at a barrier, and its time is that of the slowest rank. The high-throughput arm's
layout is counted within its dispatch, since the other mode needs none. Experts give back what they got; every sum is checked, outside of
what is timed, against the rows and weights that were sent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.launch import Rank, launch
from expertwire.cli.report import Report, RowStatus
from expertwire.ep import Buffer
from expertwire.ep.low_latency_reference import dequantise

ARMS = ("ll_bf16", "ll_fp8", "ht_bf16")
TOLERANCE = {"ll_bf16": 1e-5, "ll_fp8": 9e-4, "ht_bf16": 1e-5}  # of DeepEP's own tests


@dataclass(frozen=True)
class Setup:
    """One shape."""

    ranks: int
    ranks_per_node: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    iterations: int
    provider: str


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2 Σxy / Σ(x² + y²) in float64."""
    a, b = x.double(), y.double()
    return float(1 - 2 * (a * b).sum() / (a**2 + b**2).sum())


def low_latency(
    buffer: Buffer, setup: Setup, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fp8: bool
) -> tuple[float, float, torch.Tensor]:
    """Seconds of the dispatch, of the combine, and the sums."""
    begin = time.perf_counter()
    received, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, setup.tokens, setup.experts, use_fp8=fp8)
    dispatched = time.perf_counter() - begin
    y = buffer.get_next_low_latency_combine_buffer(handle)
    for expert, count in enumerate(counts.tolist()):
        if isinstance(received, tuple):
            y[expert, :count] = dequantise(received[0][expert, :count], received[1][expert, :count]).bfloat16()
        else:
            y[expert, :count] = received[expert, :count]
    dist.barrier()
    begin = time.perf_counter()
    combined, _, _ = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True)
    return dispatched, time.perf_counter() - begin, combined


def high_throughput(
    buffer: Buffer, setup: Setup, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[float, float, torch.Tensor]:
    """The same by the other mode: its rows are weighted at their experts, outside of what is timed."""
    begin = time.perf_counter()
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, setup.experts)
    received, _, received_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )
    dispatched = time.perf_counter() - begin
    assert received_weights is not None
    assert handle is not None
    received *= received_weights.sum(1, keepdim=True).bfloat16()
    dist.barrier()
    begin = time.perf_counter()
    combined, _, _ = buffer.combine(received, handle)
    return dispatched, time.perf_counter() - begin, combined


def measure(rank: Rank, setup: Setup) -> dict[str, Any]:
    """What a rank does: seconds by arm, and the largest difference from what was sent."""
    node_of = [one // setup.ranks_per_node for one in range(setup.ranks)]
    hint = Buffer.get_low_latency_rdma_size_hint(setup.tokens, setup.hidden, setup.ranks, setup.experts)
    buffer = Buffer(
        dist.group.WORLD, 64 << 20, hint, low_latency_mode=True, node_of=node_of, provider=setup.provider, explicitly_destroy=True
    )
    random = torch.Generator().manual_seed(rank.rank)
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    worst = dict.fromkeys(ARMS, 0.0)
    for iteration in range(setup.iterations + 3):
        x = torch.randn((setup.tokens, setup.hidden), generator=random).bfloat16()
        ids = torch.rand((setup.tokens, setup.experts), generator=random).argsort(1)[:, : setup.topk]
        weights = torch.rand((setup.tokens, setup.topk), generator=random)
        for arm in ARMS:
            dist.barrier()
            if arm == "ht_bf16":
                dispatched, combined_in, combined = high_throughput(buffer, setup, x, ids, weights)
            else:
                dispatched, combined_in, combined = low_latency(buffer, setup, x, ids, weights, arm == "ll_fp8")
            if iteration >= 3:
                seconds[arm].append((dispatched, combined_in))
            worst[arm] = max(worst[arm], difference(combined, x.float() * weights.sum(1, keepdim=True)))
    buffer.destroy()
    return {"seconds": seconds, "worst": worst}


def main() -> int:
    """Measure one shape and report it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("ranks", 8),
        ("ranks-per-node", 4),
        ("tokens", 32),
        ("hidden", 7168),
        ("experts", 64),
        ("topk", 8),
        ("iterations", 30),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--provider", default="tcp")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    setup = Setup(**{name: value for name, value in vars(arguments).items() if name != "json"})
    measured = launch(measure, (setup,), setup.ranks, timeout_s=170)
    report = Report("benchmarks/low_latency.py", vars(setup))
    labels = {name: value for name, value in vars(setup).items() if name != "iterations"}
    for arm in ARMS:
        worst = max(one["worst"][arm] for one in measured)
        good = worst < (TOLERANCE[arm] if arm != "ht_bf16" else 1e-4)  # its weights are rounded to bf16 here
        mode, dtype = arm.split("_")
        report.add("verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED, mode=mode, dtype=dtype, **labels)
        for place, name in enumerate(("dispatch_us", "combine_us")):
            slowest = [max(one["seconds"][arm][at][place] for one in measured) for at in range(setup.iterations)]
            report.add(name, statistics.median(slowest) * 1e6, "us", mode=mode, dtype=dtype, **labels)
        totals = [max(sum(one["seconds"][arm][at]) for one in measured) for at in range(setup.iterations)]
        report.add("total_us", statistics.median(totals) * 1e6, "us", mode=mode, dtype=dtype, **labels)
        print(f"{arm}: total {statistics.median(totals) * 1e6:.0f} us, verified {good} ({worst:.1e})")
    report.write(arguments.json)
    return int(report.exit_status())


if __name__ == "__main__":
    sys.exit(main())
