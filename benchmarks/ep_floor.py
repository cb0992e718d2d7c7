"""What a dispatch and a combine cost at least on these cores: their bytes moved by loops that do nothing else, beside gloo and beside us.

    python benchmarks/ep_floor.py [--ranks 8] [--tokens 1024] [--hidden 7168] [--experts 256] [--topk 8] [--iterations 12]
        [--arms floor,plain,expertwire,gloo] [--routing uniform] [--json FILE]

Two nodes of half the ranks each. All arms take part in one run, in the same processes, each first in turn; every iteration begins at a
barrier. A time is that of the slowest rank, `cpu` the processor time of all ranks and their threads; medians of the iterations.

The floor (`ep_floor.cpp`, compiled here with g++) is one loop a rank, in the rank's own thread, over one TCP socket to the rank of the
same local index in the other node, and over memory that the ranks of a node share. Counted for a dispatch: each row to the other node
once, sent from where it lies in x, in one sendmsg of up to 64 rows; what comes, read into 1 MiB and copied from there to each place in the
node; each row of a rank's own to each place in its node. For a combine: of every token each row in the node is read (copied over a row that
stays in the cache), a row for each token of the other node goes through the socket, and one row for each token of a rank's own is written.
Not counted: ids, weights, counts, words that say what has come, who waits for whom (a rank ends with its own part). `floor` writes final
places by stores past the caches, `plain` by memcpy. Places are checked after each dispatch, of every arm; sums within 5e-6 of what they
must be (calc_diff), not of the floor, which adds nothing up.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import GlooArm, OursArm, Received
from expertwire.cli.bench.ep import ROUTINGS, Setup, make_inputs
from expertwire.cli.bench.paired import CALC_DIFF_MAX, Inputs, calc_diff, destinations, same_bytes
from expertwire.cli.launch import Rank, launch
from expertwire.cli.report import Report, RowStatus

LANDING_BYTES = 1 << 20
PHASES = ("dispatch", "combine", "total")
WARMUP = 2


class Side(ctypes.Structure):
    """See ep_floor.cpp."""

    _fields_ = (("count", ctypes.c_int64), ("first", ctypes.c_void_p), ("place", ctypes.c_void_p))


class Work(ctypes.Structure):
    """See ep_floor.cpp."""

    _fields_ = (
        ("socket", ctypes.c_int),
        ("row_bytes", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("far", ctypes.c_void_p),
        ("far_count", ctypes.c_int64),
        ("near", Side),
        ("incoming", Side),
        ("landing", ctypes.c_void_p),
        ("landing_rows", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("streaming", ctypes.c_int),
    )


@dataclass(frozen=True)
class Routes:
    """Which tokens of each rank go where: in_rank bool [R, T, R], and the row number of each at each rank, i64 [R, T, R]."""

    in_rank: numpy.ndarray[Any, numpy.dtype[numpy.bool_]]
    row: numpy.ndarray[Any, numpy.dtype[numpy.int64]]

    @classmethod
    def of(cls, in_rank: numpy.ndarray[Any, Any]) -> Routes:
        """Rows at a rank are ordered by source, then token."""
        ranks, tokens, _ = in_rank.shape
        flat = in_rank.reshape(ranks * tokens, ranks)
        return cls(in_rank, (numpy.cumsum(flat, axis=0) - flat).reshape(in_rank.shape))


class FloorArm:
    """The loops of ep_floor.cpp over memory of their own. Collective to make."""

    def __init__(self, name: str, library: str, setup: Setup, routes: Routes) -> None:
        self.name, self.streaming = name, name == "floor"
        self.library = ctypes.CDLL(library)
        self.library.floor_map.restype = ctypes.c_void_p
        self.kept: list[Any] = []  # what pointers lead to
        rank, size = dist.get_rank(), setup.ranks // 2
        self.row_bytes = 2 * setup.hidden
        rows = int(routes.in_rank[:, :, rank].sum())
        self.shape = (rows, setup.hidden)
        tokens = setup.tokens[0]
        landing_rows = max(1, LANDING_BYTES // self.row_bytes)
        self.file, base = self._memory(rows * self.row_bytes)
        _, landing = self._memory(2 * landing_rows * self.row_bytes)
        self.out_file, out = self._memory((tokens + 1) * self.row_bytes)
        mates = range(rank // size * size, (rank // size + 1) * size)
        peer = (rank + size) % setup.ranks
        bases = self._mates(base, mates, routes)
        far = numpy.flatnonzero(numpy.delete(routes.in_rank[rank], mates, axis=1).any(1))
        self.work = Work(
            self._socket(rank, peer),
            self.row_bytes,
            None,
            self._pointer(far),
            len(far),
            self._side(routes, rank, bases, skip=False),
            self._side(routes, peer, bases, skip=True),
            landing,
            landing_rows,
            out,
            int(self.streaming),
        )

    def _memory(self, size: int, path: str | None = None) -> tuple[int, int]:
        """A memfd of so many bytes, or another process's, and where it lies here."""
        file = os.memfd_create(self.name) if path is None else os.open(path, os.O_RDWR)
        size = -(-max(1, size) // (2 << 20)) * (2 << 20)
        if path is None:
            os.ftruncate(file, size)
        at = self.library.floor_map(file, ctypes.c_size_t(size), int(path is None))
        if not at:
            raise OSError(f"{size} bytes of memory for the floor could not be mapped")
        return file, at

    def _mates(self, own: int, mates: range, routes: Routes) -> dict[int, int]:
        """Where the rows of each rank of this node lie here."""
        paths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, f"/proc/{os.getpid()}/fd/{self.file}")
        bases = {}
        for mate in mates:
            rows = int(routes.in_rank[:, :, mate].sum())
            bases[mate] = own if mate == dist.get_rank() else self._memory(rows * self.row_bytes, paths[mate])[1]
        dist.barrier()
        return bases

    def _socket(self, rank: int, peer: int) -> int:
        """To the rank `peer`: the lower of the two listens."""
        listener = socket.create_server(("127.0.0.1", 0))
        ports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ports, listener.getsockname()[1])
        one = socket.create_connection(("127.0.0.1", ports[peer])) if rank > peer else listener.accept()[0]
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setblocking(False)
        self.kept.append(one)
        return one.fileno()

    def _pointer(self, array: numpy.ndarray[Any, Any]) -> int:
        kept = numpy.ascontiguousarray(array, dtype=numpy.int64)
        self.kept.append(kept)
        return int(kept.ctypes.data)

    def _side(self, routes: Routes, source: int, bases: dict[int, int], *, skip: bool) -> Side:
        """The places in this node of the tokens of `source`; `skip`: of those that have any."""
        present = routes.in_rank[source][:, list(bases)]
        places = numpy.array(list(bases.values()), dtype=numpy.int64) + routes.row[source][:, list(bases)] * self.row_bytes
        chosen = present.any(1) if skip else numpy.ones(len(present), dtype=bool)
        counts = present.sum(1)[chosen]
        first = numpy.concatenate(([0], numpy.cumsum(counts)))
        return Side(len(counts), self._pointer(first), self._pointer(places[present]))

    def dispatch(self, x: torch.Tensor, _ids: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
        """The rows [N, H] that came."""
        self.work.x = x.data_ptr()
        self.library.floor_dispatch(ctypes.byref(self.work))
        return self.tensor(self.file, self.shape)

    def combine(self, _y: torch.Tensor) -> None:
        """Reads the rows where they came."""
        self.library.floor_combine(ctypes.byref(self.work))

    def tensor(self, file: int, shape: tuple[int, int]) -> torch.Tensor:
        """The memory of `file`."""
        memory = mmap.mmap(file, 2 * shape[0] * shape[1])
        self.kept.append(memory)
        return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)

    def close(self) -> None:
        """Nothing is kept that the process's end does not free."""


Step = tuple[float, float]  # seconds, seconds of processor time


def timed(call: Callable[[], Any]) -> tuple[Step, Any]:
    """What a call gives, and what it took, after a barrier."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    result = call()
    return (time.perf_counter() - begin, time.process_time() - cpu), result


def rows_of(received: Received | torch.Tensor) -> torch.Tensor:
    """Of what an arm's dispatch gave."""
    return received.rows if isinstance(received, Received) else received


def measure(rank: Rank, setup: Setup, names: tuple[str, ...], library: str) -> dict[str, Any]:
    """What a rank does: steps by arm and phase, and what was wrong."""
    ids = [make_inputs(setup, source).topk_idx for source in range(setup.ranks)]
    routes = Routes.of(numpy.stack([destinations(one, setup.experts, setup.ranks).numpy() for one in ids]))
    own = make_inputs(setup, rank.rank)
    received_max = int(routes.in_rank.sum((0, 1)).max())
    arms: list[Any] = []
    for name in names:
        if name == "expertwire":
            arms.append(OursArm(setup, received_max))
        elif name == "gloo":
            arms.append(GlooArm(setup.ranks, setup.experts))
        else:
            arms.append(FloorArm(name, library, setup, routes))
    wanted = torch.cat(
        [make_inputs(setup, source).x[torch.from_numpy(routes.in_rank[source, :, rank.rank])] for source in range(setup.ranks)]
    )
    sums = own.x * torch.from_numpy(routes.in_rank[rank.rank].sum(1)).bfloat16()[:, None]
    steps: dict[str, list[tuple[Step, Step]]] = {arm.name: [] for arm in arms}
    faults: list[str] = []
    for number in range(setup.warmup + setup.iterations):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            pair, found = step(arm, own, wanted, sums, number)
            faults += found
            if number >= setup.warmup:
                steps[arm.name].append(pair)
    for arm in arms:
        arm.close()
    return {"steps": steps, "faults": faults, "bytes": moved_bytes(setup, routes)}


def step(arm: Any, own: Inputs, wanted: torch.Tensor, sums: torch.Tensor, number: int) -> tuple[tuple[Step, Step], list[str]]:
    """One dispatch and combine of one arm, checked. Each iteration turns the sign of what is sent, so that old rows are seen."""
    sign = -1.0 if number % 2 else 1.0
    x = own.x * sign
    dispatch, received = timed(lambda: arm.dispatch(x, own.topk_idx, own.topk_weights))
    dist.barrier()  # the floor's rows come from ranks that may not have ended
    rows = rows_of(received)
    faults = [] if rows.shape == wanted.shape and same_bytes(rows, wanted * sign) else [f"{arm.name}: rows differ"]
    combine, combined = timed(lambda: arm.combine(rows))
    if combined is not None and not calc_diff(combined, sums * sign) <= CALC_DIFF_MAX:
        faults.append(f"{arm.name}: sums differ")
    return (dispatch, combine), faults


def moved_bytes(setup: Setup, routes: Routes) -> dict[str, int]:
    """Of one dispatch, all ranks: rows at their places, rows between nodes. Of a combine: the same, read."""
    node = numpy.arange(setup.ranks) // (setup.ranks // 2)
    far = sum(int(routes.in_rank[source][:, node != node[source]].any(1).sum()) for source in range(setup.ranks))
    return {"places": int(routes.in_rank.sum()) * 2 * setup.hidden, "wire": far * 2 * setup.hidden}


def add_rows(report: Report, measured: list[dict[str, Any]], names: tuple[str, ...], labels: dict[str, Any]) -> None:
    """Medians by arm and phase, and gloo's and ours over the least floor."""
    walls: dict[tuple[str, str], float] = {}
    for name in names:
        good = not any(fault.startswith(f"{name}:") for one in measured for fault in one["faults"])
        report.add("verified", int(good), "", RowStatus.OK if good else RowStatus.FAILED, engine=name, **labels)
        steps = [one["steps"][name] for one in measured]
        for place, phase in enumerate(PHASES):
            parts = (0, 1) if phase == "total" else (place,)
            wall = [sum(max(one[at][part][0] for one in steps) for part in parts) for at in range(len(steps[0]))]
            cpu = [sum(one[at][part][1] for one in steps for part in parts) for at in range(len(steps[0]))]
            walls[name, phase] = statistics.median(wall)
            spread = {"low": round(min(wall) * 1e3, 1), "high": round(max(wall) * 1e3, 1)}
            report.add("wall_ms", round(statistics.median(wall) * 1e3, 1), "ms", engine=name, phase=phase, **spread, **labels)
            report.add("cpu_ms", round(statistics.median(cpu) * 1e3, 1), "ms", engine=name, phase=phase, **labels)
    for phase in PHASES:
        floors = [walls[name, phase] for name in ("floor", "plain") if (name, phase) in walls]
        for name in ("expertwire", "gloo"):
            if floors and (name, phase) in walls:
                report.add("over_floor", round(walls[name, phase] / min(floors), 2), "×", engine=name, phase=phase, **labels)
        if ("gloo", phase) in walls and ("expertwire", phase) in walls:
            ratio = walls["gloo", phase] / walls["expertwire", phase]
            report.add("over_gloo", round(ratio, 2), "×", engine="gloo", phase=phase, **labels)


def main() -> int:
    """Measure one shape and report it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = {"ranks": 8, "tokens": 1024, "hidden": 7168, "experts": 256, "topk": 8, "iterations": 12}
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--arms", default="floor,plain,expertwire,gloo")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.ranks % 2 or given.hidden % 32:
        parser.error("--ranks must be even, --hidden a multiple of 32")
    setup = Setup(
        node_of=tuple(rank // (given.ranks // 2) for rank in range(given.ranks)),
        tokens=(given.tokens,) * given.ranks,
        hidden=given.hidden,
        experts=given.experts,
        topk=given.topk,
        routing=given.routing,
        provider="tcp",
        against=(),
        iterations=given.iterations,
        warmup=WARMUP,
        seed=1,
    )
    names = tuple(given.arms.split(","))
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "ep_floor.so")
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["g++", "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", library], check=True)
        measured = launch(measure, (setup, names, library), setup.ranks, timeout_s=600)
    labels = {name: getattr(given, name) for name in shape if name != "iterations"} | {"routing": given.routing}
    report = Report("benchmarks/ep_floor.py", {**labels, "iterations": given.iterations, "bytes": measured[0]["bytes"]})
    add_rows(report, measured, names, labels)
    report.write(given.json)
    for row in report.rows:
        print(f"{row.name:12} {row.labels['engine']:11} {row.labels.get('phase', ''):9} {row.value}")
    for fault in sorted({fault for one in measured for fault in one["faults"]}):
        print(fault, file=sys.stderr)
    return int(report.exit_status())


if __name__ == "__main__":
    sys.exit(main())
