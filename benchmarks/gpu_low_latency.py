"""Checks and times the low-latency kernels themselves: several ranks on one card (under MPS) or several, without `Buffer` around them.

    python benchmarks/gpu_low_latency.py --ranks 8 --tokens 128 --out rows.json [--variants check|few|all] [--seconds 60]

Starts an MPS daemon in a fresh folder unless --no-mps, one process a rank, and ends both. First each format against the oracle, bit for
bit: eager with and without hooks, then in a graph replayed with fresh rows. Then microseconds (the slowest rank's mean, back to back),
eager and in a graph, beside a plain copy's rate by all ranks at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist

from expertwire.ep.bootstrap import Launch
from expertwire.ep.cuda.low_latency_exchange import LowLatencyExchange, LowLatencyTuning, Shape, low_latency_control_bytes, needed_bytes
from expertwire.ep.cuda.symmetric import DeviceBytes, allocate, device_tensor
from expertwire.ep.low_latency_reference import pack_ue8m0, quantise, reference_low_latency_combine, reference_low_latency_dispatch

FORMATS = ("bf16", "fp8", "fp8_round", "fp8_ue8m0")
TUNINGS = [
    LowLatencyTuning(),
    LowLatencyTuning(send_programs=128, send_warps=16, pack_programs=128, pack_warps=8, sum_programs=256, sum_warps=8, sum_block=2048),
    LowLatencyTuning(send_warps=4, pack_programs=512, pack_rows=1, sum_programs=1024, sum_warps=2, sum_block=512),
    LowLatencyTuning(send_programs=64, pack_programs=64, pack_rows=4, pack_warps=8, sum_programs=128, sum_warps=8, sum_block=2048),
    LowLatencyTuning(send_warps=8, pack_programs=256, pack_rows=1, pack_warps=8, sum_programs=128, sum_warps=8, sum_block=4096),
    LowLatencyTuning(send_warps=4, pack_programs=1024, pack_rows=1, pack_warps=4, sum_programs=896, sum_warps=4, sum_block=2048),
]


class Rank:
    def __init__(self, rank: int, size: int, most: Shape, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rows: list[dict[str, Any]] = []
        launch = Launch(rank, size, self.gather)
        control = allocate(launch, low_latency_control_bytes(size, 512), self.device)
        self.data = allocate(launch, needed_bytes(most, size), self.device)
        self.exchange = LowLatencyExchange(control, self.data, 512, 10_000, False)

    def gather(self, mine: Any) -> list[Any]:
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, mine)
        return answers

    def say(self, **row: Any) -> None:
        if self.rank == 0:
            self.rows.append(row)
            print(json.dumps(row), flush=True)

    def late(self) -> bool:
        return bool(self.gather(time.monotonic() > self.deadline)[0])

    def load(self, *works: Any) -> None:
        """Compile and load before anybody waits: rank 0 first, the others from its cache."""
        for turn in (True, False):
            if (self.rank == 0) == turn:
                with self.exchange.launch.loading():
                    for work in works:
                        work()
            torch.cuda.synchronize()
            dist.barrier()

    def healthy(self) -> None:
        record = self.exchange.record.tolist()
        assert not any(record), f"rank {self.rank}: {record}"

    def timed(self, work: Any, repeats: int = 20) -> float:
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
        self.healthy()
        return round(max(self.gather(begin.elapsed_time(end) * 1000 / repeats)), 1)

    # ---- one call

    def make(self, shape: Shape, tokens: int, rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(rank + 1000 * step)
        x = torch.randn((tokens, shape.hidden), generator=random).bfloat16()
        ids = torch.rand((tokens, shape.experts), generator=random).topk(shape.topk, dim=1).indices
        if step % 3 == 1:
            ids[torch.rand(ids.shape, generator=random) < 0.3] = -1
        return x, ids, torch.rand((tokens, shape.topk), generator=random)

    def dispatch(self, given: Any, shape: Shape, hook: bool) -> Any:
        made = self.exchange.dispatch(given[0], given[1], shape, None, None, hook)
        if hook:
            self.exchange.await_dispatch(made, None, None)
        self.exchange.pack(made)
        return made

    def combine(self, x: torch.Tensor, given: Any, route: Any, out: torch.Tensor, hook: bool) -> Any:
        made = self.exchange.combine(x.data_ptr(), given[1], given[2], route, out, None, hook)
        if hook:
            self.exchange.await_combine(made, None)
        self.exchange.sum(made)
        return made

    def compare(self, shape: Shape, tokens: list[int], step: int, made: Any, out: torch.Tensor, y: torch.Tensor, where: str) -> None:
        """What came against the oracle. y: what the experts gave back here."""
        torch.cuda.synchronize()
        self.healthy()
        everyone = [self.make(shape, tokens[rank], rank, step) for rank in range(self.size)]
        wants = reference_low_latency_dispatch([one[1] for one in everyone], shape.experts)
        want = wants[self.rank]
        assert made.counts.tolist() == want.counts, f"counts {where}"
        assert torch.equal(made.layout_range.cpu(), want.layout_range(self.size)), f"layout_range {where}"
        packed = [quantise(one[0], shape.row_format != 1) for one in everyone] if shape.row_format else []
        rows, src_info = made.rows.cpu(), made.src_info.cpu()
        scales = None if made.scales is None else made.scales.transpose(1, 2).cpu()
        for expert, expected in enumerate(want.rows):
            count = len(expected)
            assert src_info[expert, :count].tolist() == [token for _, token, _ in expected], f"src_info {where}"
            if not count:
                continue
            sources = [packed[source][0] if packed else everyone[source][0] for source in range(self.size)]
            wanted = torch.stack([sources[source][token] for source, token, _ in expected])
            assert torch.equal(rows[expert, :count].view(torch.uint8), wanted.view(torch.uint8)), f"rows {where}"
            if scales is not None:
                wanted = torch.stack([packed[source][1][token] for source, token, _ in expected])
                wanted = pack_ue8m0(wanted) if shape.row_format == 3 else wanted
                assert torch.equal(scales[expert, :count], wanted), f"scales {where}"
        ys = self.gather([y[expert, : len(rows)].cpu() for expert, rows in enumerate(want.rows)])
        sums = reference_low_latency_combine(ys, wants, [one[2] for one in everyone], shape.hidden)[self.rank]
        assert torch.equal(out.cpu().view(torch.int16), sums.view(torch.int16)), f"sums {where}"

    def check(self, shape: Shape, tokens: list[int]) -> None:
        """Eager calls and replays against the oracle."""
        mine = tokens[self.rank]
        given = [one.to(self.device) for one in self.make(shape, mine, self.rank)]
        local = shape.owned(self.rank, self.size)
        y = torch.randn((local, self.size * shape.tokens_max, shape.hidden), device=self.device).bfloat16()
        out = torch.empty((mine, shape.hidden), dtype=torch.bfloat16, device=self.device)

        def both(hook: bool) -> Any:
            made = self.dispatch(given, shape, hook)
            self.combine(y, given, made.route, out, hook)
            return made

        self.load(lambda: both(False), lambda: both(True))
        for hook in (False, True):
            out.fill_(-7)
            made = both(hook)
            self.compare(shape, tokens, 0, made, out, y, f"eager hook={hook}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = both(True)
        for step in range(1, 4):
            for old, new in zip(given, self.make(shape, mine, self.rank, step), strict=True):
                old.copy_(new)
            out.fill_(-7)
            torch.cuda.synchronize()
            dist.barrier()
            graph.replay()
            self.compare(shape, tokens, step, made, out, y, f"replay {step}")
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        self.healthy()
        self.say(what="checked", shape=dataclasses.asdict(shape), tokens=tokens)

    # ---- times

    def time(self, shape: Shape, tokens: int, number: int, whole: bool) -> None:
        given = [one.to(self.device) for one in self.make(shape, tokens, self.rank)]
        local = shape.owned(self.rank, self.size)
        y = torch.randn((local, self.size * shape.tokens_max, shape.hidden), device=self.device).bfloat16()
        out = torch.empty((tokens, shape.hidden), dtype=torch.bfloat16, device=self.device)
        self.exchange.tuning = TUNINGS[number]
        self.load(lambda: self.dispatch(given, shape, False), lambda: self.dispatch(given, shape, True))
        made = self.dispatch(given, shape, False)
        works = {
            "dispatch": lambda: self.dispatch(given, shape, False),
            "dispatch hook": lambda: self.dispatch(given, shape, True),
            "combine": lambda: self.combine(y, given, made.route, out, False),
            "combine hook": lambda: self.combine(y, given, made.route, out, True),
        }
        if not whole:
            works = {name: work for name, work in works.items() if "hook" not in name}
        self.load(*works.values())
        for name, work in works.items():
            if self.late():
                return
            row: dict[str, Any] = {
                "what": name,
                "format": FORMATS[shape.row_format],
                "tokens": tokens,
                "tuning": number,
                "eager": self.timed(work),
            }
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    work()
            torch.cuda.synchronize()
            dist.barrier()
            row["graph"] = round(self.timed(graph.replay, 10) / 5, 1)
            if whole:
                row["one_by_one"] = self.one_by_one(work)
            self.say(**row)

    def one_by_one(self, work: Any) -> float:
        spent = 0.0
        for _ in range(10):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            spent += (time.perf_counter() - begin) * 1e5
        return round(max(self.gather(spent)), 1)

    def ceiling(self) -> None:
        half = min(self.data.length // 2, 128 << 20) // 4096 * 4096
        both = [device_tensor(DeviceBytes(self.data.address + at, half, self.device, self.data), torch.uint8, (half,)) for at in (0, half)]
        micros = self.timed(lambda: both[1].copy_(both[0]), 10)
        self.say(what="copy by every rank at once", us=micros, tbps=round(2 * half * self.size / micros / 1e6, 3))


def worker(options: argparse.Namespace) -> None:
    torch.cuda.set_device(options.rank % torch.cuda.device_count())
    dist.init_process_group("gloo", store=dist.FileStore(options.store, options.ranks), rank=options.rank, world_size=options.ranks)
    ranks, tokens = options.ranks, options.tokens
    plain = Shape(tokens, 7168, 256, 8, 0)
    rank = Rank(options.rank, ranks, plain, time.monotonic() + options.seconds)
    try:
        rank.say(what="start", device=torch.cuda.get_device_name(), ranks=ranks, torch=torch.__version__)
        for row_format in range(4):
            rank.check(Shape(16, 1160, 8 * ranks + 1, 4, row_format), [(5 * one + 3) % 17 if one % 3 != 1 else 0 for one in range(ranks)])
        if options.variants == "check":
            return
        rank.ceiling()
        shapes = [dataclasses.replace(plain, row_format=1), plain, dataclasses.replace(plain, row_format=3)]
        for shape in shapes:
            rank.time(shape, tokens, 0, True)
        for number in range(1, len(TUNINGS) if options.variants == "all" else 2):
            for shape in shapes[:2]:
                if rank.late():
                    return
                rank.time(shape, tokens, number, False)
    except BaseException:
        traceback.print_exc()
        print(f"rank {options.rank} record {rank.exchange.record.tolist()}", file=sys.stderr, flush=True)
        raise
    finally:
        if options.rank == 0 and options.out:
            Path(options.out).write_text(json.dumps(rank.rows, indent=1))
    torch.cuda.synchronize()
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--variants", choices=("check", "few", "all"), default="all")
    parser.add_argument("--seconds", type=float, default=60.0, help="no variant is begun after so long")
    gpu_ranks.add_arguments(parser)
    options = parser.parse_args()
    if options.rank >= 0:
        worker(options)
        return 0
    return gpu_ranks.run(__file__, options, 30, 15)


if __name__ == "__main__":
    sys.exit(main())
