"""A rank of `bench ep --device cuda`: checks each engine's results, then times it, engines turn about.

Every row says by `timing` how it was taken: `back_to_back`, `event` and `host` as `ep_device_clock` has them, `graph` as back to back, but
replays of a graph. `routing`: a dispatch by a layout made before (fresh) or by an earlier dispatch's handle. `combine_input`: rows where
they were received, or elsewhere. `phase` of a step is total: dispatch with num_worst_tokens, and the combine of what came.
`copy_utilization` is the least time in which a plain copy, measured in the same run, moves the bytes that must move, over the time taken:
each row sent is read once and each received is written once on its card, and a row for another card crosses the link. What is timed was
checked before, and the last replay after; in between, calls carry the same bytes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.bench.ep_device import OURS, DeviceSetup
from expertwire.cli.bench.ep_device_checks import Traffic, check_low_latency, check_throughput
from expertwire.cli.bench.ep_device_clock import Clock, Times, Work
from expertwire.cli.bench.ep_device_engines import Given, LowLatency, Throughput, close_buffer, make, open_buffer
from expertwire.cli.launch import Rank


class Figures:
    """Rows of this run, noted by rank 0 as they are made."""

    def __init__(self, rank: int, setup: DeviceSetup, clock: Clock) -> None:
        self.clock, self._labels, self._deadline = clock, setup.labels(), time.monotonic() + setup.budget_s
        self._journal = Path(setup.journal) if rank == 0 and setup.journal else None
        self.rows: list[dict[str, Any]] = []
        self.us: dict[tuple[Any, ...], dict[str, float]] = {}  # (name, labels…) → engine → median

    def late(self) -> bool:
        """Whether the budget is spent: rank 0's word, so that all stop at the same place. Collective."""
        return bool(self.clock.gather(time.monotonic() > self._deadline)[0])

    def add(self, name: str, value: float | None, unit: str, engine: str, status: str = "ok", **labels: Any) -> None:
        """Note one."""
        row = {"name": name, "value": value, "unit": unit, "status": status, **self._labels, "engine": engine, **labels}
        self.rows.append(row)
        if self._journal is not None:
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def time(self, name: str, times: Times, engine: str, payload: float, floor_us: float, **labels: Any) -> None:
        """A time, and what follows from it. payload: received bytes of a rank. floor_us: 0 where none is known."""
        self.add(f"{name}_us", round(times.us, 1), "µs", engine, low=round(times.low, 1), high=round(times.high, 1), **labels)
        self.us.setdefault((name, *sorted(labels.items())), {})[engine] = times.us
        if labels["timing"] not in ("back_to_back", "graph"):
            return
        if payload:
            self.add(f"{name}_GBps", round(payload / times.us / 1e3, 2), "GB/s", engine, **labels)
        if floor_us:
            self.add("copy_utilization", round(floor_us / times.us, 3), "", engine, **labels)

    def ratios(self) -> None:
        """Others' times over ours."""
        for (name, *labels), by_engine in self.us.items():
            for engine, us in by_engine.items():
                if engine != OURS and OURS in by_engine:
                    word = f"over_{engine.replace('.', '_')}"
                    self.add(word, round(us / by_engine[OURS], 3), "×", engine, figure=f"{name}_us", **dict(labels))

    def take(self, what: str, works: dict[str, Work], payload: float, floor_us: float, rounds: int, **labels: Any) -> None:
        """Time the works of engines by the events of a row, and one at a time. Collective."""
        if self.late():
            for engine in works:
                self.add(f"{what}_us", None, "µs", engine, "skipped", why="the budget was spent", **labels)
            return
        for engine, times in self.clock.back_to_back(works).items():
            self.time(what, times, engine, payload, floor_us, timing="back_to_back", **labels)
        for engine, both in self.clock.one_at_a_time(works, rounds).items():
            for timing, times in both.items():
                self.time(what, times, engine, payload, 0.0, timing=timing, **labels)


class Run:
    """All of one rank."""

    def __init__(self, rank: Rank, setup: DeviceSetup) -> None:
        self.rank, self.setup, self.say = rank.rank, setup, rank.progress
        if setup.device == "cuda":
            torch.cuda.set_device(rank.rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device(setup.device)
        self.clock = Clock(rank.rank, rank.size, self.device)
        self.figures = Figures(rank.rank, setup, self.clock)
        self.buffers: dict[str, Any] = {}

    def open(self) -> None:
        """A Buffer of each engine; one that is not to be had on every rank is a skipped row."""
        for name in (OURS, *self.setup.against):
            why = ""
            try:
                self.buffers[name] = open_buffer(name, self.setup, dist.group.WORLD)
            except Exception as error:
                if name == OURS:
                    raise
                why = f"{type(error).__name__}: {error}"
            whys = [one for one in self.clock.gather(why) if one]
            if whys:
                self.buffers.pop(name, None)
                self.figures.add(f"over_{name.replace('.', '_')}", None, "×", name, "skipped", why=whys[0])

    def ceilings(self) -> tuple[float, float]:
        """Bytes a µs: of a card, of a link."""
        card, peer = self.clock.card_ceiling(), self.clock.peer_ceiling()
        for what, rate in (("card, read and written", card), ("link, one direction", peer)):
            if rate:
                self.figures.add("copy_GBps", round(rate / 1e3, 1), "GB/s", "copy", of=what)
        return card, peer

    def verified(self, engine: str, faults: list[str], **labels: Any) -> None:
        """A row of it. Collective."""
        everywhere = [f"rank {rank}: {fault}" for rank, found in enumerate(self.clock.gather(faults)) for fault in found]
        why = {"why": "; ".join(everywhere)[:400]} if everywhere else {}
        self.figures.add("verified", int(not everywhere), "", engine, "failed" if everywhere else "ok", **labels, **why)

    # ---- high throughput

    def throughput(self, tokens: int, rates: tuple[float, float]) -> None:
        """Every figure of one size."""
        setup, take, rounds = self.setup, self.figures.take, self.setup.iterations
        given = make(setup, tokens, self.rank, self.device)
        traffic = Traffic(setup, self.rank, given, self.clock)
        engines = {name: Throughput(name, buffer, given, setup) for name, buffer in self.buffers.items()}
        for name, engine in engines.items():
            self.verified(name, check_throughput(engine, setup, self.rank, traffic), tokens=tokens)
        cards = self.clock.cards()
        wide = {"bf16": 2.0 * setup.hidden, "fp8": setup.hidden + 4.0 * -(-setup.hidden // 128)}
        floors = {dtype: traffic.floor_us(row_bytes, cards, *rates) for dtype, row_bytes in wide.items()}
        every = {"tokens": tokens}
        take("layout", {name: engine.layout for name, engine in engines.items()}, 0.0, 0.0, rounds, **every)
        for dtype in setup.dtypes:
            for routing in ("fresh", "handle"):
                works: dict[str, Work] = {name: dispatch_work(engine, dtype, routing) for name, engine in engines.items()}
                labels = {"dtype": dtype, "phase": "dispatch", "routing": routing}
                take("dispatch", works, traffic.mean * wide[dtype], floors[dtype], rounds, **every, **labels)
        for place in ("received", "elsewhere"):
            works = {name: combine_work(engine, place) for name, engine in engines.items()}
            labels = {"dtype": "bf16", "phase": "combine", "combine_input": place}
            take("combine", works, traffic.mean * wide["bf16"], floors["bf16"], rounds, **every, **labels)
        self.other_sms(engines[OURS], tokens)
        for engine in engines.values():
            engine.forget()
        if setup.graph:
            for name, engine in engines.items():
                self.graphs(name, engine, given, traffic, floors["bf16"])

    def other_sms(self, engine: Throughput, tokens: int) -> None:
        """Ours with other numbers of multiprocessors."""
        kind, before = type(engine.buffer), type(engine.buffer).num_sms
        for sms in self.setup.also_sms:
            kind.set_num_sms(sms)
            labels = {"tokens": tokens, "sms": sms, "timing": "back_to_back"}
            for dtype in self.setup.dtypes:
                if not self.figures.late():
                    times = self.clock.back_to_back({OURS: dispatch_work(engine, dtype, "fresh")})[OURS]
                    self.figures.time("dispatch", times, OURS, 0.0, 0.0, **labels, dtype=dtype, phase="dispatch", routing="fresh")
            if not self.figures.late():
                times = self.clock.back_to_back({OURS: combine_work(engine, "received")})[OURS]
                self.figures.time("combine", times, OURS, 0.0, 0.0, **labels, dtype="bf16", phase="combine", combine_input="received")
        kind.set_num_sms(before)

    def graphs(self, name: str, engine: Throughput, given: Given, traffic: Traffic, floor_us: float) -> None:
        """Worst-token dispatch and combine, eager and replayed: both together, and each in a graph of its own."""
        worst, tokens = given.tokens * self.setup.ranks, given.tokens
        engine.keep(worst)
        parts: dict[str, Work] = {"dispatch": lambda: engine.dispatch("bf16", worst), "combine": lambda: engine.combine("received")}
        self.replays(name, parts, lambda: engine.step(worst), tokens, "bf16", floor_us, 2 * floor_us)

        def fresh() -> bool:
            return torch.equal(engine.combined, (given.x.float() * traffic.times).bfloat16())

        self.negated(name, given, lambda: engine.step(worst), fresh, tokens)
        engine.forget()

    def replays(
        self, name: str, parts: dict[str, Work], step: Work, tokens: int, dtype: str, part_floor_us: float, floor_us: float
    ) -> None:
        """Time a step called eagerly and replayed, and its parts replayed."""
        figures, clock = self.figures, self.clock
        labels: dict[str, Any] = {"tokens": tokens, "dtype": dtype}
        if self.setup.mode == "ht":
            labels["num_worst_tokens"] = tokens * self.setup.ranks
        if figures.late():
            figures.add("replay_us", None, "µs", name, "skipped", why="the budget was spent", **labels)
            return
        alone: dict[str, float] = {}
        for phase, part in parts.items():
            part()
            graph, nodes = clock.capture(part)
            times = clock.back_to_back({phase: graph.replay})[phase]
            alone[phase] = times.us
            figures.time(phase, times, name, 0.0, part_floor_us, timing="graph", phase=phase, **labels)
            figures.add("launches", nodes.total(), "", name, phase=phase, **labels, **dict[str, Any](nodes))
            del graph
        step()
        eager = clock.back_to_back({"eager": step})["eager"]
        one = clock.one_at_a_time({"eager": step}, self.setup.iterations)["eager"]
        graph, nodes = clock.capture(step)
        figures.add("launches", nodes.total(), "", name, phase="total", **labels, **dict[str, Any](nodes))
        replay = clock.back_to_back({"replay": graph.replay})["replay"]
        one_replay = clock.one_at_a_time({"replay": graph.replay}, self.setup.iterations)["replay"]
        labels["phase"] = "total"
        figures.time("eager", eager, name, 0.0, floor_us, timing="back_to_back", **labels)
        figures.time("replay", replay, name, 0.0, floor_us, timing="back_to_back", **labels)
        for timing, times in one.items():
            figures.time("eager", times, name, 0.0, 0.0, timing=timing, **labels)
        for timing, times in one_replay.items():
            figures.time("replay", times, name, 0.0, 0.0, timing=timing, **labels)
        figures.add("replay_over_eager", round(replay.us / eager.us, 3), "×", name, timing="back_to_back", **labels)
        figures.add("replay_over_eager", round(replay.us / one["host"].us, 3), "×", name, timing="host", **labels)
        figures.add("replay_over_parts", round(replay.us / sum(alone.values()), 3), "×", name, timing="graph", **labels)

    def negated(self, name: str, given: Given, step: Work, right: Callable[[], bool], tokens: int) -> None:
        """A replay that carries other bytes than the capture did is right."""
        step()
        graph, _ = self.clock.capture(step)
        given.x.neg_()
        graph.replay()
        self.clock.together()
        faults = [] if right() else ["a replay's sums differ"]
        given.x.neg_()
        self.verified(name, faults, tokens=tokens, phase="replay")

    # ---- low latency

    def low_latency(self, tokens: int) -> None:
        """Every figure of one size. Both modes of waiting: within the call, and in a hook called at once."""
        setup, take, rounds = self.setup, self.figures.take, self.setup.iterations
        given = make(setup, tokens, self.rank, self.device)
        engines = {name: LowLatency(name, buffer, given, setup) for name, buffer in self.buffers.items()}
        rows = statistics.mean(self.clock.gather(tokens * setup.topk))
        wide = {"bf16": 2.0 * setup.hidden, "fp8": setup.hidden + 4.0 * -(-setup.hidden // 128)}
        for dtype in setup.dtypes:
            for name, engine in engines.items():
                self.verified(name, check_low_latency(engine, setup, self.rank, dtype, self.clock), tokens=tokens, dtype=dtype)
            for hook in (False, True):
                labels: dict[str, Any] = {"tokens": tokens, "dtype": dtype, "hook": hook}
                works: dict[str, Work] = {name: low_latency_work(engine, dtype, hook) for name, engine in engines.items()}
                take("dispatch", works, rows * wide[dtype], 0.0, rounds, phase="dispatch", **labels)
                if dtype == setup.dtypes[0]:  # what comes back is bf16 either way
                    works = {name: low_latency_combine(engine, hook) for name, engine in engines.items()}
                    take("combine", works, rows * wide["bf16"], 0.0, rounds, phase="combine", **labels)
            if setup.graph:
                for name, engine in engines.items():
                    parts: dict[str, Work] = {
                        "dispatch": low_latency_work(engine, dtype, False),
                        "combine": low_latency_combine(engine, False),
                    }
                    self.replays(name, parts, low_latency_step(engine, dtype), tokens, dtype, 0.0, 0.0)
        for engine in engines.values():
            engine.forget()


def dispatch_work(engine: Throughput, dtype: str, routing: str) -> Work:
    """A dispatch as a call without arguments."""
    return lambda: engine.dispatch(dtype) if routing == "fresh" else engine.again(dtype)


def combine_work(engine: Throughput, place: str) -> Work:
    """A combine as such a call."""
    return lambda: engine.combine(place)


def low_latency_work(engine: LowLatency, dtype: str, hook: bool) -> Work:
    """A low-latency dispatch as such a call."""
    return lambda: engine.dispatch(dtype, hook)


def low_latency_combine(engine: LowLatency, hook: bool) -> Work:
    """A low-latency combine as such a call."""
    return lambda: engine.combine(hook)


def low_latency_step(engine: LowLatency, dtype: str) -> Work:
    """Both as such a call."""
    return lambda: engine.step(dtype)


def rank_main(rank: Rank, setup: DeviceSetup) -> list[dict[str, Any]]:
    """A rank's whole run; the rows, the same on every rank."""
    run = Run(rank, setup)
    run.open()
    rank.progress("ranks and Buffers ready", 1, 1)
    try:
        if setup.mode == "ht":
            rates = run.ceilings()
            for number, tokens in enumerate(setup.sizes):
                run.throughput(tokens, rates)
                rank.progress("measuring", number + 1, len(setup.sizes))
        else:
            for number, tokens in enumerate(setup.sizes):
                run.low_latency(tokens)
                rank.progress("measuring", number + 1, len(setup.sizes))
        run.figures.ratios()
        run.clock.together()
        return run.figures.rows
    finally:
        for name, buffer in run.buffers.items():
            close_buffer(name, buffer)
