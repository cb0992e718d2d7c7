"""A 4 KiB write beside a continuous 32 MiB bulk to the same peer: latencies with and without lanes, and what the bulk still gets.

    python benchmarks/lanes.py [--endpoints N ...] [--chunk KIB ...] [--window N ...] [--hold US ...]
        [--target thread waits] [--floor] [--json FILE]

Two processes over tcp;ofi_rxm, delivery-complete. A latency is that of a request from before its submission to its terminal record, in this
process. The target's caller sleeps, in something else than its endpoint (`thread`) or in `wait_counter` for the end of all (`waits`). Every
byte of the last bulk, and the last small write, are looked at. `--floor`: `lanes_floor.cpp` too, two bare loops over libfabric, at the same
chunks and windows (compiles it; needs libfabric's headers).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy

from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library

SMALL, BULK = 4096, 32 << 20
DONE = 0  # counter
PAUSE_S = 0.001
# (name, small writes, bulk); sparse: small writes with a pause before each, so that none is near the one before
PHASES = (("warm", True, True), ("small", True, False), ("bulk", False, True), ("mixed", True, True), ("sparse", True, True))


def fill(words: Any, number: int) -> None:
    """Other bytes at every place and in every phase."""
    words[:] = numpy.arange(len(words), dtype="uint64") * numpy.uint64(2_654_435_761) + numpy.uint64(number)


def target(connection: Connection, options: dict[str, Any], waits: bool) -> None:
    """Says after each phase how many words of the small write and of the bulk are not those of the phase."""
    with Endpoint(1, 2, Settings(provider="tcp"), counters=8, **options) as endpoint:
        region = endpoint.region("data", SMALL + BULK)
        words = region.numpy("uint64", ((SMALL + BULK) // 8,))
        expected = words.copy()
        connection.send(endpoint.blob())
        endpoint.add_peer(0, connection.recv())
        endpoint.start()
        while (number := connection.recv()) is not None:
            if waits:
                endpoint.wait_counter(DONE, number)
            connection.recv()
            fill(expected, number)
            wrong = words != expected
            connection.send((int(wrong[: SMALL // 8].sum()), int(wrong[SMALL // 8 :].sum())))


def measure(endpoint: Endpoint, region: Any, seconds: float, small: bool, bulk: bool, pause_s: float) -> dict[str, float]:
    """One phase: small writes one at a time, with a pause before each, beside two bulks that are renewed as they end."""

    def start_bulk() -> Any:
        return endpoint.write(1, region, "data", BULK, offset=SMALL, remote_offset=SMALL)

    times: list[float] = []
    finished = 0
    running = [start_bulk() for _ in range(2 if bulk else 0)]
    start = now = time.perf_counter()
    while now < start + seconds:
        if small:
            resume = time.perf_counter() + pause_s
            while pause_s and time.perf_counter() < resume:
                running[0].poll()
            before = time.perf_counter()
            endpoint.write(1, region, "data", SMALL).wait(20_000)
            times.append(time.perf_counter() - before)
        else:
            running[0].wait(20_000)
        if running and running[0].done:
            running.pop(0).wait(0)
            finished += 1
            running.append(start_bulk())
        now = time.perf_counter()
    took = now - start
    for request in running:
        request.wait(20_000)
    endpoint.write(1, region, "data", SMALL).wait(20_000)
    row: dict[str, float] = {}
    if small:
        cuts = statistics.quantiles(times, n=100)
        row |= {"p50_us": cuts[49] * 1e6, "p90_us": cuts[89] * 1e6, "p99_us": cuts[98] * 1e6, "writes": len(times)}
    if bulk:
        row["bulk_gb_s"] = finished * BULK / took / 1e9
    return row


def run(endpoints: int, chunk_kib: int, window: int, hold_us: int, waits: bool, seconds: float) -> dict[str, Any]:
    """All phases of one combination, in a fresh pair of processes."""
    options = {
        "lanes": endpoints,
        "endpoints": endpoints,
        "bulk_chunk_bytes": chunk_kib << 10,
        "bulk_window": window,
        "bulk_hold_us": hold_us,
    }
    row: dict[str, Any] = {"endpoints": endpoints, "chunk_kib": chunk_kib, "window": window, "hold_us": hold_us}
    row["target"] = "waits" if waits else "thread"
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, options, waits), daemon=True)
    process.start()
    with Endpoint(0, 2, Settings(provider="tcp"), counters=8, **options) as endpoint:
        region = endpoint.region("data", SMALL + BULK)
        words = region.numpy("uint64", ((SMALL + BULK) // 8,))
        ours.send(endpoint.blob())
        endpoint.add_peer(1, ours.recv())
        endpoint.start()
        for number, (name, small, bulk) in enumerate(PHASES, start=1):
            fill(words, number)
            ours.send(number)
            got = measure(endpoint, region, 0.3 if name == "warm" else seconds, small, bulk, PAUSE_S if name == "sparse" else 0.0)
            endpoint.signal(1, 1, 8 * DONE).wait(20_000)
            ours.send("look")
            wrong_small, wrong_bulk = ours.recv()
            assert not wrong_small, "the last small write is not there"
            assert not (bulk and wrong_bulk), f"{wrong_bulk} words of the bulk are wrong"
            if name != "warm":
                row |= {f"{name}_{key}": round(value, 2) for key, value in got.items()}
        ours.send(None)
        process.join(10)
    return row


def floors(chunks: list[int], windows: list[int], seconds: float) -> list[dict[str, Any]]:
    """The bare loops: alone, on one endpoint for both, on two, and on two that share nothing."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "lanes_floor"
        source = Path(__file__).with_name("lanes_floor.cpp")
        subprocess.run(["c++", "-std=c++20", "-O2", source, "-o", program, "-ldl"], check=True)
        library = best_library(Settings(provider="tcp"))
        beside = [(chunk, window, *paths) for chunk, window in itertools.product(chunks, windows) for paths in ((1, 1), (2, 1), (2, 2))]
        for chunk, window, endpoints, domains in [(0, 1, 1, 1), *beside]:
            words = [program, library, "tcp;ofi_rxm", "127.0.0.1", chunk << 10, window, endpoints, domains, seconds]
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, check=True)
            p50, p90, p99, writes, rate = map(float, done.stdout.split())
            row = {"floor": True, "endpoints": endpoints, "domains": domains, "chunk_kib": chunk, "window": window}
            rows.append(row | {"p50_us": p50, "p90_us": p90, "p99_us": p99, "writes": int(writes), "bulk_gb_s": rate})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Every combination that was asked for; with one endpoint there are no chunks, so it is run once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--chunk", type=int, nargs="*", default=[64], help="KiB")
    parser.add_argument("--window", type=int, nargs="*", default=[4])
    parser.add_argument("--hold", type=int, nargs="*", default=[250], help="microseconds")
    parser.add_argument("--target", nargs="*", choices=["thread", "waits"], default=["thread"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = floors(arguments.chunk, arguments.window, arguments.seconds) if arguments.floor else []
    tuned = list(itertools.product(arguments.chunk, arguments.window, arguments.hold))
    for endpoints, (chunk, window, hold), waits in itertools.product(
        arguments.endpoints, tuned, (name == "waits" for name in arguments.target)
    ):
        if endpoints == 1 and (chunk, window, hold) != tuned[0]:
            continue
        rows.append(run(endpoints, chunk, window, hold, waits, arguments.seconds))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
