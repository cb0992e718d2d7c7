"""Random traffic between real processes, with faults injected on purpose; every byte is checked.

In every iteration each rank writes to and reads from every other: random sizes, offsets, lanes, chunks, signals of every scope and
notifications, submitted from one thread or two, with 4 to 512 operations allowed in flight. Payloads follow from (seed, iteration, source,
target, byte offset). They are checked at each signal that covers them and once more after a barrier, with every byte beside them.
Injected: requests cancelled, keys revoked, ranges exceeded, regions closed in use, ranks that leave and come back.
Equal --seed and --iterations give an equal hash of all payloads.

  expertwire soak fabric --seconds 2100 --seed 7      35 minutes
  expertwire soak fabric --iterations 40 --ranks 4    a fixed amount of work
  expertwire soak fabric --delivery-complete alternate    on and off in turn; off with counted immediates where a gate needs it
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.interfaces import Sent, sent_by
from expertwire.cli.report import Exit, Report, RowStatus, options, terminal
from expertwire.cli.soak.limits import check_common
from expertwire.errors import ExpertwireError, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from expertwire.cli.soak.worker import Outcome, Setup

RANKS_MAX = 64
GRACE_S = 300.0  # beyond the time asked for
ITERATION_S_MAX = 30.0
HASH_VALUE_DIGITS = 13  # of the hash as a number: what a double holds exactly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire soak fabric`."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--iterations", type=int, default=0, help="so many iterations, whatever --seconds says")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (default 1)")
    parser.add_argument("--ranks", type=int, default=3, help=f"processes, 2 to {RANKS_MAX} (default 3)")
    parser.add_argument("--provider", choices=("tcp", "local"), default="tcp", help="what carries the bytes (default tcp)")
    parser.add_argument(
        "--delivery-complete",
        choices=("auto", "on", "off", "alternate"),
        default="auto",
        help="of the writes; alternate: endpoints opened anew every few iterations, on and off in turn (default auto)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")


def run(args: argparse.Namespace) -> int:
    """Soak, print the table, write the file."""
    check(args)
    from expertwire.cli.launch import launch
    from expertwire.cli.progress import RankProgress
    from expertwire.cli.soak.worker import Setup, soak

    setup = Setup(args.ranks, args.provider, args.seed, args.seconds, args.iterations, args.delivery_complete)
    report = Report("soak fabric", {**asdict(setup), "options": options(args)})
    setup, why = without_gate(setup)
    if why:
        report.add("failures", None, "", RowStatus.SKIPPED, **labels(setup), why=why)
        report.write(args.json)
        print(f"expertwire: --delivery-complete {setup.delivery_complete}: {why}", file=sys.stderr)
        return report.exit_status()
    interface = carried_by(setup)
    before = sent_by(interface)
    limit_s = GRACE_S + (setup.iterations * ITERATION_S_MAX if setup.iterations else setup.seconds)
    with RankProgress(setup.ranks) as progress:

        def show(rank: int, what: str, done: int, total: int) -> None:
            if what in ("pid", "iteration"):
                with contextlib.suppress(OSError):  # the reader has gone: said in the end, the soak goes on
                    print(f"rank {rank} pid {done}" if what == "pid" else f"iteration {done}", flush=True)
            else:
                progress.update(rank, what, done, total)

        try:
            outcomes = launch(soak, (setup,), setup.ranks, on_progress=show, timeout_s=limit_s)
        except (UnavailableError, InvalidArgumentError):
            raise
        except ExpertwireError as error:
            report.add("failures", 1, "", RowStatus.FAILED, **labels(setup), why=str(error).partition("\n")[0])
            report.write(args.json)
            print(f"expertwire: {error}", file=sys.stderr)
            return Exit.FAILED
    add_rows(report, outcomes, setup)
    if interface:
        add_interface(report, outcomes, setup, interface, sent_by(interface) - before)
    report.write(args.json)
    terminal().print(report.table(f"{setup.ranks} ranks over {setup.provider}, seed {setup.seed}"))
    for outcome in outcomes:
        for failure in outcome.failures:
            print(failure, file=sys.stderr)
    return report.exit_status()


def check(args: argparse.Namespace) -> None:
    """An error names the option, its value and the limit."""
    check_common(args, "ranks", RANKS_MAX)


def without_gate(setup: Setup) -> tuple[Setup, str]:
    """The setup with the ordering that its endpoints take without delivery-complete, and why there is none; "" where there is.

    The provider's own where that gates on nothing; else the target counts the writes (class C) and acknowledges each, which needs none.
    """
    if setup.delivery_complete not in ("off", "alternate"):
        return setup, ""
    from expertwire.fabric import Endpoint
    from expertwire.fabric.config import Settings

    settings = replace(Settings.from_environment(), provider=setup.provider, delivery_complete="0")
    words = []
    for ordering in dict.fromkeys((settings.ordering, "counted")):
        try:
            Endpoint(0, 2, replace(settings, ordering=ordering, trust_immediates=True)).close()
        except ExpertwireError as error:
            words.append(str(error))
        else:
            return replace(setup, ordering_off=ordering), ""
    return setup, "; ".join(dict.fromkeys(words))


def carried_by(setup: Setup) -> str:
    """The interface whose counters the kernel keeps of this traffic; empty where no packet is sent."""
    if setup.provider != "tcp":
        return ""
    from expertwire.fabric.config import Settings
    from expertwire.fabric.discover import choose_interface

    return choose_interface(Settings.from_environment(), 1).name


def add_interface(report: Report, outcomes: list[Outcome], setup: Setup, interface: str, sent: Sent) -> None:
    """What the kernel says that the interface has sent beside what we say; others' traffic is in it."""
    payload = sum(outcome.payload_bytes for outcome in outcomes)
    common = {**labels(setup), "interface": interface}
    report.add("interface_bytes", sent.nbytes, "B", **common)
    report.add("interface_packets", sent.packets, "", **common)
    if payload:
        report.add("interface_over_payload", round(sent.nbytes / payload, 3), "×", **common)


def labels(setup: Setup) -> dict[str, Any]:
    """What every row says of the run."""
    common = {"device": "cpu", "ranks": setup.ranks, "provider": setup.provider, "seed": setup.seed}
    if setup.delivery_complete != "auto":
        common["delivery_complete"] = setup.delivery_complete
    return common if setup.ordering_off == "auto" else {**common, "ordering_off": setup.ordering_off}


def add_rows(report: Report, outcomes: list[Outcome], setup: Setup) -> None:
    """Sums over the ranks."""
    common = labels(setup)
    injected: Counter[str] = sum((outcome.injected for outcome in outcomes), Counter())
    counted: Counter[str] = sum((outcome.counted for outcome in outcomes), Counter())
    failed = sum(outcome.failed for outcome in outcomes)
    digest = hashlib.blake2b("".join(outcome.digest for outcome in outcomes).encode(), digest_size=32).hexdigest()
    report.add("iterations", min(outcome.iterations for outcome in outcomes), "", **common)
    report.add("payload_hash", int(digest[:HASH_VALUE_DIGITS], 16), "", **common, blake2b=digest)
    report.add("payload_bytes", sum(outcome.payload_bytes for outcome in outcomes), "B", **common)
    report.add("requests", sum(outcome.requests for outcome in outcomes), "", **common)
    report.add("faults_injected", injected.total(), "", **common)
    for what, count in sorted(injected.items()):
        report.add("faults_injected_by_kind", count, "", **common, kind=what)
    for what, count in sorted(counted.items()):
        report.add(what, count, "", **common)
    report.add("failures", failed, "", RowStatus.FAILED if failed else RowStatus.OK, **common)
