"""`bench ep --loop`: dispatch without a pause, async beside its synchronous fallback and the raw ceiling of the same wire.

Engines take turns. A turn is a few dispatches back to back, each with other bytes; all of what they brought is checked once the clock has
stopped. What crossed the interface is read from the kernel's own counters. With `--shape` everything happens in a network namespace of
this run alone, whose loopback has a limited rate: there the wire is the limit, and not the cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import Received
from expertwire.cli.bench.ep import ROW_BYTES, make_inputs
from expertwire.cli.bench.loop import Loop
from expertwire.cli.bench.paired import Expected, Inputs, check_dispatch, expect, turn
from expertwire.cli.bench.raw import RawSide
from expertwire.cli.bench.shaped import enter_shaped, loopback_bytes
from expertwire.cli.report import Report, RowStatus, options, terminal
from expertwire.ep import Buffer
from expertwire.errors import UnavailableError
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library, choose_interface

if TYPE_CHECKING:
    from expertwire.cli.launch import Rank

RAW_SHAPES = ((65_536, 64), (262_144, 32), (1 << 20, 16))  # bytes of a write, window: the best of them is the ceiling
RAW_SLOTS_BYTES = 32 << 20
RAW_S = 0.5  # of one sample: the queue of a shaped loopback holds 50 ms
# What may cross a namespace of our own beside the rows: headers and acknowledgements; notifies, words, heartbeats and barriers.
OVERHEAD_MAX, OVERHEAD_BYTES_MAX = 0.1, 64 << 10  # share of the rows, and bytes for each rank and dispatch


@dataclass
class Turns:
    """What one engine did on one rank, by turn."""

    seconds: list[float] = field(default_factory=list)
    interface_bytes: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass
class Looped:
    """What a rank hands back. Raw: by shape, bytes per second of both directions of this rank's pair, one figure per sample."""

    engines: dict[str, Turns]
    raw: dict[tuple[int, int], list[float]]
    wire_rows: int  # one per token and remote node, of one dispatch
    received_rows: int
    provider: str


def run(args: argparse.Namespace, loop: Loop) -> int:
    """Measure, write the file, print the table."""
    config = {**asdict(loop.setup), "loop": loop.seconds, "microbatches": loop.microbatches, "shape": loop.shape}
    report = Report("bench ep --loop", {**config, "options": options(args)})
    from expertwire.cli.launch import launch
    from expertwire.cli.progress import RankProgress

    looped = None
    try:
        if args.shape:
            enter_shaped(args.shape)
        with RankProgress(loop.setup.ranks) as progress:
            looped = launch(_rank, (loop,), loop.setup.ranks, on_progress=progress.update, timeout_s=120 + 3 * loop.seconds)
    except UnavailableError as error:
        report.add("wire_utilization", None, "", RowStatus.SKIPPED, why=str(error), shape=loop.shape)
        print(f"expertwire: {error}", file=sys.stderr)
    if looped is not None:
        report.config["provider"] = looped[0].provider
        add_rows(report, looped, loop)
        for rank, one in enumerate(looped):
            for engine, turns in one.engines.items():
                for fault in turns.faults:
                    print(f"rank {rank}, {engine}: {fault}", file=sys.stderr)
    title = f"sustained dispatch, {loop.setup.ranks} ranks, loopback {loop.shape}; GB/s of wire and raw are of all ranks together"
    report.write(args.json, args.html)
    terminal().print(report.table(title, hide=("raw_bytes", "raw_window")))
    return report.exit_status()


@dataclass
class Part:
    """One microbatch of one rank: its inputs in as many variants as a turn has dispatches, and what must be received."""

    own: Inputs
    xs: list[torch.Tensor]
    numbers: list[int]  # the variant that each of `xs` is in
    expected: Expected


def make_part(loop: Loop, rank: int, number: int, parts: int) -> Part:
    """Tokens [number / parts, (number + 1) / parts) of every rank."""
    setup = loop.setup

    def inputs(source: int) -> Inputs:
        whole, tokens = make_inputs(setup, source), setup.tokens[source]
        cut = slice(number * tokens // parts, (number + 1) * tokens // parts)
        return Inputs(whole.x[cut].contiguous(), whole.topk_idx[cut].contiguous(), whole.topk_weights[cut].contiguous())

    own = inputs(rank)
    expected = expect(rank, setup.ranks, setup.experts, lambda source: own if source == rank else inputs(source))
    return Part(own, [own.x.clone() for _ in range(loop.dispatches)], [0] * loop.dispatches, expected)


class Engine:
    """One way to dispatch: a Buffer for each part of a batch, each driven by a thread of its own where there are several."""

    def __init__(self, loop: Loop, parts: list[Part], rank: int, *, sync: bool) -> None:
        setup = loop.setup
        self.parts, self.experts = parts, setup.experts
        self.buffers = []
        for part in parts:
            most = torch.tensor(max(1, part.expected.rows.shape[0]))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            experts_max = max(1, -(-setup.experts // setup.ranks))
            plan = Buffer.memory_plan(
                setup.node_of, num_max_recv_tokens=int(most), hidden=setup.hidden, num_topk=setup.topk, max_local_experts=experts_max
            )
            self.buffers.append(
                Buffer(
                    dist.group.WORLD,
                    num_nvl_bytes=plan[rank].data_bytes * loop.dispatches,
                    explicitly_destroy=True,
                    node_of=setup.node_of,
                    provider=setup.provider,
                    max_local_experts=experts_max,
                    sync_writes=sync,
                )
            )

    def turn(self, faults: list[str]) -> float:
        """As many dispatches as there are variants, then the check of everything that they brought. Seconds of the dispatches."""
        received: list[list[Received]] = [[] for _ in self.parts]
        errors: list[BaseException] = []

        def dispatch_all(at: int) -> None:
            try:
                for x in self.parts[at].xs:
                    received[at].append(self._dispatch(self.buffers[at], self.parts[at].own, x))
            except BaseException as error:
                errors.append(error)

        others = [threading.Thread(target=dispatch_all, args=(at,)) for at in range(1, len(self.parts))]
        dist.barrier()
        begin = time.perf_counter()
        for thread in others:
            thread.start()
        dispatch_all(0)
        for thread in others:
            thread.join()
        elapsed = time.perf_counter() - begin
        if errors:
            raise errors[0]
        for part, got in zip(self.parts, received, strict=True):
            for number, one in zip(part.numbers, got, strict=True):
                part.expected.turn(number)
                faults += check_dispatch(one, part.expected)
        return elapsed

    def _dispatch(self, buffer: Buffer, own: Inputs, x: torch.Tensor) -> Received:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(own.topk_idx, self.experts)
        rows, ids, weights, _, _, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=own.topk_idx,
            topk_weights=own.topk_weights,
        )
        assert ids is not None
        assert weights is not None
        return Received(rows, ids, weights)

    def close(self) -> None:
        """Release everything. Collective."""
        for buffer in self.buffers:
            buffer.destroy()


class RawPair:
    """The raw loop between ranks 2k and 2k + 1, all pairs at once, both ways; a last odd rank looks on."""

    def __init__(self, rank: int, ranks: int, provider: str, stack: ExitStack) -> None:
        settings = Settings.from_environment()
        self.busy = rank ^ 1 < ranks
        self.side = None
        if self.busy:
            address = choose_interface(settings, 1).address
            self.side = stack.enter_context(RawSide(best_library(settings), provider, address, RAW_SLOTS_BYTES))
        addresses: list[Any] = [None] * ranks
        dist.all_gather_object(addresses, self.side.address if self.side else None)
        if self.side:
            self.side.connect(addresses[rank ^ 1])

    def sample(self, nbytes: int, window: int, seed: int) -> tuple[float, int]:
        """Bytes per second that this rank sent, and how many wrong words it received. Collective."""
        slots = min(window, RAW_SLOTS_BYTES // nbytes)
        rate, wrong = 0.0, 0
        if self.side:
            self.side.fill(nbytes * slots, seed)
        dist.barrier()
        if self.side:
            self.side.start(nbytes, window, slots, round(RAW_S * 1000))
            sent = self.side.sent()
            rate = sent.operations * nbytes / sent.seconds
        dist.barrier()
        if self.side:
            self.side.stop()
            wrong = self.side.wrong_words(nbytes * slots, seed)
        return rate, wrong


def _rank(rank: Rank, loop: Loop) -> Looped:
    """Everything that one rank does."""
    whole = [make_part(loop, rank.rank, 0, 1)]
    cut = [make_part(loop, rank.rank, number, loop.microbatches) for number in range(loop.microbatches)] if loop.microbatches > 1 else []
    engines = {"async": Engine(loop, whole, rank.rank, sync=False), "sync": Engine(loop, whole, rank.rank, sync=True)}
    if cut:
        engines["microbatched"] = Engine(loop, cut, rank.rank, sync=False)
    nodes = torch.tensor(loop.setup.node_of)
    mine = loop.setup.node_of[rank.rank]
    remote = [whole[0].expected.in_rank[:, nodes == node].any(1).sum() for node in set(loop.setup.node_of) if node != mine]
    provider = engines["async"].buffers[0].provider
    looped = Looped({name: Turns() for name in engines}, {}, int(sum(remote)), whole[0].expected.rows.shape[0], provider)
    with ExitStack() as stack:
        raw = RawPair(rank.rank, rank.size, provider, stack)
        rank.progress("ranks and fabric ready", 1, 1)
        try:
            turns(rank, loop, engines, raw, looped)
        finally:
            for engine in engines.values():
                engine.close()
    return looped


def turns(rank: Rank, loop: Loop, engines: dict[str, Engine], raw: RawPair, looped: Looped) -> None:
    """Turn about until the time is up: one turn of each engine and one sample of the raw loop make a round."""
    begin, number, variant = time.monotonic(), 0, 0
    names = list(engines)
    going = torch.ones(1, dtype=torch.int64)
    while int(going[0]):
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            for part in engines[name].parts:
                for place, x in enumerate(part.xs):
                    turn(x, part.numbers[place], variant + 1 + place)
                    part.numbers[place] = variant + 1 + place
            variant += loop.dispatches
            before = loopback_bytes()
            kept = looped.engines[name]
            seconds = engines[name].turn(kept.faults)
            if number > 0:  # the first round touches every page and connection for the first time
                kept.seconds.append(seconds)
                kept.interface_bytes.append(loopback_bytes() - before)
        shape = RAW_SHAPES[number % len(RAW_SHAPES)]
        rate, wrong = raw.sample(*shape, number + 1)
        looped.raw.setdefault(shape, []).append(rate)
        if wrong:
            looped.engines["async"].faults.append(f"the raw loop delivered {wrong} wrong words")
        number += 1
        elapsed = time.monotonic() - begin
        going[0] = int(elapsed < loop.seconds or number <= len(RAW_SHAPES))
        dist.broadcast(going, 0)
        rank.progress("measuring", min(round(elapsed), round(loop.seconds)) if int(going[0]) else round(loop.seconds), round(loop.seconds))


def add_rows(report: Report, looped: list[Looped], loop: Loop) -> None:
    """Turn the ranks' turns into rows."""
    setup = loop.setup
    labels: dict[str, Any] = {
        "device": "cpu", "ranks": setup.ranks, "ranks_per_node": setup.node_of.count(0), "tokens": max(setup.tokens),
        "hidden": setup.hidden, "experts": setup.experts, "topk": setup.topk, "dtype": "bf16", "mode": "high_throughput",
        "provider": looped[0].provider, "phase": "dispatch", "shape": loop.shape,
    }  # fmt: skip
    wire = sum(one.wire_rows for one in looped) * setup.hidden * ROW_BYTES  # of one dispatch of all ranks
    received = statistics.mean(one.received_rows for one in looped) * setup.hidden * ROW_BYTES
    shares = {shape: [sum(rates) for rates in zip(*(one.raw[shape] for one in looped), strict=True)] for shape in looped[0].raw}
    best = max(shares, key=lambda shape: statistics.median(shares[shape]))
    ceiling = statistics.median(shares[best])
    spread: dict[str, Any] = {"low": round(min(shares[best]) / 1e9, 4), "high": round(max(shares[best]) / 1e9, 4)}
    report.add("raw_GBps", round(ceiling / 1e9, 4), "GB/s", **labels, engine="raw", raw_bytes=best[0], raw_window=best[1], **spread)
    each: dict[str, float] = {}  # seconds of one dispatch, over all turns
    for name in looped[0].engines:
        own = {**labels, "engine": name, "microbatches": loop.microbatches if name == "microbatched" else 1}
        taken = [max(times) for times in zip(*(one.engines[name].seconds for one in looped), strict=True)]
        each[name] = sum(taken) / len(taken) / loop.dispatches
        crossed = sum(looped[0].engines[name].interface_bytes) / len(taken) / loop.dispatches
        good = not any(one.engines[name].faults for one in looped) and crossed >= wire
        good = good and (loop.shape == "bare" or crossed <= (1 + OVERHEAD_MAX) * wire + OVERHEAD_BYTES_MAX * setup.ranks)
        report.add("verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED, **own)
        few: dict[str, Any] = {"low": round(min(taken) / loop.dispatches * 1e6, 1), "high": round(max(taken) / loop.dispatches * 1e6, 1)}
        report.add("dispatch_us", round(each[name] * 1e6, 1), "µs", **own, **few)
        report.add("dispatch_GBps", round(received / each[name] / 1e9, 4), "GB/s", **own)
        report.add("wire_GBps", round(wire / each[name] / 1e9, 4), "GB/s", **own)
        report.add("wire_utilization", round(wire / each[name] / ceiling, 3), "", **own)
        report.add("interface_over_wire", round(crossed / wire, 4), "×", **own)
    report.add("async_over_sync", round(each["sync"] / each["async"], 3), "×", **labels, engine="async")
    if "microbatched" in each:
        gain = round(each["async"] / each["microbatched"], 3)
        report.add("overlap_gain", gain, "×", **labels, engine="microbatched", microbatches=loop.microbatches)
