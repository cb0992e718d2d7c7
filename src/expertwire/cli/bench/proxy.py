"""Time the proxy before mock servers that take no time: streams of tokens, and requests of one token, beside other ways to stand between.

The subject has one core, the load generator and the mock servers another. Each of --rounds begins with another engine, and each engine has
fresh processes in it. Engines:
  expertwire  our proxy, the whole flow: prefill, its answer checked, decode with its parameters
  nginx       plain proxying to the decode server alone: no prefill, nothing checked, nothing parsed but HTTP
  aiohttp     prefill and decode by aiohttp's server and client on uvloop, nothing checked: what one would write oneself
  direct      nothing between: what load generator and mock servers can do at most
Rows are medians of the rounds. CPU is what the scheduler gave the subject's process in the measured stretch; `load_busy` and `subject_busy`
say which side was the limit (1: a whole core). `verified` is 1 where every answer was whole and right, no request failed, and each decode
was sent the parameters of a prefill of its own.

  expertwire bench proxy --json proxy.json                         all that are installed, about two minutes
  expertwire bench proxy --against nginx --rounds 1 --seconds 1
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.bench import turns
from expertwire.cli.bench.proxy_subjects import ENGINES, TWO_LEGS, Engine, load, mocks, subject
from expertwire.cli.report import Report, RowStatus, format_value, options, terminal
from expertwire.errors import DeadlineError, InvalidArgumentError, PeerError, UnavailableError

if TYPE_CHECKING:
    from rich.table import Table

OURS = "expertwire"
REST_S = 60.0  # of a load, beside what it measures
WARMUP_S = 0.5
STREAMS, ONE_TOKEN = "streams", "one_token"


@dataclass(frozen=True)
class Settings:
    """What every engine is given."""

    streams: int
    interval_ms: float
    tokens: int
    concurrency: int
    seconds: float
    rounds: int
    loads: tuple[str, ...]

    def words(self, kind: str) -> list[str]:
        """Of the load generator."""
        ramp_s = self.tokens * self.interval_ms / 1e3 if kind == STREAMS else 0.0
        usual = ["--seconds", str(self.seconds), "--warmup-s", str(WARMUP_S + ramp_s), "--ramp-s", str(ramp_s)]
        if kind == STREAMS:
            return [*usual, "--concurrency", str(self.streams), "--stream", "--tokens", str(self.tokens)]
        return [*usual, "--concurrency", str(self.concurrency)]


@dataclass
class Found:
    """One engine's rounds."""

    figures: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)  # (kind, name, unit)
    faults: list[str] = field(default_factory=list)
    answers: int = 0

    def add(self, kind: str, name: str, unit: str, value: float) -> None:
        """One round's."""
        self.figures.setdefault((kind, name, unit), []).append(value)

    def median(self, kind: str, name: str) -> float | None:
        """Of the rounds so far."""
        return next((statistics.median(values) for (k, n, _), values in self.figures.items() if (k, n) == (kind, name)), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire bench proxy`."""
    others = [name for name in ENGINES if name != OURS]
    parser.add_argument("--against", metavar="ENGINE,…", help=f"of {', '.join(others)}, beside ours (default: those that are installed)")
    parser.add_argument("--load", metavar="KIND,…", default=f"{STREAMS},{ONE_TOKEN}", help=f"{STREAMS} and {ONE_TOKEN} (default both)")
    parser.add_argument("--streams", type=int, default=256, help="at a time (default 256)")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between two tokens of a stream (default 5)")
    parser.add_argument("--tokens", type=int, default=200, help="of a stream (default 200)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests of one token at a time (default 64)")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each load in each round (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="of all engines (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file."""
    settings, engines, by_name = parse(args)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UnavailableError(f"this process may use {len(cores)} core; the subject needs one of its own, and the load another")
    report = Report("bench proxy", {"cores": {"subject": cores[0], "load": cores[1]}, "options": options(args)})
    asked = {engine.name: {"flow": engine.flow} for engine in engines}
    by_default = () if by_name else [engine.name for engine in engines if engine.name != OURS]
    present = [ENGINES[name] for name in turns.present(report, asked, lambda name: ENGINES[name].missing(), by_default)]
    report.config["engines"] = {engine.name: engine.identity() for engine in present}
    found = {engine.name: Found() for engine in present}

    def one(number: int, name: str) -> None:
        measure(ENGINES[name], settings, found[name], (cores[0], cores[1]))

    turns.take("round", [engine.name for engine in present], settings.rounds, one)
    for name, rounds in found.items():
        add_rows(report, ENGINES[name], settings, rounds)
    add_ratios(report, settings, found)
    report.write(args.json)
    terminal().print(table(report, f"a proxy on one core, medians of {settings.rounds} rounds"))
    report.tell_what_is_not_ok()
    return report.exit_status()


def parse(args: argparse.Namespace) -> tuple[Settings, list[Engine], bool]:
    """Check the words and numbers; an error names the option, its value and the limit."""
    for option, value, least, most in (
        ("--streams", args.streams, 1, 4096),
        ("--interval-ms", args.interval_ms, 1, 1000),
        ("--tokens", args.tokens, 1, 100_000),
        ("--concurrency", args.concurrency, 1, 4096),
        ("--seconds", args.seconds, 0.1, 60),
        ("--rounds", args.rounds, 1, 99),
    ):
        if not least <= value <= most:
            raise InvalidArgumentError(f"{option} is {value}; it must be {least} to {most}")
    kinds = words("--load", args.load, (STREAMS, ONE_TOKEN))
    others = tuple(name for name in ENGINES if name != OURS)
    asked = words("--against", args.against, others) if args.against else others
    settings = Settings(args.streams, args.interval_ms, args.tokens, args.concurrency, args.seconds, args.rounds, kinds)
    return settings, [ENGINES[name] for name in (OURS, *asked)], bool(args.against)


def words(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """`a,b`: each once, each one of `known`."""
    found = tuple(dict.fromkeys(text.split(",")))
    if wrong := [word for word in found if word not in known]:
        raise InvalidArgumentError(f"{option} names {wrong[0]!r}; give one or more of {', '.join(known)}, with commas")
    return found


def measure(engine: Engine, settings: Settings, found: Found, cores: tuple[int, int]) -> None:
    """One round of one engine: fresh processes for each load."""
    for kind in settings.loads:
        try:
            with mocks(cores[1], settings.tokens, settings.interval_ms) as servers, subject(engine, servers, cores[0]) as running:
                told = load(running.port, cores[1], settings.words(kind), (servers.pid, running.pid), settings.seconds + REST_S)
        except (PeerError, DeadlineError) as error:
            found.faults.append(str(error))
            continue
        note(engine, kind, told, servers.counts, found)


def note(engine: Engine, kind: str, told: dict[str, Any], counts: dict[str, Any], found: Found) -> None:
    """A round's figures, and what was wrong with it."""
    seconds, (mock_s, cpu_s), tokens, done = told["seconds"], told["watched_cpu_s"], told["tokens"], told["done"]
    found.answers += done
    if told["failed"] or not tokens:
        found.faults.append(f"{told['failed']} requests of {kind} failed: {told['why']}; {tokens} tokens came")
    if counts["odd"]:
        found.faults.append(f"{counts['odd']} requests without a Content-Length")
    if engine.flow == TWO_LEGS and counts["decodes"] != counts["with_params"]:
        found.faults.append(f"{counts['decodes']} decodes, {counts['with_params']} with a prefill's parameters of their own")
    if kind == STREAMS:
        found.add(kind, "tokens_per_s", "tok/s", tokens / seconds)
        found.add(kind, "lag_p99_ms", "ms", told["lag_p99_ms"])
        if cpu_s and tokens:
            found.add(kind, "tokens_per_cpu_s", "tok/s", tokens / cpu_s)
            found.add(kind, "cpu_us_per_token", "µs", cpu_s * 1e6 / tokens)
    else:
        found.add(kind, "requests_per_s", "1/s", done / seconds)
        if cpu_s and done:
            found.add(kind, "requests_per_cpu_s", "1/s", done / cpu_s)
            found.add(kind, "cpu_us_per_request", "µs", cpu_s * 1e6 / done)
    found.add(kind, "ttft_p50_ms", "ms", told["ttft_p50_ms"])
    found.add(kind, "ttft_p99_ms", "ms", told["ttft_p99_ms"])
    found.add(kind, "load_busy", "cores", told["busy"])
    found.add(kind, "mock_busy", "cores", mock_s / seconds)
    if cpu_s:
        found.add(kind, "subject_busy", "cores", cpu_s / seconds)


def labels_of(engine: Engine, settings: Settings, kind: str) -> dict[str, Any]:
    """What tells an engine's rows apart."""
    at_once = {"streams": settings.streams} if kind == STREAMS else {"concurrency": settings.concurrency}
    return {"engine": engine.name, "flow": engine.flow, "load": kind, **at_once}


def add_rows(report: Report, engine: Engine, settings: Settings, found: Found) -> None:
    """Verified, and the medians."""
    why: dict[str, Any] = {"why": "; ".join(dict.fromkeys(found.faults))} if found.faults else {}
    status = RowStatus.FAILED if found.faults else RowStatus.OK
    report.add("verified", int(not found.faults), "", status, engine=engine.name, flow=engine.flow, answers=found.answers, **why)
    for (kind, name, unit), values in found.figures.items():
        spread: dict[str, Any] = {"low": round(min(values), 3), "high": round(max(values), 3), "rounds": len(values)}
        report.add(name, round(statistics.median(values), 3), unit, **labels_of(engine, settings, kind), **spread)


def add_ratios(report: Report, settings: Settings, found: dict[str, Found]) -> None:
    """Ours over each of the others, where both were measured."""
    for kind, name in ((STREAMS, "tokens_per_cpu_s"), (ONE_TOKEN, "requests_per_cpu_s"), (ONE_TOKEN, "requests_per_s")):
        ours = found[OURS].median(kind, name) if OURS in found else None
        for other in (other for other in found if other not in (OURS, "direct")):
            theirs = found[other].median(kind, name)
            if ours is not None and theirs:
                report.add(f"{name}_over", round(ours / theirs, 3), "", **labels_of(ENGINES[OURS], settings, kind), over=other)


def table(report: Report, title: str) -> Table:
    """A line for each figure, a column for each engine; the file has the spread."""
    from rich.table import Table

    rows = [row for row in report.rows if row.value is not None]
    engines = list(dict.fromkeys(str(row.labels["engine"]) for row in rows))
    found = Table("figure", "load", "unit", *engines, title=title, title_justify="left")
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row.name} {row.labels['over']}" if "over" in row.labels else row.name
        line = lines.setdefault((name, str(row.labels.get("load", "")), row.unit), {})
        line[str(row.labels["engine"])] = format_value(row.value or 0)
    for told, values in sorted(lines.items(), key=lambda item: (item[0][1], item[0][0])):
        found.add_row(*told, *(values.get(engine, "") for engine in engines))
    return found
