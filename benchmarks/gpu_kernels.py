"""Times the GPU kernels themselves: dispatch and combine of several ranks on one card (under MPS) or several, without `Buffer` around them.

    python benchmarks/gpu_kernels.py --ranks 8 --tokens 4096 --out rows.json [--variants all] [--seconds 200]

Starts an MPS daemon in a fresh folder unless --no-mps, one process a rank, and ends both. Each row: what ran, microseconds (the slowest
rank's mean, back to back), GB moved, and its share of a plain copy's rate, measured beside by all ranks at once. What is timed is checked
first: received rows against the senders' own, sums against n times the row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist

from expertwire.ep.bootstrap import Launch
from expertwire.ep.cuda.exchange import Exchange, Route, Tuning, control_bytes
from expertwire.ep.cuda.symmetric import DeviceBytes, Symmetric, allocate, device_tensor
from expertwire.ep.plan import dispatch_extent

DISPATCHES = [
    Tuning(programs=programs, warps=warps, group=group, block_bytes=block)
    for programs, warps, group, block in (
        (64, 4, 8, 16384),
        (16, 8, 8, 16384),
        (32, 8, 8, 16384),
        (32, 4, 8, 16384),
        (128, 4, 8, 16384),
        (64, 8, 8, 16384),
        (64, 2, 8, 8192),
        (128, 2, 8, 8192),
        (64, 4, 16, 16384),
        (64, 4, 4, 16384),
        (64, 4, 8, 4096),
        (16, 16, 8, 16384),
    )
]
COMBINES = [
    Tuning(combine_programs=programs, combine_warps=warps, combine_block=block)
    for programs, warps, block in (
        (128, 4, 1024),
        (64, 4, 1024),
        (32, 4, 1024),
        (16, 8, 2048),
        (32, 8, 2048),
        (64, 8, 2048),
        (64, 4, 2048),
        (128, 2, 512),
        (64, 4, 512),
        (256, 2, 512),
        (16, 16, 4096),
    )
]


@dataclasses.dataclass
class Work:
    """One shape on this rank, and where its rows lie."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    fp8: bool
    worst: int

    def make(self, rank: int, device: torch.device, step: int = 0) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        random = torch.Generator(device=device).manual_seed(rank + 1000 * step)
        x = torch.randn((self.tokens, self.hidden), device=device, generator=random).bfloat16()
        scores = torch.rand((self.tokens, self.experts), device=device, generator=random)
        ids = scores.topk(self.topk, dim=1).indices
        weights = torch.rand((self.tokens, self.topk), device=device, generator=random)
        scales = None
        if self.fp8:
            x = x.to(torch.float8_e4m3fn)
            scales = torch.rand((-(-self.hidden // 128), self.tokens), device=device, generator=random).t()
        return x, scales, ids, weights


class Rank:
    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rows: list[dict[str, Any]] = []
        launch = Launch(rank, size, self.gather)
        self.control: Symmetric = allocate(launch, control_bytes(size, 512), self.device)
        self.data: Symmetric = allocate(launch, 640 << 20, self.device)
        self.exchange = Exchange(self.control, self.data, 512, 20_000)

    def gather(self, mine: Any) -> list[Any]:
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine)
        return answers

    def say(self, **row: Any) -> None:
        if self.rank == 0:
            self.rows.append(row)
            print(json.dumps(row), flush=True)

    def late(self) -> bool:
        """Whether the time is up: rank 0's word, so that all ranks stop at the same place."""
        return bool(self.gather(time.monotonic() > self.deadline)[0])

    def load(self, work: Any) -> None:
        """Compile and load before anybody waits: rank 0 first, the others from its cache."""
        for turn in (True, False):
            if (self.rank == 0) == turn:
                with self.exchange.launch.loading():
                    work()
            torch.cuda.synchronize()
            dist.barrier()

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = dtype.itemsize
        for length in shape:
            count *= length
        return device_tensor(DeviceBytes(self.data.address + offset, count, self.device, self.data), dtype, shape)

    def timed(self, work: Any, repeats: int = 20) -> float:
        """Microseconds a call, back to back; the slowest rank's."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        record = self.exchange.record.tolist()
        assert not any(record[:16]), record
        return max(self.gather(begin.elapsed_time(end) * 1000 / repeats))

    # ---- one shape

    def dispatch(self, work: Work, given: Any, layout: Any) -> tuple[Route, torch.Tensor | None]:
        x, scales, ids, weights = given
        _, per_expert, in_rank = layout
        offer = (0, self.data.length)
        return self.exchange.dispatch(x, scales, in_rank, per_expert, ids, weights, offer, work.worst, 1)

    def combine(self, work: Work, route: Route, out: torch.Tensor, rows: int, weights_out: torch.Tensor | None = None) -> None:
        at = dispatch_extent(rows, 2 * work.hidden, work.topk, 8, True, 0)
        self.exchange.combine(0, at.topk_weights, work.topk if weights_out is not None else 0, route, (), out, weights_out)

    def check(self, work: Work, given: Any, layout: Any) -> int:
        """One dispatch and its combine against the senders' own rows; rows received."""
        size, me = self.size, self.rank
        route, mailbox = self.dispatch(work, given, layout)
        torch.cuda.synchronize()
        record = self.exchange.record.tolist()
        assert record[0] == 0, f"rank {me} gave up: {record}"
        box = None if mailbox is None else mailbox.tolist()
        total = int(route.words[1])
        assert box is None or (box[0] == 0 and box[4] == total), box
        rows = work.worst or total
        everyone = [work.make(rank, self.device) for rank in range(size)]
        wanted, wanted_ids, wanted_weights, wanted_scales, sources = [], [], [], [], []
        share = work.experts // size
        for x, scales, ids, weights in everyone:
            mine = ids // share == me
            pick = mine.any(1).nonzero().flatten()
            wanted.append(x[pick])
            sources.append(pick.int())
            wanted_ids.append(torch.where(mine, ids - me * share, -1)[pick])
            wanted_weights.append(torch.where(mine, weights, 0.0)[pick])
            if scales is not None:
                wanted_scales.append(scales[pick])
        want = torch.cat(wanted)
        width = wanted_scales[0].shape[1] if wanted_scales else 0
        at = dispatch_extent(rows, want.shape[1] * want.element_size(), work.topk, 8, True, 4 * width)
        assert want.shape[0] == total, (want.shape, total)
        got = self.tensor(at.rows, want.dtype, (total, work.hidden))
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), "rows"
        assert torch.equal(self.tensor(at.src_idx, torch.int32, (total,)), torch.cat(sources)), "sources"
        ids = self.tensor(at.topk_idx, torch.int64, (rows, work.topk))
        assert torch.equal(ids[:total], torch.cat(wanted_ids)), "ids"
        assert bool((ids[total:] == -1).all()), "ids behind the last row"
        assert torch.equal(self.tensor(at.topk_weights, torch.float32, (total, work.topk)), torch.cat(wanted_weights)), "weights"
        if wanted_scales:
            assert torch.equal(self.tensor(at.scales, torch.float32, (total, width)), torch.cat(wanted_scales)), "scales"
        else:
            out = torch.full_like(given[0], -7)
            weights_out = torch.full_like(given[3], -7)
            self.combine(work, route, out, rows, weights_out)
            torch.cuda.synchronize()
            times = layout[2].sum(1, keepdim=True)
            assert torch.equal(out, (given[0].float() * times).bfloat16()), "sums"
            assert torch.equal(weights_out, given[3]), "summed weights"
        dist.barrier()
        return total

    def shape(self, work: Work, chosen: list[Tuning], combines: list[Tuning]) -> None:
        given = work.make(self.rank, self.device)
        layout = None

        def layouts() -> None:
            nonlocal layout
            layout = self.exchange.layout(given[2], work.experts)

        self.load(layouts)
        layouts()
        torch.cuda.synchronize()
        name = f"{self.size}x{work.tokens}x{work.hidden} top-{work.topk} of {work.experts} {'fp8' if work.fp8 else 'bf16'} W={work.worst}"
        row_bytes = work.hidden * (1 if work.fp8 else 2)
        out = torch.empty((work.tokens, work.hidden), dtype=torch.bfloat16, device=self.device)
        blank = torch.zeros(1024, dtype=torch.int64, device=self.device)
        stand_in = Route(torch.empty((work.tokens, self.size), dtype=torch.int32, device=self.device), blank, None)
        for number, tuning in enumerate(chosen):
            if self.late():
                return
            self.exchange.tuning = tuning
            self.load(lambda: (self.dispatch(work, given, layout), work.fp8 or self.combine(work, stand_in, out, 1, given[3])))
            if number == 0:
                total = self.check(work, given, layout)
            moved = sum(self.gather((total + work.tokens) * row_bytes)) / 1e9
            begin = time.perf_counter()
            micros = self.timed(lambda: self.dispatch(work, given, layout))
            self.say(
                what="dispatch",
                shape=name,
                us=round(micros, 1),
                gb=round(moved, 3),
                tbps=round(moved / micros * 1e3, 3),
                programs=tuning.programs,
                warps=tuning.warps,
                group=tuning.group,
                block=tuning.block_bytes,
                took=round(time.perf_counter() - begin, 2),
            )
        if work.fp8:
            return
        route, _ = self.dispatch(work, given, layout)
        for tuning in combines:
            if self.late():
                return
            self.exchange.tuning = tuning
            self.load(lambda: self.combine(work, route, out, work.worst or total))
            micros = self.timed(lambda: self.combine(work, route, out, work.worst or total))
            self.say(
                what="combine",
                shape=name,
                us=round(micros, 1),
                gb=round(moved, 3),
                tbps=round(moved / micros * 1e3, 3),
                programs=tuning.combine_programs,
                warps=tuning.combine_warps,
                block=tuning.combine_block,
            )

    # ---- ceilings, and odd questions

    def ceilings(self) -> None:
        half = self.data.length // 2 // 4096 * 4096
        source, target = self.tensor(0, torch.uint8, (half,)), self.tensor(half, torch.uint8, (half,))
        for what, work, count in (
            ("copy by every rank at once", lambda: target.copy_(source), 2 * half * self.size),
            ("fill by every rank at once", lambda: target.fill_(7), half * self.size),
        ):
            micros = self.timed(work, 10)
            self.say(what=what, us=round(micros, 1), gb=round(count / 1e9, 3), tbps=round(count / micros / 1e6, 3))

    def host_cost(self, work: Work) -> None:
        """Microseconds of Python per call, nothing waited for."""
        given = work.make(self.rank, self.device)
        layout = self.exchange.layout(given[2], work.experts)
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(3):
            route, _ = self.dispatch(work, given, layout)
        out = torch.empty_like(given[0])
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            route, _ = self.dispatch(work, given, layout)
        middle = time.perf_counter()
        for _ in range(20):
            self.combine(work, route, out, work.worst)
        end = time.perf_counter()
        torch.cuda.synchronize()
        self.say(what="host", dispatch_us=round((middle - begin) * 5e4, 1), combine_us=round((end - middle) * 5e4, 1), tokens=work.tokens)

    def graph(self, work: Work) -> None:
        """Replays of a dispatch and its combine against the same two called eagerly."""
        given = work.make(self.rank, self.device)
        layout = self.exchange.layout(given[2], work.experts)
        out = torch.empty_like(given[0])

        def both() -> None:
            route, _ = self.dispatch(work, given, layout)
            self.combine(work, route, out, work.worst)

        self.load(both)
        eager = self.timed(both)
        one_by_one = 0.0
        for _ in range(20):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            both()
            torch.cuda.synchronize()
            one_by_one += (time.perf_counter() - begin) * 5e4
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both()
        torch.cuda.synchronize()
        dist.barrier()
        replay = self.timed(graph.replay)
        assert torch.equal(out, (given[0].float() * layout[2].sum(1, keepdim=True)).bfloat16()), "a replay's sums"
        self.say(
            what="graph",
            tokens=work.tokens,
            eager_us=round(eager, 1),
            one_by_one_us=round(max(self.gather(one_by_one)), 1),
            replay_us=round(replay, 1),
        )

    def load_beside_a_wait(self) -> None:
        """Does loading a kernel deadlock while another rank waits on the card? Rank 0 waits; rank 1 loads something new after a second."""
        work = Work(64, 1536, 64, 4, False, 0)
        given = work.make(self.rank, self.device)
        self.load(lambda: self.exchange.layout(given[2], work.experts))
        layout = self.exchange.layout(given[2], work.experts)
        torch.cuda.synchronize()
        dist.barrier()
        if self.rank:
            time.sleep(1.0)
        begin = time.perf_counter()
        self.dispatch(work, given, layout)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        failed = self.exchange.record.tolist()[:8]
        self.say(what="load beside a wait", seconds=[round(one, 2) for one in self.gather(took)], records=self.gather(failed))


def worker(options: argparse.Namespace) -> None:
    torch.cuda.set_device(options.rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=dist.FileStore(options.store, options.ranks), rank=options.rank, world_size=options.ranks)
    rank = Rank(options.rank, options.ranks, time.monotonic() + options.seconds)
    try:
        rank.say(what="start", device=torch.cuda.get_device_name(), ranks=options.ranks, torch=torch.__version__)
        tokens = options.tokens
        received = tokens * options.ranks
        plain = Work(tokens, 7168, 256, 8, False, 0)
        if options.variants == "smoke":
            rank.shape(Work(64, 1024, 64, 4, False, 0), DISPATCHES[:1], COMBINES[:1])
            rank.shape(Work(64, 1024, 64, 4, False, 512), DISPATCHES[:1], COMBINES[:1])
            rank.shape(Work(128, 2048, 64, 4, True, 0), DISPATCHES[:1], [])
            return
        rank.ceilings()
        rank.shape(Work(64, 1024, 64, 4, False, 512), DISPATCHES[:1], COMBINES[:1])
        rank.shape(plain, DISPATCHES[:1], COMBINES[:1])
        rank.shape(dataclasses.replace(plain, fp8=True), DISPATCHES[:1], [])
        rank.exchange.tuning = Tuning()
        for some in (tokens, 512, 128):
            if not rank.late():
                rank.graph(dataclasses.replace(plain, tokens=some, worst=received if some == tokens else some * options.ranks))
                rank.host_cost(dataclasses.replace(plain, tokens=some, worst=some * options.ranks))
        if not rank.late() and options.ranks > 1:
            rank.load_beside_a_wait()
        if options.variants == "all":
            rank.shape(plain, DISPATCHES, COMBINES)
            rank.shape(dataclasses.replace(plain, tokens=512), DISPATCHES[:6], COMBINES[:6])
            rank.shape(dataclasses.replace(plain, fp8=True), DISPATCHES[1:8], [])
    finally:
        if options.rank == 0 and options.out:
            config = {"ranks": options.ranks, "tokens": options.tokens, "variants": options.variants}
            Path(options.out).write_text(json.dumps({"command": "gpu_kernels", "config": config, "rows": rank.rows}, indent=1) + "\n")
        torch.cuda.synchronize()
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--variants", choices=("smoke", "few", "all"), default="all")
    parser.add_argument("--seconds", type=float, default=200.0, help="no variant is begun after so long")
    gpu_ranks.add_arguments(parser)
    options = parser.parse_args()
    if options.rank >= 0:
        worker(options)
        return 0
    return gpu_ranks.run(__file__, options, 60, 25)


if __name__ == "__main__":
    sys.exit(main())
