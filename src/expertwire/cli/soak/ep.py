"""Dispatches and combines without end between real processes: random shapes, every payload checked against what every rank can derive.

In every iteration the ranks do one or a few exchanges whose phases are interleaved: skewed routing, ranks without a token, FP8, handles
used again, `num_worst_tokens` that is ample, exact or too small, a Buffer so small that rows go in rounds, receive hooks, zero copy.
With --mode both, both modes alternate on one Buffer and on two. Every row, id, weight, scale, count and sum is compared bit for bit.
Equal --mode, --ranks, --ranks-per-node, --seed and --iterations give an equal hash of all payloads.
With --seeds N, N seeds come one after the other, each with Buffers of its own and a row for its hash: the one that it has alone.

  expertwire soak ep --mode ht --ranks 8 --ranks-per-node 4 --seconds 2100 --seeds 84    35 minutes
  expertwire soak ep --mode ll --iterations 12000 --hash                                 a fixed amount of work, and the hash of it
  EXPERTWIRE_MAX_OUTSTANDING=4 FI_OFI_RXM_TX_SIZE=1 FI_OFI_RXM_MSG_TX_SIZE=1 FI_OFI_RXM_MSG_RX_SIZE=8 expertwire soak ep    back-pressure
  EXPERTWIRE_SYNC_WRITES=1 expertwire soak ep                                            the synchronous fallback
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.report import Exit, Report, RowStatus, options, terminal
from expertwire.cli.soak import fabric
from expertwire.cli.soak.ep_plan import MODES
from expertwire.errors import ExpertwireError, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from expertwire.cli.launch import RankError
    from expertwire.cli.progress import RankProgress
    from expertwire.cli.soak.ep_worker import Outcome, Setup

SEEDS_MAX = 1_000_000
SEED_GRACE_S = 5.0  # to make and close its Buffers, beyond the time asked for
MODE_NAMES = {"ht": "high_throughput", "ll": "low_latency", "both": "both"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire soak ep`."""
    parser.add_argument("--mode", choices=MODES, default="both", help="high throughput, low latency, or both interleaved (default both)")
    parser.add_argument("--ranks", type=int, default=4, help=f"processes, 2 to {fabric.RANKS_MAX} (default 4)")
    parser.add_argument(
        "--ranks-per-node", type=int, default=2, help="ranks that count as one node (default 2); the last node may be smaller"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--iterations", type=int, default=0, help="so many iterations, whatever --seconds says")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on, which share --seconds or --iterations (default 1)")
    parser.add_argument("--hash", action="store_true", help="print the hash of all payloads, `payload_hash H`, as the last line")
    parser.add_argument("--provider", choices=("tcp", "local"), default="tcp", help="what carries rows between nodes (default tcp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")


def run(args: argparse.Namespace) -> int:
    """Soak, print the table, write the file."""
    fabric.check(args)
    if args.ranks_per_node < 1:
        raise InvalidArgumentError(f"--ranks-per-node is {args.ranks_per_node}; the least is 1")
    if not 1 <= args.seeds <= SEEDS_MAX:
        raise InvalidArgumentError(f"--seeds is {args.seeds}; it must be 1 to {SEEDS_MAX}")
    from expertwire.cli.launch import RankError, launch
    from expertwire.cli.progress import RankProgress
    from expertwire.cli.soak.ep_worker import Setup, soak
    from expertwire.fabric.config import Settings

    node_of = tuple(rank // args.ranks_per_node for rank in range(args.ranks))
    setup = Setup(args.mode, node_of, args.provider, args.seed, args.seconds, args.iterations, args.seeds)
    report = Report("soak ep", {**asdict(setup), "settings": Settings.from_environment().given(), "options": options(args)})
    limit_s = (
        fabric.GRACE_S + setup.seeds * SEED_GRACE_S + (setup.iterations * fabric.ITERATION_S_MAX if setup.iterations else setup.seconds)
    )
    with RankProgress(setup.ranks) as progress:
        try:
            outcomes = launch(soak, (setup,), setup.ranks, on_progress=speaker(progress), timeout_s=limit_s)
        except (UnavailableError, InvalidArgumentError):
            raise
        except ExpertwireError as error:
            report.add("failures", 1, "", RowStatus.FAILED, **labels(setup), why=str(error).partition("\n")[0])
            report.write(args.json)
            print(blame(error) if isinstance(error, RankError) else f"expertwire: {error}", file=sys.stderr, flush=True)
            return Exit.FAILED
    digest = add_rows(report, outcomes, setup)
    report.write(args.json)
    shown = replace(report, rows=[row for row in report.rows if not row.labels.get("part")])  # a row for each seed is for the file
    terminal().print(shown.table(f"{setup.ranks} ranks as nodes of {args.ranks_per_node}, {args.mode}, seed {setup.seed}"))
    if args.hash:
        print(f"payload_hash {digest}", flush=True)
    return report.exit_status()


def speaker(progress: RankProgress) -> Callable[[int, str, int, int], None]:
    """What `launch` calls: `rank R pid P` and `iteration N` on stdout, a failure as `rank R: <Error>: …` on stderr, at once and whole."""
    from expertwire.cli.soak.ep_worker import FAILED

    def show(rank: int, what: str, done: int, total: int) -> None:
        if what in ("pid", "iteration"):
            line, stream = f"rank {rank} pid {done}" if what == "pid" else f"iteration {done}", sys.stdout
        elif what.startswith(FAILED):
            line, stream = f"rank {rank}: {what.removeprefix(FAILED)}", sys.stderr
        else:
            progress.update(rank, what, done, total)
            return
        with contextlib.suppress(OSError):  # the reader has gone: said in the end, the soak goes on
            print(line, file=stream, flush=True)

    return show


def blame(error: RankError) -> str:
    """`rank R: <Error>: …` of what ended the run, and under it what the other ranks say of that and the rank's own trace."""
    first, _, rest = str(error).partition("\n")
    said = first.removeprefix(f"rank {error.rank} failed: ")
    named = said if said.split(":")[0].isidentifier() else f"{type(error).__name__}: {said}"
    return f"rank {error.rank}: {named}\n{rest}".rstrip()


def labels(setup: Setup) -> dict[str, Any]:
    """What every row says of the run."""
    return {
        "device": "cpu", "ranks": setup.ranks, "ranks_per_node": setup.node_of.count(0), "mode": MODE_NAMES[setup.mode],
        "provider": setup.provider, "seed": setup.seed,
    }  # fmt: skip


def add_rows(report: Report, outcomes: list[Outcome], setup: Setup) -> str:
    """Sums over the ranks. Returns the hash of all payloads, by rank, then in the order in which each checked them."""
    common = labels(setup)
    failed = sum(outcome.failed for outcome in outcomes)
    calls: Counter[str] = sum((outcome.calls for outcome in outcomes), Counter())
    digest = add_hash(report, outcomes, common)
    if setup.seeds > 1:
        report.add("seeds", setup.seeds, "", **common)
        for number in range(setup.seeds):
            add_hash(report, [outcome.parts[number] for outcome in outcomes], {**common, "seed": setup.seed + number, "part": True})
    report.add("payload_bytes", sum(outcome.payload_bytes for outcome in outcomes), "B", **common)
    report.add("faults_injected", 0, "", **common)  # here the load is the trouble; `soak fabric` injects faults
    for what, count in sorted(calls.items()):
        report.add("calls", count, "", **common, kind=what)
    report.add("failures", failed, "", RowStatus.FAILED if failed else RowStatus.OK, **common)
    return digest


def add_hash(report: Report, outcomes: list[Outcome], common: dict[str, Any]) -> str:
    """Iterations, and the hash of all their payloads, which is returned."""
    digest = hashlib.blake2b("".join(outcome.digest for outcome in outcomes).encode(), digest_size=32).hexdigest()
    report.add("iterations", min(outcome.iterations for outcome in outcomes), "", **common)
    report.add("payload_hash", int(digest[: fabric.HASH_VALUE_DIGITS], 16), "", **common, blake2b=digest)
    return digest
