"""Time dispatch and combine of `expertwire.ep.Buffer` between real processes on this machine.

Ranks are processes; `--ranks-per-node` says which of them count as one node: rows between nodes travel through libfabric, rows inside
one by load and store. Every received row, id, weight and sum is checked outside of the timed window; a run that finds one wrong byte fails.
A figure is the median over the iterations of the slowest rank's time; `low` and `high` are the least and the largest.

  expertwire bench ep                                  eight ranks as two nodes of four, a DeepSeek-V3-shaped exchange
  expertwire bench ep --against gloo --json ep.json    beside the exchange as users write it with gloo
  expertwire bench ep --against mpi                    beside the same exchange over MPI (pip install mpi4py mpich), ranks under mpiexec
  expertwire bench ep --mode ll --tokens 32 --against ht    low latency, beside the high-throughput mode
  expertwire bench ep --smoke                          a quick check: 128 tokens, hidden 1024, 64 experts, top-4
  expertwire bench ep --rank-tokens 0,128,1,77 --ranks 4    its own number of tokens for each rank
  expertwire bench ep --preset slingshot-ep8           the published shape, asynchronous and synchronous writes turn about (15 GiB)
  expertwire bench ep --device cuda --sizes 4096,512,128 --dtype both --graph --against deep_ep    on this machine's GPUs, beside DeepEP
  expertwire bench ep --loop 20 --ranks 2 --ranks-per-node 1                  sustained, beside the fallback and the raw ceiling
  expertwire bench ep --loop 20 --ranks 2 --ranks-per-node 1 --shape 2gbit    the same where the wire is the limit (needs tc)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.bench import ep_device
from expertwire.cli.lists import whole_numbers
from expertwire.cli.report import Report, RowStatus, options, terminal
from expertwire.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from expertwire.cli.bench.paired import Inputs, Measured, Samples
    from expertwire.cli.launch import Rank

ROUTINGS = ("uniform", "skewed", "duplicates", "holes", "none")
SMOKE = {"tokens": "128", "hidden": 1024, "experts": 64, "topk": 4}
PRESETS = {
    "slingshot-ep8": {"ranks": 8, "ranks_per_node": 4, "tokens": "4096", "hidden": 7168, "experts": 288, "topk": 8, "against": ["sync"]}
}
CONFIG_NUMBERS = 4  # of a `Config` beside the SMs: chunks sent and received, within a node and between nodes
ROW_BYTES = 2  # of one bf16 element
SCALE_COLUMNS, SCALE_BYTES = 128, 4  # of an FP8 row
# Where the rows of a combine lie: written by the experts over the rows that they received, in memory of their own, or (low latency) in the
# Buffer's combine buffer.
RECEIVED, ORDINARY, ZERO_COPY = PLACES = "received", "ordinary", "zero_copy"
MODES = {"ht": "high_throughput", "ll": "low_latency"}
AGAINST = {"ht": ("gloo", "mpi", "sync"), "ll": ("ht", "sync")}
PEERS = ("gloo", "mpi")  # engines that are not ours: the layout is part of their dispatch, and the order of sums is their own
HIGH_THROUGHPUT = "high_throughput"  # that mode's arm beside the low-latency one


@dataclass(frozen=True)
class Setup:
    """One shape to measure; the same on every rank."""

    node_of: tuple[int, ...]
    tokens: tuple[int, ...]  # by rank
    hidden: int
    experts: int
    topk: int
    routing: str
    provider: str | None
    against: tuple[str, ...]
    iterations: int
    warmup: int
    seed: int
    dispatch_config: tuple[int, ...] = ()  # empty: the table's
    combine_config: tuple[int, ...] = ()
    sms: int | None = None
    worst: bool = False  # once more with num_worst_tokens, verified
    mode: str = "ht"
    dtype: str = "bf16"

    @property
    def ranks(self) -> int:
        """Processes."""
        return len(self.node_of)

    @property
    def row_bytes(self) -> int:
        """Bytes of a dispatched row, with its scales."""
        return ROW_BYTES * self.hidden if self.dtype == "bf16" else self.hidden + SCALE_BYTES * -(-self.hidden // SCALE_COLUMNS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire bench ep`."""
    parser.add_argument("--ranks", type=int, default=8, help="processes (default 8)")
    parser.add_argument(
        "--ranks-per-node", type=int, default=4, help="ranks that count as one node (default 4); the last node may be smaller"
    )
    parser.add_argument(
        "--tokens", "--rank-tokens", default="1024", help="tokens of every rank, or one number for each, with commas (default 1024)"
    )
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a row (default 7168)")
    parser.add_argument("--mode", choices=tuple(MODES), default="ht", help="high throughput (default), or low latency")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp8", "both"),
        default="bf16",
        help="of dispatched rows; fp8: e4m3 with a scale for each 128 columns; both: with --device cuda alone (default bf16)",
    )
    parser.add_argument("--experts", type=int, default=256, help="experts of all ranks; need not divide by the ranks (default 256)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (default 8)")
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="uniform",
        help="uniform: top-k of random scores; skewed: some experts are a hundred times as likely; duplicates: ids drawn with repetition; "
        "holes: a third of the ids is −1, some tokens have none; none: all ids are −1",
    )
    parser.add_argument("--skew", action="store_const", const="skewed", dest="routing", help="the same as --routing skewed")
    parser.add_argument("--sms", type=int, metavar="N", help="Buffer.set_num_sms(N), even; on CPU it sizes hints alone")
    for phase in ("dispatch", "combine"):
        parser.add_argument(
            f"--{phase}-config", metavar="A,B,C,D", help=f"chunks of {phase}: sent and received within a node, then between nodes"
        )
    parser.add_argument(
        "--provider", help="what carries rows between nodes: tcp or local (default: EXPERTWIRE_PROVIDER, else the best found)"
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        help="measure it in the same run, turn about: gloo, mpi (MPI_Alltoallv of mpi4py and MPICH), sync (ours with "
        "EXPERTWIRE_SYNC_WRITES), or, with --mode ll, ht, the other mode; with --device cuda any module shaped like DeepEP (deep_ep)",
    )
    parser.add_argument("--iterations", type=int, default=10, help="measured iterations (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before them, checked but not counted (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of rows and routing (default 1)")
    parser.add_argument("--smoke", action="store_true", help="128 tokens, hidden 1024, 64 experts, top-4, whatever those options say")
    parser.add_argument("--skip-worst-tokens", action="store_true", help="--smoke without its run of num_worst_tokens")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="ranks, nodes and shape of a published measurement, whatever those options say"
    )
    parser.add_argument("--loop", type=float, metavar="SECONDS", help="sustained dispatch, async, synchronous and the raw loop in turn")
    parser.add_argument("--microbatches", type=int, default=1, help="with --loop: also in so many overlapping parts (default 1: not)")
    parser.add_argument("--shape", metavar="RATE", help="with --loop: in a network namespace whose loopback passes RATE, such as 2gbit")
    ep_device.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts there (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the file."""
    if args.device == "cuda":
        return ep_device.run(args, SMOKE if args.smoke else {})
    ep_device.refuse(args)
    if args.loop is not None:
        if args.mode != "ht" or args.dtype != "bf16":
            raise InvalidArgumentError(
                f"--loop with --mode {args.mode} and --dtype {args.dtype}; it is of --mode ht and --dtype bf16 alone"
            )
        from expertwire.cli.bench.loop import parse_loop

        loop = parse_loop(args)
        from expertwire.cli.bench import ep_loop  # loads torch

        return ep_loop.run(args, loop)
    if args.shape is not None or args.microbatches != 1:
        raise InvalidArgumentError("--shape and --microbatches are of --loop; give --loop SECONDS with them")
    setup = parse(args)
    report = Report("bench ep", {**asdict(setup), "options": options(args)})
    measured, setup = measure_all(report, setup)
    report.config["provider"] = measured[0].provider
    if measured[0].peers:
        report.config["peers"] = measured[0].peers
        print("\n".join(f"{name}: {provider}" for name, provider in measured[0].peers.items()), flush=True)
    add_rows(report, measured, setup)
    report.write(args.json, args.html)
    terminal().print(report.table(title(setup)))
    complain(measured)
    return report.exit_status()


def measure_all(report: Report, setup: Setup) -> tuple[list[Measured], Setup]:
    """What every rank measured of which setup: where there is no MPI as asked for, a skipped row says why, and the rest is measured."""
    from expertwire.cli.launch import launch
    from expertwire.cli.mpi import launch_mpi
    from expertwire.cli.progress import RankProgress

    if "mpi" in setup.against:
        try:
            with RankProgress(setup.ranks) as progress:
                return launch_mpi(_rank, (setup,), setup.node_of, on_progress=progress.update), setup
        except UnavailableError as error:
            report.add("over_mpi", None, "×", RowStatus.SKIPPED, engine="mpi", why=str(error))
            print(f"expertwire: --against mpi is skipped: {error}", file=sys.stderr, flush=True)
        setup = replace(setup, against=tuple(engine for engine in setup.against if engine != "mpi"))
    with RankProgress(setup.ranks) as progress:
        return launch(_rank, (setup,), setup.ranks, on_progress=progress.update), setup


def title(setup: Setup) -> str:
    """One line that says what was measured."""
    nodes = [setup.node_of.count(node) for node in sorted(set(setup.node_of))]
    shape = f"{setup.ranks} ranks as nodes of {', '.join(map(str, nodes))}" if len(nodes) > 1 else f"{setup.ranks} ranks, one node"
    tokens = f"{setup.tokens[0]:,}" if len(set(setup.tokens)) == 1 else f"{min(setup.tokens):,} to {max(setup.tokens):,}"
    return (
        f"{shape}; {tokens} tokens a rank, hidden {setup.hidden}, {setup.experts} experts, top-{setup.topk}, {setup.dtype}, "
        f"{setup.routing} routing, {MODES[setup.mode].replace('_', ' ')}"
    )


def complain(measured: list[Measured]) -> None:
    """Every payload fault on stderr, by rank."""
    for rank, one in enumerate(measured):
        if one.wire_rows and not one.wire_operations:
            print(f"rank {rank}: {one.wire_rows} rows for other nodes and not one operation posted to {one.provider}", file=sys.stderr)
        for fault in one.worst_faults:
            print(f"rank {rank}, num_worst_tokens: {fault}", file=sys.stderr)
        for samples in one.samples:
            for fault in samples.faults:
                print(f"rank {rank}, {samples.arm}: {fault}", file=sys.stderr)


def parse(args: argparse.Namespace) -> Setup:
    """Check the numbers; an error names the option, its value and the limit."""
    if args.smoke and args.preset is not None:
        raise InvalidArgumentError(f"--smoke and --preset {args.preset} are two shapes; give one of them")
    given = {**vars(args), **(SMOKE if args.smoke else {}), **(PRESETS[args.preset] if args.preset is not None else {})}
    lowest = {"ranks": 1, "ranks_per_node": 1, "hidden": 1, "experts": 1, "topk": 1, "iterations": 1, "warmup": 0, "seed": 0}
    for name, least in lowest.items():
        if given[name] < least:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} is {given[name]}; the least is {least}")
    ranks, experts, topk = given["ranks"], given["experts"], given["topk"]
    if topk > experts and given["routing"] in ("uniform", "skewed"):
        raise InvalidArgumentError(f"--topk is {topk}; {given['routing']} routing has at most --experts {experts} different ones to choose")
    if args.sms is not None and (args.sms < 0 or args.sms % 2):
        raise InvalidArgumentError(f"--sms is {args.sms}; it must be even, and at least 0")
    check_against(given["against"], args.mode, args.dtype)
    return Setup(
        node_of=tuple(rank // given["ranks_per_node"] for rank in range(ranks)),
        tokens=parse_tokens(str(given["tokens"]), ranks),
        hidden=given["hidden"],
        experts=experts,
        topk=topk,
        routing=given["routing"],
        provider=given["provider"],
        against=tuple(dict.fromkeys(given["against"])),
        iterations=given["iterations"],
        warmup=given["warmup"],
        seed=given["seed"],
        dispatch_config=parse_config("--dispatch-config", args.dispatch_config),
        combine_config=parse_config("--combine-config", args.combine_config),
        sms=args.sms,
        worst=args.smoke and not args.skip_worst_tokens and args.mode == "ht",
        mode=args.mode,
        dtype=args.dtype,
    )


def check_against(against: list[str], mode: str, dtype: str) -> None:
    """Whether each can be measured beside that mode."""
    for engine in against:
        if engine not in AGAINST[mode]:
            raise InvalidArgumentError(f"--against {engine} with --mode {mode}; that mode has {' and '.join(AGAINST[mode])} beside it")
        if engine in PEERS and dtype != "bf16":
            raise InvalidArgumentError(f"--against {engine} with --dtype {dtype}; what users write with {engine} moves bf16 rows")


def parse_config(option: str, text: str | None) -> tuple[int, ...]:
    """`6,256,6,128`: what is sent at once, and what there is room for, within a node and between nodes."""
    if text is None:
        return ()
    from expertwire.ep.config import Config

    numbers = whole_numbers(option, text, form=f"{CONFIG_NUMBERS} whole numbers with commas")
    if len(numbers) != CONFIG_NUMBERS:
        raise InvalidArgumentError(f"{option} is {text}; that is {len(numbers)} numbers, it must be {CONFIG_NUMBERS}")
    try:
        Config(20, *numbers)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{option} is {text}: {error}") from None
    return numbers


def parse_tokens(text: str, ranks: int) -> tuple[int, ...]:
    """`1024`, or one count for each rank: `0,128,1,77`."""
    counts = whole_numbers("--tokens", text, 0, form="a whole number, or one for each rank with commas")
    if len(counts) not in (1, ranks):
        raise InvalidArgumentError(f"--tokens names {len(counts)} counts; there are {ranks} ranks")
    return counts * ranks if len(counts) == 1 else counts


def make_inputs(setup: Setup, rank: int) -> Inputs:
    """What `rank` sends: a function of the seed, so that every rank can derive what the others do."""
    import torch

    from expertwire.cli.bench.paired import Inputs

    generator = torch.Generator().manual_seed(setup.seed * 1_000_003 + rank)
    tokens, experts, topk = setup.tokens[rank], setup.experts, setup.topk
    x = torch.randn(tokens, setup.hidden, generator=generator).to(torch.bfloat16)
    if setup.routing == "none":
        ids = torch.full((tokens, topk), -1)
    elif setup.routing in ("duplicates", "holes"):
        ids = torch.randint(experts, (tokens, topk), generator=generator)
        if setup.routing == "holes":
            ids[torch.rand(tokens, topk, generator=generator) < 1 / 3] = -1
            ids[::5] = -1
    else:
        scores = torch.rand(tokens, experts, generator=generator)
        if setup.routing == "skewed":
            scores = scores ** torch.logspace(0, 2, experts)
        ids = scores.topk(topk, dim=1)[1]
    return Inputs(x, ids, torch.rand(tokens, topk, generator=generator))


def _rank(rank: Rank, setup: Setup) -> Measured:
    from expertwire.cli.bench.arms import make_arms
    from expertwire.cli.bench.paired import check_worst, expect, measure

    if setup.mode == "ll":
        from expertwire.cli.bench.ep_low_latency import rank_main

        return rank_main(rank, setup)
    own = make_inputs(setup, rank.rank)
    expected = expect(
        rank.rank, setup.ranks, setup.experts, lambda source: own if source == rank.rank else make_inputs(setup, source), setup.dtype
    )
    arms = make_arms(setup, expected.rows.shape[0])
    rank.progress("ranks and fabric ready", 1, 1)
    try:
        measured = measure(rank, arms, own, expected, list(setup.node_of), setup.iterations, setup.warmup)
        if setup.worst:
            measured.worst_faults.extend(check_worst(arms[0], own, expected, list(setup.node_of), rank.rank))
        return measured
    finally:
        for arm in arms:
            arm.close()


def labels_of(setup: Setup, provider: str) -> dict[str, Any]:
    """What every row of a run says of it."""
    return {
        "device": "cpu",
        "ranks": setup.ranks,
        "ranks_per_node": setup.node_of.count(0),
        "tokens": max(setup.tokens),
        "hidden": setup.hidden,
        "experts": setup.experts,
        "topk": setup.topk,
        "dtype": setup.dtype,
        "mode": MODES[setup.mode],
        "provider": provider,
    }


def add_rows(report: Report, measured: list[Measured], setup: Setup) -> None:
    """Turn the ranks' samples into the rows of SPEC section 5."""
    shape = labels_of(setup, measured[0].provider)
    received = statistics.mean(one.received_rows for one in measured) * setup.row_bytes
    returned = statistics.mean(one.sent_rows for one in measured) * setup.hidden * ROW_BYTES
    arms = {samples.arm: slowest([one.samples[number] for one in measured]) for number, samples in enumerate(measured[0].samples)}
    for number, arm in enumerate(arms):
        good = not any(one.samples[number].faults for one in measured) and (arm in PEERS or crossed(measured))
        report.add("verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED, **shape, engine=arm)
        for phase, payload in phases_of(arm, setup.mode, received, returned):
            for seconds, place in by_place(arms[arm], phase):
                spread: dict[str, Any] = {"low": round(min(seconds) * 1e6, 1), "high": round(max(seconds) * 1e6, 1)}
                median = statistics.median(seconds)
                report.add(f"{phase}_us", round(median * 1e6, 1), "µs", **shape, engine=arm, **place, **spread)
                if payload:
                    report.add(f"{phase}_GBps", round(payload / median / 1e9, 3), "GB/s", **shape, engine=arm, **place)
        if "dispatch_all" in arms[arm]:
            add_whole(report, arm, arms[arm], shape)
    if setup.worst:
        good = not any(one.worst_faults for one in measured)
        status = RowStatus.OK if good else RowStatus.FAILED
        report.add("worst_tokens_verified", int(good), "", status, **shape, engine="expertwire")
    for peer in PEERS:
        if peer in arms:
            add_over_peer(report, arms, peer, shape)
    if "sync" in arms:
        add_async_over_sync(report, arms, shape)
    if HIGH_THROUGHPUT in arms:
        add_over_ht(report, arms, shape)
    if received and min(one.received_rows for one in measured):
        copies = [max(one.copy_seconds[i] for one in measured) for i in range(setup.iterations)]
        copied = statistics.median(copies)
        for phase, payload in (("dispatch", received), ("combine", returned)):
            for seconds, place in by_place(arms["expertwire"], phase):
                share = copied * payload / received / statistics.median(seconds)
                report.add("copy_utilization", round(share, 3), "", **shape, engine="expertwire", phase=phase, **place)
    report.add("wire_operations", sum(one.wire_operations for one in measured), "", **shape, engine="expertwire")
    wire = sum(one.wire_rows for one in measured) * setup.row_bytes
    report.add("wire_bytes", wire, "B", **shape, engine="expertwire", phase="dispatch")


def phases_of(arm: str, mode: str, received: float, returned: float) -> list[tuple[str, float]]:
    """Which phases of an engine are told, and the bytes of rows in each: 0 where it is a part, or another mode's rows count otherwise."""
    whole = [("dispatch", received), ("combine", returned)]
    if arm == HIGH_THROUGHPUT:
        return [("layout", 0.0), ("dispatch", 0.0), ("combine", 0.0)]
    if mode == "ll":
        return [*whole, *((f"{phase}_{part}", 0.0) for phase, _ in whole for part in ("send", "hook"))]
    return whole if arm in PEERS else [("layout", 0.0), *whole]


def crossed(measured: list[Measured]) -> bool:
    """Whether every rank that had rows for another node gave them to the provider: a run beside the fabric has verified nothing of it."""
    return all(one.wire_operations > 0 for one in measured if one.wire_rows)


def slowest(samples: list[Samples]) -> dict[str, list[float]]:
    """Of one arm, all ranks: phase → by iteration, the slowest rank's time; `dispatch_all` has the layout in it, `total_…` everything."""
    by_rank = [one.seconds for one in samples]
    found = {phase: [max(times) for times in zip(*(one[phase] for one in by_rank), strict=True)] for phase in by_rank[0]}
    found["dispatch_all"] = [a + b for a, b in zip(found["layout"], found["dispatch"], strict=True)]
    for _, place in by_place(found, "combine"):
        total = zip(found["dispatch_all"], found[combine_phase(place["combine_input"])], strict=True)
        found[f"total_{place['combine_input']}"] = [a + b for a, b in total]
    return found


def combine_phase(place: str) -> str:
    """The key of `Samples.seconds` for combines whose rows lay at `place`."""
    return f"combine_{place}"


def by_place(seconds: dict[str, list[float]], phase: str) -> list[tuple[list[float], dict[str, Any]]]:
    """Seconds by iteration and their labels: `combine` and `total` once for each place that combine's rows may lie at."""
    if phase in seconds and not phase.startswith("combine"):
        return [(seconds[phase], {})]
    return [(seconds[f"{phase}_{place}"], {"combine_input": place}) for place in PLACES if f"{phase}_{place}" in seconds]


def add_whole(report: Report, arm: str, seconds: dict[str, list[float]], labels: dict[str, Any]) -> None:
    """The times that `over_…` are ratios of: a dispatch with its layout, a combine, and both, added up iteration by iteration."""
    for phase, key in (("dispatch", "dispatch_all"), ("combine", "combine"), ("total", "total")):
        for times, place in by_place(seconds, key):
            spread: dict[str, Any] = {"low": round(min(times) * 1e6, 1), "high": round(max(times) * 1e6, 1)}
            report.add("whole_us", round(statistics.median(times) * 1e6, 1), "µs", **labels, engine=arm, phase=phase, **place, **spread)


def add_over_peer(report: Report, arms: dict[str, dict[str, list[float]]], peer: str, labels: dict[str, Any]) -> None:
    """A peer's median time over ours, by phase; our layout counts as dispatch, as theirs does. `exchange`: where they only move rows."""
    ours, other = arms["expertwire"], {phase: statistics.median(seconds) for phase, seconds in arms[peer].items()}
    exchange = {"dispatch": other["dispatch_exchange"], "combine": other["combine_exchange"]}
    exchange["total"] = exchange["dispatch"] + exchange["combine"]
    whole = {"dispatch": other["dispatch_all"], "combine": other["combine"], "total": other[f"total_{ORDINARY}"]}
    for name, theirs in ((f"over_{peer}", whole), (f"over_{peer}_exchange", exchange)):
        for phase, key in (("dispatch", "dispatch_all"), ("combine", "combine"), ("total", "total")):
            for seconds, place in by_place(ours, key):
                ratio = theirs[phase] / statistics.median(seconds)
                report.add(name, round(ratio, 3), "×", **labels, engine=peer, phase=phase, **place)


def add_async_over_sync(report: Report, arms: dict[str, dict[str, list[float]]], labels: dict[str, Any]) -> None:
    """The synchronous fallback's median time over ours, by phase; layout counts as dispatch."""
    for phase, key in (("dispatch", "dispatch_all"), ("combine", "combine"), ("total", "total")):
        for (ours, place), (theirs, _) in zip(by_place(arms["expertwire"], key), by_place(arms["sync"], key), strict=True):
            ratio = statistics.median(theirs) / statistics.median(ours)
            report.add("async_over_sync", round(ratio, 3), "×", **labels, engine="expertwire", phase=phase, **place)


def add_over_ht(report: Report, arms: dict[str, dict[str, list[float]]], labels: dict[str, Any]) -> None:
    """The high-throughput mode's median time over the low-latency mode's, by phase; its layout counts as dispatch."""
    theirs = {place["combine_input"]: statistics.median(seconds) for seconds, place in by_place(arms[HIGH_THROUGHPUT], "combine")}
    dispatch = statistics.median(arms[HIGH_THROUGHPUT]["dispatch_all"])
    ours = statistics.median(arms["expertwire"]["dispatch"])
    report.add("over_ht", round(dispatch / ours, 3), "×", **labels, engine=HIGH_THROUGHPUT, phase="dispatch")
    for seconds, place in by_place(arms["expertwire"], "combine"):
        # Its zero copy is a combine of the rows where they were received.
        other = theirs[ORDINARY] if place["combine_input"] == ORDINARY else theirs.get(RECEIVED, theirs[ORDINARY])
        for phase, ratio in (
            ("combine", other / statistics.median(seconds)),
            ("total", (dispatch + other) / (ours + statistics.median(seconds))),
        ):
            report.add("over_ht", round(ratio, 3), "×", **labels, engine=HIGH_THROUGHPUT, phase=phase, **place)
