"""A dispatch and a combine of many ranks in virtual time, on a network that is not here, beside what was published for it."""

from __future__ import annotations

import argparse
from pathlib import Path

from expertwire.cli.report import Report, RowStatus, terminal
from expertwire.testing.networks import NETWORKS, Kind, Network, Timing, simulate

CALLS: tuple[tuple[Kind, str], ...] = (("dispatch", "fp8"), ("dispatch", "bf16"), ("combine", "bf16"))
SOURCE_TOKENS = 4096  # published figures are of so many tokens a rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `expertwire simulate`."""
    parser.add_argument("--nic", choices=sorted(NETWORKS), default="slingshot", help="whose profile (default slingshot)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks, in whole nodes of the profile (default 8)")
    parser.add_argument("--tokens", type=int, default=SOURCE_TOKENS, help=f"tokens of each rank (default {SOURCE_TOKENS:,})")
    parser.add_argument(
        "--gate", action=argparse.BooleanOptionalAction, default=True, help="hold signals until their rows are delivered (default); or not"
    )
    parser.add_argument("--seed", type=int, default=0, help="of routing and bytes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")


def run(args: argparse.Namespace) -> int:
    """Simulate each call asynchronously and synchronously; FAILED where a byte was wrong."""
    network = NETWORKS[args.nic]
    report = Report("simulate", {"nic": args.nic, "ranks": args.ranks, "tokens": args.tokens, "gate": args.gate, "seed": args.seed})
    wrong: list[str] = []
    for kind, dtype in CALLS:
        timings = {}
        for mode in ("async", "sync"):
            timing = simulate(network, kind, dtype, args.ranks, args.tokens, mode, args.gate, args.seed)
            timings[mode] = timing
            _add(report, network, args, kind, dtype, mode, timing)
            if timing.error:
                wrong.append(f"{kind} {dtype} {mode}: {timing.error.splitlines()[0]}")
        if not timings["async"].error and not timings["sync"].error:
            _compare(report, network, args, kind, dtype, timings)
    report.write(args.json)
    console = terminal()
    console.print(
        report.table(f"{args.ranks} ranks on simulated {args.nic}, {args.tokens:,} tokens each, in virtual time", hide=("gate", "nic"))
    )
    console.print(
        "fitted: the profile's costs were chosen so that these figures come out; the others are predictions. "
        "GB/s count received payload, self-node traffic included."
    )
    for line in wrong:
        console.print(f"FAILED {line}", style="bold red", markup=False)
    return report.exit_status()


def _fitted(network: Network, args: argparse.Namespace) -> bool:
    return bool(args.ranks == network.fitted_ranks and args.tokens == SOURCE_TOKENS)


def _add(report: Report, network: Network, args: argparse.Namespace, kind: Kind, dtype: str, mode: str, timing: Timing) -> None:
    labels = {"nic": network.name, "ranks": args.ranks, "mode": mode, "dtype": dtype, "gate": args.gate, "fitted": _fitted(network, args)}
    status = RowStatus.FAILED if timing.error else RowStatus.OK
    report.add(f"{kind}_us", timing.microseconds, "us", status, **labels)
    report.add(f"{kind}_GBps", timing.gigabytes_per_s, "GB/s", status, **labels)
    published = network.figure(kind, dtype, args.ranks, mode) if args.tokens == SOURCE_TOKENS else None
    if published is None or timing.error:
        return
    figure = f"{kind}_GBps"
    report.add("published", published, "GB/s", figure=figure, **labels)
    report.add("error", abs(timing.gigabytes_per_s / published - 1), "", figure=figure, **labels)


def _compare(report: Report, network: Network, args: argparse.Namespace, kind: Kind, dtype: str, timings: dict[str, Timing]) -> None:
    labels = {"nic": network.name, "ranks": args.ranks, "dtype": dtype, "gate": args.gate, "fitted": _fitted(network, args), "phase": kind}
    ratio = timings["sync"].microseconds / timings["async"].microseconds
    report.add("async_over_sync", ratio, "", **labels)
    fast, slow = (network.figure(kind, dtype, args.ranks, mode) for mode in ("async", "sync"))
    if fast is None or slow is None or args.tokens != SOURCE_TOKENS:
        return
    report.add("published", fast / slow, "", figure="async_over_sync", **labels)
    report.add("error", abs(ratio / (fast / slow) - 1), "", figure="async_over_sync", **labels)
