"""One mixture-of-experts layer, shaped like DeepSeek-V3's, on real text, across eight ranks as two nodes of four.

The words of a text go through a seeded embedding and router, each token's row to the ranks of its eight experts (between nodes through
libfabric, once per node; inside a node by load and store), through the experts there, and home again, summed. Every received row, id,
weight and sum is checked, and the layer's output is compared with the same layer in one process. The same exchange is done as users write
it with gloo today, in the same run, turn about, one thread a rank for both.

  expertwire demo                                     about half a minute on two cores, 8 GiB
  expertwire demo --text book.txt --tokens 512        another text, fewer tokens
  expertwire demo --ranks-per-node 1                  every rank a node of its own: everything goes through libfabric
  expertwire demo --routing trace.npz                 a recorded routing: topk_idx [tokens, top-k], optionally topk_weights
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from expertwire.cli.report import Exit, Report, RowStatus, options, terminal
from expertwire.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from expertwire.cli.bench.ep import Setup
    from expertwire.cli.bench.paired import Inputs, Measured
    from expertwire.cli.launch import Rank
    from expertwire.cli.progress import RankProgress
    from expertwire.cli.workload import Shape

ITERATIONS, WARMUP = 4, 1
PRELOAD = ("expertwire.cli.demo", "expertwire.cli.workload", "expertwire.cli.bench.paired", "expertwire.ep.cpu.backend")  # what ranks use
REFERENCE_THREADS_MAX = 4  # each adds up a whole output of its own
WORST_TOKEN_MAX = 1e-5  # one token's share of calc_diff scatters around the whole's; a lost or misplaced row gives far more


@dataclass(frozen=True)
class Files:
    """What parent and ranks share: memory-mapped files in one temporary directory, rows of all ranks behind each other."""

    directory: str
    rows: int  # of all ranks

    def map(self, name: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The array `name` [rows, columns], made where it is not there yet; what one process writes the others see."""
        import torch

        path = str(Path(self.directory) / name)
        return torch.from_file(path, shared=True, size=self.rows * columns, dtype=dtype).view(self.rows, columns)


@dataclass(frozen=True)
class Outcome:
    """What a rank hands back: its samples, and what went wrong in the layer itself."""

    measured: Measured
    layer_faults: list[str]
    layer_seconds: float
    memory_peak: int  # bytes


@dataclass
class Memory:
    """The most that this process was seen to take of the machine's memory, in bytes."""

    peak: int = 0

    def look(self) -> None:
        """Called where most is in use, never inside of a timed window."""
        from expertwire.cli.progress import memory_bytes

        self.peak = max(self.peak, memory_bytes())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire demo`."""
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text whose words are the tokens (default: this project's README), repeated"
    )
    parser.add_argument(
        "--routing", type=Path, metavar="FILE.npz", help="recorded routing instead of the seeded router's: topk_idx [tokens, k]"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of every rank (default 1024)")
    parser.add_argument("--ranks", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks that count as one node (default 4)")
    parser.add_argument(
        "--provider", help="what carries rows between nodes: tcp or local (default: EXPERTWIRE_PROVIDER, else the best found)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts there (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Show it, check it, print the table."""
    for name, least in (("tokens", 1), ("ranks", 1), ("ranks_per_node", 1)):
        if getattr(args, name) < least:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} is {getattr(args, name)}; the least is {least}")
    check_files(args)
    from expertwire.cli.launch import end_server, start_server

    begin = time.monotonic()
    start_server(*PRELOAD)
    try:
        return show(args, begin)
    except KeyboardInterrupt:
        end_server()
        raise


def check_files(args: argparse.Namespace) -> None:
    """Whether the files named can be opened, before torch is loaded for seconds; what is in them is checked where it is read."""
    for option, path, kind in (("--text", args.text, ""), ("--routing", args.routing, " as an .npz file")):
        if path is None:
            continue
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise InvalidArgumentError(f"{option} {path} cannot be read{kind}: {error.strerror}") from None


def show(args: argparse.Namespace, begin: float) -> int:
    """All of it, from the text to the exit status."""
    from expertwire.cli.bench.ep import Setup, add_rows, complain, title
    from expertwire.cli.progress import RankProgress

    progress = RankProgress(args.ranks)
    from expertwire.cli.workload import Shape  # loads torch: the longest wait before the first line

    memory = Memory()
    shape = Shape()
    setup = Setup(
        node_of=tuple(rank // args.ranks_per_node for rank in range(args.ranks)),
        tokens=(args.tokens,) * args.ranks,
        hidden=shape.hidden,
        experts=shape.experts,
        topk=shape.topk,
        routing="text" if args.routing is None else "recorded",
        provider=args.provider,
        against=("gloo",),
        iterations=ITERATIONS,
        warmup=WARMUP,
        seed=0,
    )
    with tempfile.TemporaryDirectory(prefix="expertwire-demo-") as directory, progress:
        files = Files(directory, args.ranks * args.tokens)
        setup, shape = prepare(args, setup, shape, files, progress)
        outcomes = start(setup, shape, files, progress)
        diffs = compare(setup, shape, files, progress, memory)
    config = {**asdict(setup), **asdict(shape), "text": str(args.text or "README"), "routing_file": str(args.routing or "")}
    report = Report("demo", {**config, "provider": outcomes[0].measured.provider, "options": options(args)})
    add_rows(report, [outcome.measured for outcome in outcomes], setup)
    add_layer_rows(report, outcomes, diffs)
    peak = memory.peak + sum(outcome.memory_peak for outcome in outcomes)
    report.add("memory_peak_GiB", round(peak / 2**30, 2), "GiB")
    report.add("demo_s", round(time.monotonic() - begin, 1), "s")
    report.write(args.json, args.html)
    console = terminal()
    console.print(table(report, title(setup)))
    console.print(verdict(report, outcomes, diffs, setup))
    complain([outcome.measured for outcome in outcomes])
    for rank, outcome in enumerate(outcomes):
        for fault in outcome.layer_faults:
            print(f"rank {rank}, layer: {fault}", file=sys.stderr)
    return report.exit_status()


def prepare(args: argparse.Namespace, setup: Setup, shape: Shape, files: Files, progress: RankProgress) -> tuple[Setup, Shape]:
    """Write rows, ids and weights of all ranks; a recorded routing brings its own top-k."""
    import torch

    from expertwire.cli.workload import embed, read_routing, read_text, route, words

    progress.stage("text to rows and routing")
    rows = files.map("x", shape.hidden, torch.bfloat16)
    rows.copy_(embed(words(read_text(args.text), files.rows), shape.hidden))
    if args.routing is None:
        ids, weights = route(rows, shape)
    else:
        ids, weights = read_routing(args.routing, files.rows, shape.experts)
        setup, shape = replace(setup, topk=ids.shape[1]), replace(shape, topk=ids.shape[1])
    files.map("ids", shape.topk, torch.int64).copy_(ids)
    files.map("weights", shape.topk, torch.float32).copy_(weights)
    progress.stage("text to rows and routing", 1)
    return setup, shape


def start(setup: Setup, shape: Shape, files: Files, progress: RankProgress) -> list[Outcome]:
    """Run the ranks."""
    from expertwire.cli.launch import launch

    return launch(_rank, (setup, shape, files), setup.ranks, on_progress=progress.update)


def inputs_of(setup: Setup, shape: Shape, files: Files, rank: int) -> Inputs:
    """What `rank` sends: its part of the shared arrays."""
    import torch

    from expertwire.cli.bench.paired import Inputs

    part = slice(rank * setup.tokens[0], (rank + 1) * setup.tokens[0])
    return Inputs(
        files.map("x", shape.hidden, torch.bfloat16)[part],
        files.map("ids", shape.topk, torch.int64)[part],
        files.map("weights", shape.topk, torch.float32)[part],
    )


def _rank(rank: Rank, setup: Setup, shape: Shape, files: Files) -> Outcome:
    import torch

    from expertwire.cli.bench.arms import make_arms
    from expertwire.cli.bench.paired import check_dispatch, expect, measure
    from expertwire.cli.workload import run_experts
    from expertwire.ep.layout import expert_bounds

    own = inputs_of(setup, shape, files, rank.rank)
    expected = expect(rank.rank, setup.ranks, shape.experts, lambda source: inputs_of(setup, shape, files, source))
    arms = make_arms(setup, expected.rows.shape[0])
    rank.progress("ranks and fabric ready", 1, 1)
    memory = Memory()

    def step(what: str, done: int, total: int) -> None:
        memory.look()
        rank.progress(what, done, total)

    try:
        measured = measure(replace(rank, progress=step), arms, own, expected, list(setup.node_of), setup.iterations, setup.warmup)
        first, last = expert_bounds(shape.experts, setup.ranks)[rank.rank : rank.rank + 2]
        part = slice(rank.rank * setup.tokens[0], (rank.rank + 1) * setup.tokens[0])
        faults: list[str] = []
        y = None
        begin = time.perf_counter()
        for arm in arms:
            received = arm.dispatch(own.x, own.topk_idx, own.topk_weights)
            faults += [f"{arm.name}: {fault}" for fault in check_dispatch(received, expected)]
            if y is None:  # the rows are the same for both
                ids = received.topk_idx.to(torch.int64)
                whole = run_experts(received.rows, ids, received.topk_weights, range(first, last), first, shape)
                memory.look()
                # Every expert has read its rows: what they give goes over them, and combine finds it where it lies.
                y = received.rows.copy_(whole)
                del whole
            del received
            files.map(f"out-{arm.name}", shape.hidden, torch.bfloat16)[part] = arm.combine(y)
        step("layer: dispatch, experts, combine", 1, 1)
        return Outcome(measured, faults, time.perf_counter() - begin, memory.peak)
    finally:
        for arm in arms:
            arm.close()


def compare(setup: Setup, shape: Shape, files: Files, progress: RankProgress, memory: Memory) -> dict[str, tuple[float, float]]:
    """By engine: `calc_diff` of the whole output against the same layer in this one process, and that of the worst token."""
    import torch

    from expertwire.cli.bench.paired import token_diffs
    from expertwire.cli.workload import run_layer

    progress.stage("the same layer in one process")
    torch.set_num_threads(1)  # blocks are too small to share: the threads of `run_layer` take experts of their own
    ids, weights = files.map("ids", shape.topk, torch.int64), files.map("weights", shape.topk, torch.float32)
    threads = min(REFERENCE_THREADS_MAX, len(os.sched_getaffinity(0)))
    wanted = run_layer(files.map("x", shape.hidden, torch.bfloat16), ids, weights, shape, threads)
    memory.look()
    diffs = {}
    for engine in ("expertwire", *setup.against):
        apart, size = token_diffs(files.map(f"out-{engine}", shape.hidden, torch.bfloat16), wanted)
        diffs[engine] = (float(apart.sum() / size.sum().clamp_min(1e-30)), float((apart / size.clamp_min(1e-30)).max()))
    progress.stage("the same layer in one process", 1)
    return diffs


def add_layer_rows(report: Report, outcomes: list[Outcome], diffs: dict[str, tuple[float, float]]) -> None:
    """The layer as a whole: is it what one process computes?"""
    from expertwire.cli.bench.paired import CALC_DIFF_MAX

    good = not any(outcome.layer_faults for outcome in outcomes)
    report.add("layer_payload_verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED)
    for engine, (whole, worst) in diffs.items():
        for part, diff, limit in (("whole", whole, CALC_DIFF_MAX), ("worst token", worst, WORST_TOKEN_MAX)):
            report.add("layer_calc_diff", diff, "", RowStatus.OK if diff <= limit else RowStatus.FAILED, engine=engine, part=part)


def table(report: Report, caption: str) -> Table:
    """Time, GB/s a rank, and gloo's time, by phase and by where combine's rows lie. Ratios are those of the times shown."""
    from rich.table import Table

    from expertwire.cli.bench.ep import ORDINARY, RECEIVED

    def figure(name: str, **labels: str) -> float:
        for row in report.rows:
            if row.name == name and row.value is not None and all(row.labels.get(key) == value for key, value in labels.items()):
                return row.value
        return float("nan")

    shown = Table(title=caption, title_justify="left", caption_justify="left")
    shown.caption = "times: of the slowest rank, the median over the iterations; over gloo: gloo's time over ours, of these times"
    for column in ("phase", "expertwire", "GB/s a rank", "over the fabric", "gloo", "over gloo", "over gloo's exchange alone"):
        shown.add_column(column, justify="left" if column == "phase" else "right")
    wire = figure("wire_bytes") / 1e6
    for phase, place in (("dispatch", ""), ("combine", RECEIVED), ("combine", ORDINARY), ("total", RECEIVED), ("total", ORDINARY)):
        label = {"combine_input": place} if place else {}
        ours = figure("whole_us", engine="expertwire", phase=phase, **label) / 1e3
        gloo = figure("whole_us", engine="gloo", phase=phase) / 1e3
        rate = "" if phase == "total" else f"{figure(f'{phase}_GBps', engine='expertwire', **label):.2f}"
        over, exchange = (figure(name, phase=phase, **label) for name in ("over_gloo", "over_gloo_exchange"))
        shown.add_row(
            {"": phase, RECEIVED: f"{phase}, rows left where they were received", ORDINARY: f"{phase}, rows elsewhere"}[place],
            f"{ours:,.1f} ms",
            rate,
            f"{wire * (2 if phase == 'total' else 1):,.0f} MB",
            f"{gloo:,.1f} ms",
            f"{over:.2f} ×",
            f"{exchange:.2f} ×",
            end_section=phase != "total" and place != RECEIVED,
        )
    return shown


def verdict(report: Report, outcomes: list[Outcome], diffs: dict[str, tuple[float, float]], setup: Setup) -> str:
    """What was checked, in two sentences."""
    from expertwire.cli.bench.paired import CALC_DIFF_MAX

    received = [outcome.measured.received_rows for outcome in outcomes]
    skew = max(received) / statistics.mean(received)
    calls = setup.iterations + setup.warmup + 1
    words = "[green]every payload verified[/green]" if report.exit_status() == Exit.OK else "[bold red]not everything was right[/bold red]"
    whole, worst = diffs["expertwire"]
    return (
        f"{words}: {calls} dispatches and combines of each engine, {sum(received):,} rows each;"
        f" the fullest rank got {skew:.2f} × the mean.\n"
        f"The layer's output beside that of one process: they differ by {whole:.1e} of its size (calc_diff; limit {CALC_DIFF_MAX:.0e}),"
        f" the worst token by {worst:.1e} (limit {WORST_TOKEN_MAX:.0e}): each rank's sum is rounded to bf16 once before the sums are added."
    )
