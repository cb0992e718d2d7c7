"""What an agent counts of its transfers, and the same as Prometheus text. Bounded, and nothing here can end or fail a transfer.

Nothing listens and nothing is written: `prometheus()` gives the text to whoever serves it, so no port can clash.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

__all__ = ["BUCKETS_US", "Measured", "Telemetry", "TransferTelemetry"]

BUCKETS_US = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000)
RECENT = 256  # ended transfers that are remembered one by one, for estimates
OPERATIONS = ("READ", "WRITE")
ERRORS_MAX = 32  # kinds of errors that have a line of their own


class Measured(Protocol):
    """What is read of a transfer that has ended; `expertwire.transfer.Transfer` has it. Times are of `time.monotonic_ns`."""

    operation: str
    path: str
    nbytes: int
    run_count: int

    @property
    def posted_ns(self) -> int:
        """When it was posted."""
        ...

    @property
    def post_duration_ns(self) -> int:
        """How long the post took."""
        ...

    @property
    def start_wall_ns(self) -> int:
        """When it was posted, since 1970."""
        ...

    @property
    def ended_ns(self) -> int | None:
        """When its end was seen."""
        ...


@dataclass(frozen=True, slots=True)
class TransferTelemetry:
    """One posted transfer, when it has ended. Times in whole µs, none of them 0: when (since 1970), spent in the post, from post to end."""

    start_us: int
    post_us: int
    transfer_us: int
    total_bytes: int
    descriptor_count: int


class Telemetry:
    """Counters of one agent. Its methods raise nothing: what goes wrong is itself counted, in `expertwire_telemetry_faults_total`."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()  # (counter, operation or error)
        self._buckets = {operation: [0] * (len(BUCKETS_US) + 1) for operation in OPERATIONS}
        self._microseconds: Counter[str] = Counter()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)  # (bytes, µs)
        self._faults = 0

    def posted(self, operation: str) -> None:
        """A transfer was posted."""
        with self._lock:
            self._counts["posted", operation] += 1

    def failed(self, operation: str, error: BaseException) -> None:
        """A transfer has ended in that error."""
        with self._lock:
            self._counts["failed", operation] += 1
            known = sum(kind == "errors" for kind, _ in self._counts) < ERRORS_MAX
            self._counts["errors", type(error).__name__ if known else "other"] += 1

    def notified(self, sent: int = 0, received: int = 0) -> None:
        """Notifications that went and came."""
        with self._lock:
            self._counts["notifications", "sent"] += sent
            self._counts["notifications", "received"] += received

    def ended(self, transfer: Measured) -> TransferTelemetry | None:
        """Count a transfer that is done, and say what it took. None where it has no end yet, or cannot be counted."""
        try:
            if transfer.ended_ns is None:
                return None
            took = max(1, (transfer.ended_ns - transfer.posted_ns) // 1000)
            found = TransferTelemetry(
                transfer.start_wall_ns // 1000, max(1, transfer.post_duration_ns // 1000), took, transfer.nbytes, transfer.run_count
            )
            with self._lock:
                self._count(transfer.operation, found)
                self._counts["path_bytes", transfer.path] += found.total_bytes
        except Exception:
            with self._lock:
                self._faults += 1
            return None
        return found

    def estimate_us(self, nbytes: int) -> tuple[int, int] | None:
        """(µs, margin in µs) that a transfer of so many bytes may take, from recent ones; None where nothing has ended yet.

        A line through the recent ones by least squares, which falls nowhere; the margin is their mean distance from it.
        """
        with self._lock:
            recent = list(self._recent)
        if not recent:
            return None
        mean_bytes = sum(size for size, _ in recent) / len(recent)
        mean_us = sum(took for _, took in recent) / len(recent)
        spread = sum((size - mean_bytes) ** 2 for size, _ in recent)
        slope = (
            max(0.0, sum((size - mean_bytes) * (took - mean_us) for size, took in recent) / spread)
            if spread
            else mean_us / max(1.0, mean_bytes)
        )
        base = max(0.0, mean_us - slope * mean_bytes)
        margin = sum(abs(took - base - slope * size) for size, took in recent) / len(recent)
        return max(1, round(base + slope * nbytes)), max(1, round(margin))

    def prometheus(self) -> str:
        """All counters, in Prometheus' text format (version 0.0.4), each with the agent's name."""
        with self._lock:
            counts, faults = dict(self._counts), self._faults
            buckets = {operation: list(row) for operation, row in self._buckets.items()}
            microseconds = dict(self._microseconds)
        lines: list[str] = []
        for counter, name, label, note in _COUNTERS:
            lines += [f"# HELP {name} {note}", f"# TYPE {name} counter"]
            values = {of: value for (kind, of), value in sorted(counts.items()) if kind == counter}
            lines += [f"{name}{self._labels(**{label: of})} {value}" for of, value in values.items()]
        lines += self._histogram(buckets, microseconds)
        name = "expertwire_telemetry_faults_total"
        lines += [f"# HELP {name} Transfers that could not be counted", f"# TYPE {name} counter", f"{name}{self._labels()} {faults}"]
        return "\n".join(lines) + "\n"

    def _count(self, operation: str, found: TransferTelemetry) -> None:
        row = self._buckets[operation]
        row[next((index for index, limit in enumerate(BUCKETS_US) if found.transfer_us <= limit), len(BUCKETS_US))] += 1
        self._microseconds[operation] += found.transfer_us
        self._counts["done", operation] += 1
        self._counts["bytes", operation] += found.total_bytes
        self._counts["descriptors", operation] += found.descriptor_count
        self._counts["post_us", operation] += found.post_us
        self._recent.append((found.total_bytes, found.transfer_us))

    def _histogram(self, buckets: dict[str, list[int]], microseconds: dict[str, int]) -> list[str]:
        name = "expertwire_transfer_duration_microseconds"
        lines = [f"# HELP {name} From the post to the end of transfers that are done", f"# TYPE {name} histogram"]
        for operation, row in buckets.items():
            total = 0
            for limit, count in zip((*BUCKETS_US, "+Inf"), row, strict=True):
                total += count
                lines.append(f"{name}_bucket{self._labels(operation=operation, le=str(limit))} {total}")
            labels = self._labels(operation=operation)
            lines += [f"{name}_sum{labels} {microseconds.get(operation, 0)}", f"{name}_count{labels} {total}"]
        return lines

    def _labels(self, **labels: str) -> str:
        pairs = {"agent": self._agent, **labels}
        return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items()) + "}"


_COUNTERS = (
    ("posted", "expertwire_transfers_posted_total", "operation", "Transfers that were posted"),
    ("done", "expertwire_transfers_done_total", "operation", "Transfers that were delivered"),
    ("failed", "expertwire_transfers_failed_total", "operation", "Transfers that ended in an error"),
    ("errors", "expertwire_transfer_errors_total", "error", "Errors that transfers ended in"),
    ("bytes", "expertwire_transfer_bytes_total", "operation", "Bytes of transfers that were delivered"),
    ("path_bytes", "expertwire_transfer_path_bytes_total", "path", "The same by the provider that they went over"),
    ("descriptors", "expertwire_transfer_descriptors_total", "operation", "Runs of bytes that delivered transfers were made of"),
    ("post_us", "expertwire_transfer_post_microseconds_total", "operation", "Time spent inside posts of delivered transfers"),
    ("notifications", "expertwire_notifications_total", "direction", "Notifications, those of transfers left out on the sender's side"),
)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
