"""Time transfers of several engines between two fresh processes, alike, in one run: ours, NIXL's, Mooncake's, where they are installed.

An arm is an engine behind one interface. Each arm has --runs pairs of processes, in rotating order, and each pair a fresh directory to meet
in. The source has one agent; the target process has one, or two where small transfers go to another peer than the bulk (--peer other).
In each pair, for READ and WRITE, --warmup and then --iterations times:
  single      one transfer at a time, for each of --bytes; and bandwidth, 8 in flight
  mixed       a bulk transfer, then at once an independent one of the least of --bytes; and each of the two alone
Latency is from the caller's post to the status that it reads. Rows have run 1, 2, …; those of run "median" are the medians of them.
Every payload follows from (source, epoch) and the byte's offset behind an 8-byte marker of the transfer, and is checked outside of the
timed stretches. No artificial delay, fault or tracing is in a timed stretch.

  expertwire bench transfer                                        what is installed, over tcp: some minutes
  expertwire bench transfer --provider local                       the path inside one host, of engines that have one
  expertwire bench transfer --engine expertwire,nixl-ucx --bulk-bytes 33554432 --op read --json transfer.json
  expertwire bench transfer --engine expertwire --role target --meet HOST:PORT    across hosts; on the other `--role source`
  expertwire bench transfer --engine expertwire --role target-fault --meet HOST:PORT    the same with a registration that was taken back
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.bench import turns
from expertwire.cli.bench.fabric import numbers
from expertwire.cli.bench.transfer_engines import ENGINES
from expertwire.cli.bench.transfer_plan import OPERATIONS, PEERS, Settings, figures
from expertwire.cli.report import Exit, Report, RowStatus, format_value, options, terminal
from expertwire.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from rich.table import Table

    from expertwire.cli.bench.transfer_pair import Ended
    from expertwire.cli.bench.transfer_role import Outcome

BYTES = (4096, 2 << 20)
BULK_BYTES = (2 << 20,)
BYTES_MAX = 256 << 20
BYTES_MIN = 16
RUNS_MAX = 99
PAIR_S = 60.0
TRANSFER_S_MAX = 0.25  # what one of the slowest arm's may take on a busy machine, with its payload made and checked
ROLES = ("source", "target", "target-fault")
MEDIAN = "median"


@dataclass(frozen=True)
class Asked:
    """What the command line means."""

    engines: tuple[str, ...]
    by_name: bool  # an engine that is missing is then told as skipped
    settings: Settings  # with the first of the engines
    runs: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire bench transfer`."""
    parser.add_argument("--engine", metavar="NAME,…", help=f"of {', '.join(ENGINES)} (default: those that are installed)")
    parser.add_argument("--provider", choices=("tcp", "local"), default="tcp", help="local: the engine's own path in a host (default tcp)")
    parser.add_argument("--op", metavar="OP,…", default=",".join(OPERATIONS), help="read and write (default both)")
    parser.add_argument("--bytes", metavar="N,…", help="of single transfers; the least is that beside bulk (default 4096 and 2 MiB)")
    parser.add_argument("--bulk-bytes", metavar="N,…", help="of the bulk (default 2 MiB)")
    parser.add_argument(
        "--peer", metavar="WHOSE,…", default=",".join(PEERS), help="whom small ones go to: same as the bulk, or other (default both)"
    )
    parser.add_argument("--lanes", type=int, choices=(1, 2), default=2, help="of ours to a peer; 1: one queue pair each (default 2)")
    parser.add_argument("--runs", type=int, default=3, help="pairs of processes of each arm (default 3)")
    parser.add_argument("--warmup", type=int, default=20, help="iterations before the measured ones (default 20)")
    parser.add_argument("--iterations", type=int, default=100, help="that are measured (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the payload (default 1)")
    parser.add_argument("--role", choices=ROLES, help="be one process of a pair of one engine, and start none")
    parser.add_argument("--meet", metavar="WHERE", help="with --role: HOST:PORT on which the target listens, or a directory of this host")
    parser.add_argument("--run", type=int, default=1, help="with --role: the number of the run in the rows (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file; or be one process of a pair."""
    asked = parse(args)
    if args.role:
        return run_role(args, asked)
    from expertwire.cli.bench.transfer_pair import run_pair

    settings = asked.settings
    report = Report("bench transfer", {**asdict(settings), "runs": asked.runs, "options": options(args)})
    labels = {name: {"provider": settings.provider} for name in asked.engines}
    present = turns.present(report, labels, lambda name: ENGINES[name].missing(settings.provider))
    report.config["engines"] = {name: ENGINES[name].identity(settings.provider) for name in present}
    limit_s = PAIR_S + TRANSFER_S_MAX * len(settings.phases()) * (settings.warmup + settings.iterations)
    found: dict[str, list[Ended]] = {}

    def one(number: int, engine: str) -> None:
        found.setdefault(engine, []).append(run_pair(replace(settings, engine=engine), number, limit_s))

    turns.take("pair", present, asked.runs, one)
    for engine, pairs_of in found.items():
        add_rows(report, engine, asked, pairs_of)
    report.write(args.json)
    terminal().print(table(report, f"transfers between two processes, {settings.provider}, medians of {asked.runs} runs"))
    report.tell_what_is_not_ok()
    return report.exit_status()


def parse(args: argparse.Namespace) -> Asked:
    """Check the words and numbers; an error names the option, its value and the limit."""
    engines = words("--engine", args.engine, tuple(ENGINES)) if args.engine else default_engines(args.provider)
    if not engines:
        raise UnavailableError("no engine is installed; `expertwire bench transfer --help` names them")
    for option, value, least, most in (
        ("--runs", args.runs, 1, RUNS_MAX),
        ("--warmup", args.warmup, 0, 10_000),
        ("--iterations", args.iterations, 1, 50_000),
        ("--seed", args.seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise InvalidArgumentError(f"{option} is {value}; it must be {least} to {most}")
    sizes = numbers("--bytes", args.bytes, BYTES_MAX) if args.bytes else BYTES
    bulk = numbers("--bulk-bytes", args.bulk_bytes, BYTES_MAX) if args.bulk_bytes else BULK_BYTES
    for option, values in (("--bytes", sizes), ("--bulk-bytes", bulk)):
        if odd := [value for value in values if value % 8 or value < BYTES_MIN]:
            raise InvalidArgumentError(f"{option} names {odd[0]}; a payload is whole words of 8 bytes, a marker and at least one more")
    if bool(args.role) != bool(args.meet):
        raise InvalidArgumentError("--role and --meet belong together: which process this is, and where it meets the other")
    if args.role and len(engines) != 1:
        raise InvalidArgumentError(f"--role is one process of one pair; --engine names {len(engines)}")
    settings = Settings(
        engines[0], args.provider, words("--op", args.op, OPERATIONS), sizes, bulk, words("--peer", args.peer, PEERS), args.lanes,
        args.warmup, args.iterations, args.seed,
    )  # fmt: skip
    return Asked(engines, bool(args.engine), settings, args.runs)


def words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """`read,write`: each once, each one of `known`."""
    found = tuple(dict.fromkeys(text.split(",")))
    if wrong := [word for word in found if word not in known]:
        raise InvalidArgumentError(f"{option} names {wrong[0]!r}; give one or more of {', '.join(known)}, with commas")
    return found


def default_engines(provider: str) -> tuple[str, ...]:
    """Those that are installed and have such a path."""
    return tuple(name for name, engine in ENGINES.items() if not engine.missing(provider))


# ---- one process of a pair


def run_role(args: argparse.Namespace, asked: Asked) -> int:
    """Be the source or the target. An engine whose processes crash at their end is not given one: the process is over at once."""
    from expertwire.cli.bench.transfer_role import run_source, run_target

    settings, engine = asked.settings, ENGINES[asked.settings.engine]
    if why := engine.missing(settings.provider):
        raise UnavailableError(f"--engine {engine.name}: {why}")
    status: int = Exit.OK
    if args.role == "source":
        report = Report("bench transfer", {**asdict(settings), "engines": {engine.name: engine.identity(settings.provider)}})
        outcome = run_source(settings, args.meet)
        add_outcome(report, settings, outcome, args.run)
        report.write(args.json)
        for fault in outcome.faults:
            print(fault, file=sys.stderr)
        status = report.exit_status()
    else:
        run_target(settings, args.meet, args.role == "target-fault")
    if engine.hard_exit:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def add_outcome(report: Report, settings: Settings, outcome: Outcome, number: int) -> None:
    """The rows of one run, by its source."""
    common: dict[str, Any] = {"engine": settings.engine, "provider": settings.provider, "lanes": settings.lanes, "run": number}
    common["injected"] = "none"  # no delay, fault or tracing in what is timed (X5)
    status = RowStatus.FAILED if outcome.faults else RowStatus.OK
    extra: dict[str, Any] = {"why": outcome.faults[0]} if outcome.faults else {}
    report.add("verified", int(not outcome.faults), "", status, **common, places=outcome.checked, **extra)
    report.add("late_payloads", outcome.late, "", **common)
    for phase in settings.phases():
        if phase.number in outcome.samples:
            for name, (value, unit) in figures(phase, outcome.samples[phase.number]).items():
                report.add(name, value, unit, **common, **phase.labels)
    for operation, what in outcome.refused.items():
        report.add("stale_registration_refused", 1, "", **common, op=operation, what=what)


# ---- rows of all runs


def add_rows(report: Report, engine: str, asked: Asked, ended: list[Ended]) -> None:
    """An engine's rows: verified, clean exits, every run's figures, and the medians."""
    common: dict[str, Any] = {"engine": engine, "provider": asked.settings.provider, "lanes": asked.settings.lanes}
    if all(pair.skipped for pair in ended):
        if asked.by_name:
            report.add("verified", None, "", RowStatus.SKIPPED, **common, why=ended[0].why)
        return
    good = [pair for pair in ended if pair.clean_exits == len(pair.statuses)]
    status = RowStatus.OK if len(good) == len(ended) else RowStatus.FAILED
    why: dict[str, Any] = {"why": "; ".join(pair.why for pair in ended if pair.why)} if status is RowStatus.FAILED else {}
    clean = sum(pair.clean_exits for pair in ended)
    report.add("clean_exits", clean, "", status, **common, processes=sum(len(pair.statuses) for pair in ended), **why)
    by_figure: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in (row for pair in ended for row in pair.rows):
        labels = {key: value for key, value in row.items() if key not in ("name", "value", "unit", "status")}
        report.add(row["name"], row["value"], row["unit"], RowStatus(row["status"]), **labels)
        if row["name"] not in ("verified", "late_payloads"):
            key = (row["name"], *((label, labels[label]) for label in ("op", "bytes", "bulk_bytes", "peer", "injected") if label in labels))
            by_figure.setdefault(key, []).append(row)
    for (name, *told), rows in by_figure.items():
        spread = {"low": min(row["value"] for row in rows), "high": max(row["value"] for row in rows)}
        middle = statistics.median(row["value"] for row in rows)
        report.add(name, middle, rows[0]["unit"], **common, **dict(told), run=MEDIAN, runs=len(rows), **spread)


def table(report: Report, title: str) -> Table:
    """A line for each figure, a column for each engine; the file has the runs."""
    from rich.table import Column, Table

    rows = [row for row in report.rows if row.labels.get("run") == MEDIAN]
    engines = list(dict.fromkeys(str(row.labels["engine"]) for row in rows))
    told = [Column(head, no_wrap=True) for head in ("figure", "op", "bytes", "bulk", "peer")]
    found = Table(*told, *engines, title=title, title_justify="left")
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = (f"{row.name}", *(str(row.labels.get(label, "")) for label in ("op", "bytes", "bulk_bytes", "peer")))
        lines.setdefault(line, {})[str(row.labels["engine"])] = format_value(row.value or 0.0)
    for line, values in lines.items():
        if "_min_" not in line[0]:
            found.add_row(*line, *(values.get(engine, "") for engine in engines))
    return found
