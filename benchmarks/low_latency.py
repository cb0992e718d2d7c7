"""Dispatch and combine of a few tokens in both modes, side by side: what a decoding step pays.

    python benchmarks/low_latency.py [--ranks 8] [--ranks-per-node 4] [--tokens 32] [--hidden 7168] [--experts 64] [--topk 8]
                                     [--iterations 30] [--provider tcp] [--json FILE]

Arms alternate within one run, each iteration begins at a barrier, and its time is that of the slowest rank; `cpu` is the processor time of
all ranks and their threads. In low latency a combine's rows lie in the combine buffer (`zero_copy`) or
elsewhere (`ordinary`). The high-throughput arm's
layout is counted within its dispatch, since the other mode needs none. Experts give back what they got; every sum is checked, outside of
what is timed, against the rows and weights that were sent.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.launch import Rank, launch
from expertwire.cli.report import Report, RowStatus
from expertwire.ep import Buffer
from expertwire.ep.low_latency_reference import dequantise

# Mode, type of the dispatched rows, where combine's rows lie.
ARMS = ("ll_bf16_zero_copy", "ll_bf16_ordinary", "ll_fp8_zero_copy", "ht_bf16_received")
TOLERANCE = {"bf16": 1e-5, "fp8": 9e-4}  # of DeepEP's own tests
Step = tuple[float, float]  # seconds, seconds of processor time


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


def timed(call: Callable[[], Any]) -> tuple[Step, Any]:
    """What a call took, and gave."""
    begin, cpu = time.perf_counter(), time.process_time()
    result = call()
    return (time.perf_counter() - begin, time.process_time() - cpu), result


def low_latency(
    buffer: Buffer, setup: Setup, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fp8: bool, zero_copy: bool
) -> tuple[Step, Step, torch.Tensor]:
    """The dispatch, the combine, and the sums."""
    dispatched, result = timed(lambda: buffer.low_latency_dispatch(x, ids, setup.tokens, setup.experts, use_fp8=fp8))
    received, counts, handle, _, _ = result
    y = buffer.get_next_low_latency_combine_buffer(handle)
    if not zero_copy:
        y = torch.empty_like(y)
    for expert, count in enumerate(counts.tolist()):
        if isinstance(received, tuple):
            y[expert, :count] = dequantise(received[0][expert, :count], received[1][expert, :count]).bfloat16()
        else:
            y[expert, :count] = received[expert, :count]
    dist.barrier()
    combined, result = timed(lambda: buffer.low_latency_combine(y, ids, weights, handle, zero_copy=zero_copy))
    return dispatched, combined, result[0]


def high_throughput(
    buffer: Buffer, setup: Setup, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[Step, Step, torch.Tensor]:
    """The same by the other mode: its rows are weighted at their experts, outside of what is timed."""

    def dispatch() -> Any:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, setup.experts)
        return buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )

    dispatched, result = timed(dispatch)
    received, _, received_weights, _, handle, _ = result
    received *= received_weights.sum(1, keepdim=True).bfloat16()
    dist.barrier()
    combined, result = timed(lambda: buffer.combine(received, handle))
    return dispatched, combined, result[0]


def measure(rank: Rank, setup: Setup) -> dict[str, Any]:
    """What a rank does: seconds by arm, and the largest difference from what was sent."""
    node_of = [one // setup.ranks_per_node for one in range(setup.ranks)]
    hint = Buffer.get_low_latency_rdma_size_hint(setup.tokens, setup.hidden, setup.ranks, setup.experts)
    buffer = Buffer(
        dist.group.WORLD, 64 << 20, hint, low_latency_mode=True, node_of=node_of, provider=setup.provider, explicitly_destroy=True
    )
    random = torch.Generator().manual_seed(rank.rank)
    steps: dict[str, list[tuple[Step, Step]]] = {arm: [] for arm in ARMS}
    worst = dict.fromkeys(ARMS, 0.0)
    for iteration in range(setup.iterations + 3):
        x = torch.randn((setup.tokens, setup.hidden), generator=random).bfloat16()
        ids = torch.rand((setup.tokens, setup.experts), generator=random).argsort(1)[:, : setup.topk]
        weights = torch.rand((setup.tokens, setup.topk), generator=random)
        for arm in ARMS:
            dist.barrier()
            mode, dtype, place = arm.split("_", 2)
            if mode == "ht":
                dispatched, combined, sums = high_throughput(buffer, setup, x, ids, weights)
            else:
                dispatched, combined, sums = low_latency(buffer, setup, x, ids, weights, dtype == "fp8", place == "zero_copy")
            if iteration >= 3:
                steps[arm].append((dispatched, combined))
            worst[arm] = max(worst[arm], difference(sums, x.float() * weights.sum(1, keepdim=True)))
    buffer.destroy()
    return {"steps": steps, "worst": worst}


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
        mode, dtype, place = arm.split("_", 2)
        good = worst < (TOLERANCE[dtype] if mode == "ll" else 1e-4)  # the other mode's weights are rounded to bf16 here
        of_arm = {"mode": mode, "dtype": dtype, "combine_input": place, **labels}
        report.add("verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED, **of_arm)
        shown = []
        for phase, parts in (("dispatch", (0,)), ("combine", (1,)), ("total", (0, 1))):
            steps = [one["steps"][arm] for one in measured]
            wall = statistics.median(max(sum(one[at][part][0] for part in parts) for one in steps) for at in range(setup.iterations))
            cpu = statistics.median(sum(one[at][part][1] for part in parts for one in steps) for at in range(setup.iterations))
            report.add(f"{phase}_us", round(wall * 1e6, 1), "µs", **of_arm)
            report.add(f"{phase}_cpu_us", round(cpu * 1e6, 1), "µs", **of_arm)
            shown.append(f"{phase} {wall * 1e3:.1f} (cpu {cpu * 1e3:.1f})")
        print(f"{arm}: ms: {', '.join(shown)}; verified {good} ({worst:.1e})")
    report.write(arguments.json)
    return int(report.exit_status())


if __name__ == "__main__":
    sys.exit(main())
