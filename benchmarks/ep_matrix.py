"""Verifies `expertwire.ep.Buffer` over many shapes: ranks, nodes, hidden sizes, top-k, routings, uneven tokens and experts.

    python benchmarks/ep_matrix.py [--provider tcp] [--only RANKSxPER_NODE …] [--json FILE]

One job of processes for each (ranks, ranks per node), shapes looped inside, a new Buffer for each shape. Every received row, id, weight and
sum is checked. Prints one line for each job; the exit status is 0 only when every shape was verified.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from expertwire.cli.bench.arms import make_arms
from expertwire.cli.bench.ep import Setup, make_inputs
from expertwire.cli.bench.paired import expect, measure
from expertwire.cli.launch import Rank, RankError, launch
from expertwire.cli.report import Report, RowStatus

JOBS = (
    (1, 1),
    (2, 1),
    (2, 2),
    (3, 1),
    (3, 2),
    (3, 3),
    (4, 1),
    (4, 2),
    (4, 4),
    (5, 2),
    (5, 3),
    (8, 1),
    (8, 3),
    (8, 4),
    (12, 1),
    (12, 2),
    (12, 3),
    (12, 4),
)


def shapes(ranks: int, per_node: int, provider: str | None) -> list[Setup]:
    """The shapes of one job. E is never a multiple of R where that can be, and once smaller than R."""
    base = Setup(
        node_of=tuple(rank // per_node for rank in range(ranks)),
        tokens=(33,) * ranks,
        hidden=256,
        experts=2 * ranks + 1,
        topk=2,
        routing="uniform",
        provider=provider,
        against=(),
        iterations=2,
        warmup=0,
        seed=1,
    )
    ragged = tuple((17 * rank) % 61 for rank in range(ranks))  # rank 0 has none
    return [
        *(replace(base, hidden=hidden) for hidden in (8, 2880, 7168, 8192)),
        *(replace(base, topk=topk, experts=max(32, 3 * ranks + 1)) for topk in (1, 8, 9, 16)),
        *(replace(base, routing=routing) for routing in ("skewed", "duplicates", "holes", "none")),
        replace(base, tokens=ragged),
        replace(base, tokens=ragged[::-1], routing="holes", topk=5),
        replace(base, tokens=(0,) * ranks),
        replace(base, experts=max(1, ranks - 1), topk=1),
        replace(base, experts=max(1, ranks // 2), topk=3, routing="duplicates"),
        replace(base, tokens=(700,) * ranks, hidden=2880, topk=8, experts=64 + ranks // 2),
    ]


def verify(rank: Rank, setups: list[Setup]) -> list[list[str]]:
    """Faults of each shape on this rank."""
    faults = []
    for number, setup in enumerate(setups):
        inputs = [make_inputs(setup, source) for source in range(rank.size)]
        expected = expect(rank.rank, rank.size, setup.experts, inputs.__getitem__)
        arms = make_arms(setup, expected.rows.shape[0])
        measured = measure(rank, arms, inputs[rank.rank], expected, list(setup.node_of), setup.iterations, setup.warmup)
        faults.append([fault for samples in measured.samples for fault in samples.faults])
        for arm in arms:
            arm.close()
        rank.progress("shapes", number + 1, len(setups))
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", help="what carries rows between nodes")
    parser.add_argument("--only", nargs="*", metavar="RANKSxPER_NODE", help="these jobs alone, for example 8x4")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report = Report("ep_matrix", {"provider": arguments.provider or "auto"})
    for ranks, per_node in JOBS:
        if arguments.only and f"{ranks}x{per_node}" not in arguments.only:
            continue
        setups = shapes(ranks, per_node, arguments.provider)
        begin = time.monotonic()
        try:
            faults = launch(verify, (setups,), ranks, timeout_s=300)
            bad = [
                f"{setups[number]}: rank {rank}: {fault}"
                for rank, by_shape in enumerate(faults)
                for number, one in enumerate(by_shape)
                for fault in one
            ]
        except RankError as error:
            bad = [str(error)]
        status = RowStatus.FAILED if bad else RowStatus.OK
        report.add("verified", int(not bad), "", status, ranks=ranks, ranks_per_node=per_node, shapes=len(setups))
        print(f"{ranks:2} ranks, nodes of {per_node}: {len(setups)} shapes {status.value} in {time.monotonic() - begin:.1f} s", flush=True)
        for fault in bad[:10]:
            print(f"  {fault}", file=sys.stderr)
    report.write(arguments.json)
    return report.exit_status()


if __name__ == "__main__":
    sys.exit(main())
