"""What ordering class B (a signal waits for delivery-complete) costs beside class C (counted immediates), on one provider of this host.

    python benchmarks/ordering.py [--provider "tcp;ofi_rxm"] [--address 127.0.0.1] [--seconds 0.5] [--rounds 5] [--json FILE]

Compiles `ordering.cpp` (needs libfabric's headers), which says what each class does, and lets the two alternate at 4 KiB, 64 KiB and 1 MiB:
one request at a time for the latency of the signal, 16 for what both sides burn. Every signal is checked against its payload.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from expertwire.cli.report import Report, RowStatus, terminal
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library

SIZES = (4 << 10, 64 << 10, 1 << 20)
WINDOWS = (1, 16)
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    library = best_library(Settings())
    report = Report("benchmarks/ordering.py", {"provider": args.provider, "seconds": args.seconds, "rounds": args.rounds})
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "ordering"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run([*COMPILER, "-o", program, source, "-ldl"], check=True)
        for size in SIZES:
            for window in WINDOWS:
                add_rows(report, size, window, turns(program, library, args, size, window))
    report.write(args.json)
    terminal().print(report.table(f"class C beside class B over {args.provider}"))
    return report.exit_status()


if __name__ == "__main__":
    sys.exit(main())
