"""Time writes of `expertwire.fabric` between two processes: the async path, its own fallback, and the raw ceiling, in one run.

The three take turns, round by round, with the same library, the same memory sizes and delivery-complete writes:
  raw    one loop over libfabric in a process of its own that shares no code with the engine (csrc/raw/raw_loop.cpp)
  async  batches of writes given to an endpoint, as many in flight as the window says
  sync   the same with EXPERTWIRE_SYNC_WRITES=1: a window's writes, a wait for all of them, the next window's
All go round the same 64 places (32 at 1 MiB), whatever the window: so they differ in the window, and not in what the caches hold.
A figure is the median over the rounds; `low` and `high` are the least and the largest. GB/s are per direction. `wire_utilization` and
`message_rate_utilization` are async over the raw loop at the best of its windows. Every payload is checked outside of the timed window.

  expertwire bench fabric                                        four sizes, windows 1 and 64, one and two directions: under a minute
  expertwire bench fabric --bytes 7168 --window 256 --direction uni
  expertwire bench fabric --all --json fabric.json               windows 1, 2, 4 to 512, both directions: some minutes
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.lists import whole_numbers
from expertwire.cli.report import Report, RowStatus, format_value, options, terminal
from expertwire.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from rich.table import Table

    from expertwire.cli.bench.fabric_arms import Measured, Sample

BYTES = (4096, 7168, 65_536, 1 << 20)
WINDOWS = (1, 64)
ALL_WINDOWS = tuple(2**power for power in range(10))
RAW_WINDOWS = (16, 64, 256)  # the raw loop takes the best of these and of those asked for
BYTES_MAX = 16 << 20
ARMS = ("raw", "async", "sync")


@dataclass(frozen=True)
class Shape:
    """One combination that is measured. Windows count writes in flight."""

    nbytes: int
    window: int
    direction: str  # uni: rank 0 sends; bi: both do


@dataclass(frozen=True)
class Setup:
    """What to measure; the same on both ranks."""

    provider: str
    shapes: tuple[Shape, ...]
    seconds: float  # of one sample
    iterations: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire bench fabric`."""
    parser.add_argument("--provider", default="tcp", help="what to measure: tcp, shm, verbs, efa, cxi or a libfabric name (default tcp)")
    parser.add_argument("--bytes", metavar="N,…", help=f"sizes of a write (default {','.join(map(str, BYTES))})")
    parser.add_argument("--window", metavar="N,…", help="writes in flight (default 1 and 64; in two directions 64)")
    parser.add_argument("--direction", choices=("uni", "bi"), help="one sends, or both do (default: both ways of measuring)")
    parser.add_argument("--all", action="store_true", help=f"windows {', '.join(map(str, ALL_WINDOWS))}, unless --window says otherwise")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one sample (default 0.1)")
    parser.add_argument("--iterations", type=int, default=5, help="samples of each engine and combination (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the payload (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts there (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file."""
    setup = parse(args)
    if setup.provider == "local":
        raise UnavailableError("--provider is 'local', which has no wire: load and store have no raw loop to be compared with")
    report = Report("bench fabric", {**asdict(setup), "options": options(args)})
    from expertwire.cli.bench.fabric_arms import measure, steps
    from expertwire.cli.launch import launch
    from expertwire.cli.progress import RankProgress

    with RankProgress(2) as progress:
        measured = launch(measure, (setup,), 2, on_progress=progress.update, timeout_s=120 + 10 * setup.seconds * steps(setup))
    add_rows(report, setup, measured)
    report.write(args.json, args.html)
    terminal().print(table(report, f"writes between two processes, {setup.provider} ({measured[0].provider}); GB/s per direction"))
    for rank, one in enumerate(measured):
        for fault in one.faults:
            print(f"rank {rank}: {fault}", file=sys.stderr)
    return report.exit_status()


def table(report: Report, title: str) -> Table:
    """One line per combination; the file has the spread and the rest."""
    from rich.table import Table

    heads = {
        "raw_GBps": "raw",
        "async_GBps": "async",
        "sync_GBps": "sync",
        "wire_utilization": "of raw's best",
        "over_raw_same_window": "of raw",
        "async_over_sync": "over sync",
        "post_ns": "post, ns",
        "status_check_ns": "status, ns",
    }
    found = Table("bytes", "window", "direction", "verified", *heads.values(), title=title, title_justify="left")
    by_shape: dict[tuple[str, ...], dict[str, float | None]] = {}
    for row in report.rows:
        shape = tuple(str(row.labels[label]) for label in ("bytes", "window", "direction"))
        by_shape.setdefault(shape, {})[row.name] = row.value
    for shape, values in by_shape.items():
        cells = [format_value(values[name] or 0.0) for name in heads]
        found.add_row(*shape, "yes" if values["verified"] else "NO", *cells, style="" if values["verified"] else "bold red")
    return found


def parse(args: argparse.Namespace) -> Setup:
    """Check the numbers; an error names the option, its value and the limit."""
    if not 0.001 <= args.seconds <= 60:
        raise InvalidArgumentError(f"--seconds is {args.seconds}; a sample takes 0.001 to 60")
    if args.iterations < 1:
        raise InvalidArgumentError(f"--iterations is {args.iterations}; the least is 1")
    if args.seed < 0:
        raise InvalidArgumentError(f"--seed is {args.seed}; the least is 0")
    sizes = numbers("--bytes", args.bytes, BYTES_MAX) if args.bytes else BYTES
    if odd := [size for size in sizes if size % 8]:
        raise InvalidArgumentError(f"--bytes names {odd[0]}; the payload is made of words of 8")
    windows = numbers("--window", args.window, 512) if args.window else ALL_WINDOWS if args.all else ()
    directions = (args.direction,) if args.direction else ("uni", "bi")
    shapes = [
        Shape(size, window, direction)
        for size in sizes
        for direction in directions
        for window in windows or (WINDOWS if direction == "uni" or args.direction else WINDOWS[-1:])
    ]
    return Setup(args.provider, tuple(shapes), args.seconds, args.iterations, args.seed)


def numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """`4096` or `4096,65536`: whole numbers from 1 to `most`, each once."""
    values = tuple(dict.fromkeys(whole_numbers(option, text)))
    if wrong := [value for value in values if not 1 <= value <= most]:
        raise InvalidArgumentError(f"{option} names {wrong[0]}; it must be 1 to {most}")
    return values


def raw_shapes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The combinations at which the raw loop is measured: more than those asked for, since its best is what counts."""
    every = dict.fromkeys(shapes)
    for shape in shapes:
        every.update(dict.fromkeys(Shape(shape.nbytes, window, shape.direction) for window in RAW_WINDOWS))
    return tuple(every)


def rates(measured: list[Measured], arm: str, shape: Shape) -> list[float]:
    """GB/s per direction, by round: the mean of the sides that send."""
    senders = measured[:1] if shape.direction == "uni" else measured
    rounds: list[tuple[Sample, ...]] = list(zip(*(one.samples[arm, shape] for one in senders), strict=True))
    return [statistics.mean(sample.operations * shape.nbytes / sample.seconds / 1e9 for sample in sides) for sides in rounds]


def add_rows(report: Report, setup: Setup, measured: list[Measured]) -> None:
    """Turn both sides' samples into the rows of SPEC section 5."""
    raw = {shape: rates(measured, "raw", shape) for shape in raw_shapes(setup.shapes)}
    for shape in setup.shapes:
        labels: dict[str, Any] = {
            "provider": setup.provider,
            "bytes": shape.nbytes,
            "window": shape.window,
            "direction": shape.direction,
        }
        peers = [one for one in raw if (one.nbytes, one.direction) == (shape.nbytes, shape.direction)]
        best = max(peers, key=lambda one: statistics.median(raw[one]))
        ours = {arm: rates(measured, arm, shape) for arm in ("async", "sync")}
        wrong = any(one.wrong[arm, shape] for one in measured for arm in ARMS)
        report.add("verified", int(not wrong), "", RowStatus.FAILED if wrong else RowStatus.OK, **labels)
        for name, rounds in (("raw", raw[shape]), *ours.items()):
            spread: dict[str, Any] = {"low": round(min(rounds), 4), "high": round(max(rounds), 4)}
            if name == "raw":
                counted = measured[0].samples["raw", shape]
                spread.update(posts=sum(one.posts for one in counted), polls=sum(one.polls for one in counted))
            report.add(f"{name}_GBps", round(statistics.median(rounds), 4), "GB/s", **labels, **spread)
        middle = statistics.median(ours["async"])
        ceiling = statistics.median(raw[best])
        report.add("wire_utilization", round(middle / ceiling, 3), "", **labels, raw_window=best.window)
        report.add("message_rate_utilization", round(middle / ceiling, 3), "", **labels, raw_window=best.window)
        report.add("over_raw_same_window", round(middle / statistics.median(raw[shape]), 3), "×", **labels)
        report.add("async_over_sync", round(middle / statistics.median(ours["sync"]), 3), "×", **labels)
        posted = measured[0].samples["async", shape]
        report.add("post_ns", round(statistics.median(one.post_ns for one in posted), 1), "ns", **labels)
        report.add("status_check_ns", round(statistics.median(one.status_check_ns for one in posted), 1), "ns", **labels)
