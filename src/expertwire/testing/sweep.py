"""Many seeds of the simulation, on all cores. Needs Python and the built `_simulation` module, nothing else (numpy for transfers).

`python -m expertwire.testing.sweep --seeds 100000` runs them; `--replay FAMILY:SEED` runs one again and prints its trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from expertwire.testing.cluster import SimulatedCluster, simulation

WORD = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not hold. `n`: which operation was made to fail, 0 where none was."""

    family: str
    seed: int
    text: str
    how: str = ""
    n: int = 0

    def replay_command(self) -> str:
        """The one command that runs it again and prints its trace."""
        where = f"{self.family}:{self.seed}" + (f":{self.how}:{self.n}" if self.how else "")
        return f"python -m expertwire.testing.sweep --replay {where}"


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Seeds `first`, `first + step`, … of one family, run by one process in one go."""

    family: str
    first: int
    count: int
    step: int = 1
    again: bool = False  # a second time, in whichever process: its traces must be the same

    def seeds(self) -> range:
        """The seeds, in order."""
        return range(self.first, self.first + self.count * self.step, self.step)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch. `trace_hash` is of all its runs' traces; `runs` counts every n of an n-th operation as one."""

    batch: Batch
    runs: int
    trace_hash: int
    failures: tuple[Failure, ...]
    seconds: float


def _engine(batch: Batch) -> tuple[int, int, list[Failure]]:
    reports = SimulatedCluster(counted=batch.family == "counted").run_many(batch.seeds())
    trace = 0
    for report in reports:
        trace = (trace * 31 + report.trace_hash) & WORD
    return len(reports), trace, [Failure(batch.family, report.seed, report.failure) for report in reports if not report.passed]


def _exchange(batch: Batch) -> tuple[int, int, list[Failure]]:
    core = simulation()
    run = core.run_low_latency_seeds if batch.family == "low-latency" else core.run_exchange_seeds
    result = run(batch.first, batch.count)
    trace = 0
    for value in result["trace_hashes"]:
        trace = (trace * 31 + value) & WORD
    return batch.count, trace, [Failure(batch.family, seed, text) for seed, text in result["failures"]]


def _transfer(batch: Batch) -> tuple[int, int, list[Failure]]:
    from expertwire.testing import transfers  # the only family that needs numpy

    trace, failures = 0, []
    for seed in batch.seeds():
        try:
            trace = (trace * 31 + transfers.run(seed)[0]) & WORD
        except Exception as error:
            failures.append(Failure(batch.family, seed, f"{type(error).__name__}: {error}"))
    return batch.count, trace, failures


def _nth(family: str, run: Callable[[int, str], dict[str, object]], batch: Batch) -> tuple[int, int, list[Failure]]:
    runs = 0
    failures: list[Failure] = []
    for seed in batch.seeds():
        for how in simulation().nth_faults():
            result = run(seed, how)
            struck, found = result["struck"], result["failures"]
            assert isinstance(struck, int)
            assert isinstance(found, list)
            runs += struck + 1
            failures += [Failure(family, seed, text, how, n) for n, text in found]
    return runs, runs, failures


def _engine_nth(batch: Batch) -> tuple[int, int, list[Failure]]:
    counted = batch.family == "counted-nth"
    return _nth(batch.family, lambda seed, how: simulation().run_engine_nth(seed, how, counted=counted), batch)


def _exchange_nth(batch: Batch) -> tuple[int, int, list[Failure]]:
    core = simulation()
    run = core.run_low_latency_nth if batch.family == "low-latency-nth" else core.run_exchange_nth
    return _nth(batch.family, run, batch)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One kind of run. Of the seeds asked for it takes every `step`-th, in batches of `batch`."""

    summary: str
    step: int
    batch: int
    run: Callable[[Batch], tuple[int, int, list[Failure]]]


FAMILIES = {
    "engine": Family("engines of 2 to 12 ranks under the seed's faults", 1, 200, _engine),
    "counted": Family("the same with counted immediates: late ones, lost answers, forgotten peers", 1, 200, _engine),
    "exchange": Family("whole dispatches and combines on 1 to 12 ranks", 1, 50, _exchange),
    "low-latency": Family("dispatches and combines of the low-latency mode, hooks in every order, masks", 1, 100, _exchange),
    "transfer": Family("agents that write to and read from each other, die, part and come back", 10, 10, _transfer),
    "engine-nth": Family("the n-th operation of a run fails, for every n and in every way", 100, 5, _engine_nth),
    "counted-nth": Family("the same with counted immediates", 100, 5, _engine_nth),
    "exchange-nth": Family("the same of a whole exchange", 2_000, 1, _exchange_nth),
    "low-latency-nth": Family("the same of the low-latency mode", 2_000, 1, _exchange_nth),
}


def batches(families: Sequence[str], first: int, seeds: int) -> list[Batch]:
    """The work, the slowest kinds first; one batch in forty of the whole runs comes twice."""
    work: list[Batch] = []
    for name in reversed(list(families)):
        family = FAMILIES[name]
        chosen = range(first, first + seeds, family.step)
        for at in range(0, len(chosen), family.batch):
            part = chosen[at : at + family.batch]
            work.append(Batch(name, part[0], len(part), family.step))
            if family.step == 1 and at // family.batch % 40 == 0:
                work.append(dataclasses.replace(work[-1], again=True))
    return work


def run_batch(batch: Batch) -> Outcome:
    """Runs in a worker process."""
    began = time.process_time()
    runs, trace, failures = FAMILIES[batch.family].run(batch)
    return Outcome(batch, runs, trace, tuple(failures), time.process_time() - began)


class Progress:
    """A bar on stderr; a line for every tenth of the way where that is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._began = time.monotonic()
        self._shown = -1

    def show(self, done: int, failing: int) -> None:
        """`done` of the seeds are through, `failing` of them did not hold."""
        share = done / self._total
        elapsed = time.monotonic() - self._began
        left = elapsed / share - elapsed if share > 0 else 0
        text = f"{done:,}/{self._total:,} seeds, {failing} failing, {elapsed:.0f} s, about {left:.0f} s left"
        if sys.stderr.isatty():
            filled = int(30 * share)
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text} ", end="" if done < self._total else "\n", file=sys.stderr, flush=True)
        elif int(10 * share) > self._shown:
            self._shown = int(10 * share)
            print(text, file=sys.stderr, flush=True)


def outcomes(work: Sequence[Batch], jobs: int) -> Iterator[Outcome]:
    """Every batch's outcome, in the order in which they end, from `jobs` processes."""
    if jobs == 1:
        yield from map(run_batch, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_batch, work)


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over a sweep, by family."""

    seeds: dict[str, int] = dataclasses.field(default_factory=dict)
    runs: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    traces: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    repeated: int = 0

    def add(self, outcome: Outcome) -> None:
        """Counts a batch, and compares its trace with that of the same batch in another process."""
        batch = outcome.batch
        key = (batch.family, batch.first)
        if key in self.traces:
            self.repeated += 1
            if self.traces[key] != outcome.trace_hash:
                self.failures.append(Failure(batch.family, batch.first, f"another trace in another process, in seeds {batch.seeds()}"))
        self.traces[key] = outcome.trace_hash
        self.seconds[batch.family] = self.seconds.get(batch.family, 0) + outcome.seconds
        self.runs[batch.family] = self.runs.get(batch.family, 0) + outcome.runs
        self.seeds.setdefault(batch.family, 0)
        if batch.again:
            return
        self.seeds[batch.family] += batch.count
        self.failures += outcome.failures


def sweep(families: Sequence[str], first: int, seeds: int, jobs: int) -> Totals:
    """Runs `seeds` seeds of every family from `first` on, on `jobs` processes, with a progress bar."""
    totals = Totals()
    work = batches(families, first, seeds)
    progress = Progress(sum(batch.count for batch in work if not batch.again))
    done = 0
    for outcome in outcomes(work, jobs):
        totals.add(outcome)
        done += 0 if outcome.batch.again else outcome.batch.count
        progress.show(done, len(totals.failures))
    return totals


def replay(what: str, mutant: str, lines: int) -> int:
    """Runs `FAMILY:SEED` or `FAMILY:SEED:HOW:N` once more and prints its trace. The exit status is 1 where it fails."""
    name, _, rest = what.partition(":")
    seed, _, nth = rest.partition(":")
    how, _, n = nth.partition(":")
    core = simulation()
    core.set_mutant(mutant)
    if name == "transfer":
        found = _transfer(Batch(name, int(seed), 1))
        trace, failure, hashed = [], "".join(each.text for each in found[2]), found[1]
    elif name.startswith(("engine", "counted")):
        faults = {"fail_at": int(n), "fail_how": how} if how else None
        counted = name.startswith("counted")
        (row,) = core.run_engine([int(seed)], 2 if how else 0, 6 if how else 0, faults=faults, trace_lines=lines, counted=counted)
        trace, failure, hashed = row["trace"], row["failure"], row["trace_hash"]
    else:
        run = core.run_low_latency_seeds if name.startswith("low-latency") else core.run_exchange_seeds
        result = run(int(seed), 1, mutant=mutant, trace_lines=lines, fail_at=int(n or 0), fail_how=how or "operation")
        trace, hashed = result["trace"], result["trace_hashes"][0]
        failure = result["failures"][0][1] if result["failures"] else ""
    core.set_mutant("none")
    print("\n".join(trace))
    print(f"{what}: {'FAILED: ' + failure if failure else 'held'}; trace {hashed:#018x}")
    return 1 if failure else 0


def rows(totals: Totals) -> list[dict[str, object]]:
    """What `--json` writes, in the form of the command line's reports."""
    found: list[dict[str, object]] = []
    for family, seeds in totals.seeds.items():
        failing = sum(failure.family == family for failure in totals.failures)
        status = "failed" if failing else "ok"
        found.append({"name": "seeds", "value": seeds, "unit": "", "status": status, "family": family, "failing": failing})
        found.append({"name": "runs", "value": totals.runs[family], "unit": "", "status": status, "family": family})
        cost = totals.seconds[family] / max(seeds, 1) * 1000
        found.append({"name": "core_seconds_per_1000_seeds", "value": cost, "unit": "s", "status": status, "family": family})
    return found


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m expertwire.testing.sweep", description="Runs many seeds of the simulation.")
    parser.add_argument("--seeds", type=int, default=2_000, help="how many (default 2,000)")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="only these kinds of runs (may be repeated)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--replay", metavar="FAMILY:SEED", help="run one seed again and print its trace")
    parser.add_argument("--trace", type=int, default=60, metavar="LINES", help="with --replay: how much of its end (default 60 lines)")
    parser.add_argument("--mutant", default="none", help="with --replay: switch a kept fault of the core on")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.first < 0 or options.jobs < 1:
        parser.error(f"--seeds {options.seeds} --first {options.first} --jobs {options.jobs}: at least 1, 0 and 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 1 where a run did not hold."""
    options = _arguments(arguments)
    if options.replay:
        return replay(options.replay, options.mutant, options.trace)
    began = time.monotonic()
    totals = sweep(options.family or list(FAMILIES), options.first, options.seeds, options.jobs)
    elapsed = time.monotonic() - began
    for family, seeds in totals.seeds.items():
        cost = totals.seconds[family] / max(seeds, 1) * 1000
        print(f"{family}: {seeds:,} seeds, {totals.runs[family]:,} runs, {cost:.2f} core seconds for 1,000 seeds")
    print(f"{elapsed:.0f} s on {options.jobs} processes; {totals.repeated} batches twice, with the same traces in another process")
    for failure in totals.failures[:20]:
        print(f"{failure.family} seed {failure.seed} FAILED: {failure.text}\n  replay: {failure.replay_command()}")
    print(f"{len(totals.failures)} failures" if totals.failures else "everything held")
    if options.json:
        document = {"command": "sweep", "config": {"seeds": options.seeds, "first": options.first}, "rows": rows(totals)}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
