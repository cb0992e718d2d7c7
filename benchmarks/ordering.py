"""What ordering class B (a signal waits for delivery-complete) costs beside class C (counted immediates), on one provider of this host.

    python benchmarks/ordering.py [--stack] [--provider "tcp;ofi_rxm"] [--address 127.0.0.1] [--seconds 0.5] [--rounds 5] [--json FILE]

Compiles `ordering.cpp` (needs libfabric's headers), which says what each class does, and lets the two alternate at 4 KiB, 64 KiB and 1 MiB:
one request at a time for the latency of the signal, 16 for what both sides burn. Every signal is checked against its payload.
`--stack`: the same requests through endpoints, with all that this costs; latency is then from the submission to the end of the request.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from expertwire.cli.report import Report, RowStatus, terminal
from expertwire.fabric import Endpoint, Region, Request, Signal
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library

SIZES = (4 << 10, 64 << 10, 1 << 20)
WINDOWS = (1, 16)
CLASSES = {"B": "gated", "C": "counted"}
COMPILER = ("c++", "-std=c++20", "-O2")


@dataclass(frozen=True)
class Turn:
    """One turn of one class, as `ordering` prints it."""

    kind: str
    signals: int
    seconds: float
    cpu_source: float
    cpu_target: float
    latency_ns: int
    latency_p90_ns: int
    early: int

    @classmethod
    def parse(cls, line: str) -> Turn:
        """From one line of `ordering`."""
        kind, signals, seconds, source, target, median, p90, early = line.split()
        return cls(kind, int(signals), float(seconds), float(source), float(target), int(median), int(p90), int(early))

    def cpu_us(self) -> float:
        """CPU time of both sides for one request."""
        return 1e6 * (self.cpu_source + self.cpu_target) / self.signals


def turns(program: Path, library: str, args: argparse.Namespace, size: int, window: int) -> list[Turn]:
    """Both classes, alternating."""
    words = [library, args.provider, args.address, size, window, round(1000 * args.seconds), args.rounds]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise SystemExit(f"ordering failed: {done.stderr.strip()}")
    return [Turn.parse(line) for line in done.stdout.splitlines()]


def cpu_seconds() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def open_endpoints(args: argparse.Namespace, rank: int, nbytes: int) -> dict[str, tuple[Endpoint, Region]]:
    """An endpoint of each class, with a region for the payloads."""
    settings = Settings(provider=args.provider, interface=args.address)
    found = {}
    for kind, ordering in CLASSES.items():
        endpoint = Endpoint(rank, 2, replace(settings, ordering=ordering, trust_immediates=True), counters=1)
        found[kind] = (endpoint, endpoint.region("data", nbytes))
    return found


def serve(pipe: Connection, args: argparse.Namespace, nbytes: int) -> None:
    """The target: sleeps, and says what it has burnt and whether a payload is older than its signal."""
    endpoints = open_endpoints(args, 1, nbytes)
    join(endpoints, pipe, 0)
    while (asked := pipe.recv()) is not None:
        kind, signals, size, window = asked
        endpoint, region = endpoints[kind]
        assert endpoint.wait_counter(0, signals)
        stamps = region.numpy("uint64", (window * size // 8,)).reshape(window, -1)[:, -1]
        early = sum(int(stamps[slot]) < signals - (signals - 1 - slot) % window for slot in range(min(window, signals)))
        pipe.send((cpu_seconds(), early))
    for endpoint, _ in endpoints.values():
        endpoint.close()


def join(endpoints: dict[str, tuple[Endpoint, Region]], pipe: Connection, peer: int) -> None:
    """Exchanges addresses."""
    pipe.send({kind: endpoint.blob() for kind, (endpoint, _) in endpoints.items()})
    for kind, blob in pipe.recv().items():
        endpoints[kind][0].add_peer(peer, blob)
        endpoints[kind][0].start()


@contextmanager
def target(args: argparse.Namespace, nbytes: int) -> Iterator[Connection]:
    """The other process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, args, nbytes), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join(20)


def send(endpoint: Endpoint, region: Region, first: int, size: int, window: int, seconds: float) -> tuple[int, list[float]]:
    """Writes with a signal each, `window` at a time; how many, and the seconds from submission to end."""
    words = region.numpy("uint64", (window * size // 8,)).reshape(window, -1)
    flying: deque[tuple[Request, float]] = deque()
    number, took = first, []
    end = time.perf_counter() + seconds

    def finish() -> None:
        request, began = flying.popleft()
        request.wait()
        took.append(time.perf_counter() - began)

    while time.perf_counter() < end:
        at = number % window
        number += 1
        words[at, -1] = number
        began = time.perf_counter()
        request = endpoint.write(1, region, "data", size, offset=at * size, remote_offset=at * size, signal=Signal(1, 0))
        flying.append((request, began))
        if len(flying) == window:
            finish()
    while flying:
        finish()
    return number - first, took


def stack_turns(args: argparse.Namespace, size: int, window: int) -> list[Turn]:
    """Both classes through endpoints of their own, alternating: B C C B …"""
    found = []
    with target(args, size * window) as pipe:
        endpoints = open_endpoints(args, 0, size * window)
        blobs = pipe.recv()
        pipe.send({kind: endpoint.blob() for kind, (endpoint, _) in endpoints.items()})
        for kind, blob in blobs.items():
            endpoints[kind][0].add_peer(1, blob)
            endpoints[kind][0].start()
        sent = dict.fromkeys(CLASSES, 0)
        for turn in range(2 * (args.rounds + 1)):
            kind = "BC"[(turn + turn // 2) % 2]
            pipe.send((kind, sent[kind], size, window))
            theirs, _ = pipe.recv()
            ours, began = cpu_seconds(), time.perf_counter()
            signals, took = send(*endpoints[kind], sent[kind], size, window, args.seconds if turn > 1 else 0.1)
            elapsed, own = time.perf_counter() - began, cpu_seconds() - ours
            sent[kind] += signals
            pipe.send((kind, sent[kind], size, window))
            burnt, early = pipe.recv()
            if turn < 2:
                continue  # connections are made, the number is asked for
            tens = statistics.quantiles([1e9 * each for each in took], n=10)
            found.append(Turn(kind, signals, elapsed, own, burnt - theirs, int(tens[4]), int(tens[8]), early))
        for endpoint, _ in endpoints.values():
            endpoint.close()
    return found


def add_rows(report: Report, size: int, window: int, found: list[Turn]) -> None:
    """Medians and spread of each class, then C over B, turn by turn."""
    figures = {
        "cpu_per_signal": ("us", [(turn.kind, turn.cpu_us()) for turn in found]),
        "cpu_per_gigabyte": ("s", [(turn.kind, turn.cpu_us() * 1e-6 / size * 1e9) for turn in found]),
        "signals": ("1/s", [(turn.kind, turn.signals / turn.seconds) for turn in found]),
        "latency": ("us", [(turn.kind, turn.latency_ns / 1e3) for turn in found]),
        "latency_p90": ("us", [(turn.kind, turn.latency_p90_ns / 1e3) for turn in found]),
    }
    good = RowStatus.OK if all(turn.early == 0 for turn in found) else RowStatus.FAILED
    for name, (unit, values) in figures.items():
        series = {kind: [value for each, value in values if each == kind] for kind in "BC"}
        for kind, own in series.items():
            report.add(
                name, round(statistics.median(own), 3), unit, good,
                ordering=kind, bytes=size, window=window, low=round(min(own), 3), high=round(max(own), 3),
            )  # fmt: skip
        ratios = [counted / gated for gated, counted in zip(series["B"], series["C"], strict=True)]
        report.add(
            f"{name}_c_over_b", round(statistics.median(ratios), 3), "", good,
            bytes=size, window=window, low=round(min(ratios), 3), high=round(max(ratios), 3),
        )  # fmt: skip


def main() -> int:
    """Compile, measure, print; the exit status of the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="tcp;ofi_rxm")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    library = best_library(Settings())
    config = {"provider": args.provider, "seconds": args.seconds, "rounds": args.rounds, "stack": args.stack}
    report = Report("benchmarks/ordering.py", config)
    if args.stack:
        for size in SIZES:
            for window in WINDOWS:
                add_rows(report, size, window, stack_turns(args, size, window))
        return finish(report, args)
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "ordering"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([*COMPILER, "-o", program, source, "-ldl"], check=True)
        for size in SIZES:
            for window in WINDOWS:
                add_rows(report, size, window, turns(program, library, args, size, window))
    return finish(report, args)


def finish(report: Report, args: argparse.Namespace) -> int:
    """Writes and prints the rows."""
    report.write(args.json)
    terminal().print(report.table(f"class C beside class B over {args.provider}"))
    return report.exit_status()


if __name__ == "__main__":
    sys.exit(main())
