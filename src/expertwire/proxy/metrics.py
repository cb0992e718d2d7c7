"""Counters and histograms of one worker, as Prometheus text; several workers' are added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

PREFIX: Final = "expertwire_proxy_"
# Powers of two of 1/1024 s, up to 512 s: where an observation belongs is its number of bits, which costs a tenth of a search.
_BOUNDS_S: Final = tuple(2.0**k / 1024 for k in range(20))
_LAST: Final = len(_BOUNDS_S)

Labels = tuple[str, ...]
Snapshot = dict[str, dict[Labels, Any]]

_COUNTERS: Final[dict[str, tuple[Labels, str]]] = {
    "requests_total": (("endpoint", "outcome"), "Requests by how they ended: done, failed, gone (the client left)."),
    "replies_total": (("status",), "Replies by status."),
    "legs_total": (("side", "server", "outcome"), "Calls to servers by how they ended."),
    "retries_total": (("side",), "Legs called again."),
    "reprefills_total": ((), "Prefills done again, because D was not reached or the lease ran out."),
    "expiries_total": ((), "Parameters whose lease ran out before D could be called."),
    "releases_total": (("outcome",), "P's blocks freed early: released, failed."),
    "decode_alone_total": (("why",), "Requests that D computed alone."),
    "rejected_total": ((), "Requests refused with 429."),
    "exhausted_total": (
        ("what",),
        "Connections and requests refused with 503 because this process ran out: descriptors, bodies (held_bytes).",
    ),
    "stream_errors_total": ((), "Streams that ended with an error event."),
    "breaker_trips_total": (("side", "server"), "Servers passed over for failures of their transport."),
}
_HISTOGRAMS: Final[dict[str, str]] = {
    "prefill_seconds": "From P's call to its answer.",
    "handoff_seconds": "From P's answer until D has the request.",
    "first_content_seconds": "From the request to D's first content.",
    "request_seconds": "From the request to the end of its reply.",
}
_GAUGES: Final[dict[str, tuple[Labels, str]]] = {
    "in_flight": ((), "Requests in flight."),
    "held_bytes": ((), "Bytes of large bodies that are held."),
    "server_in_flight": (("side", "server"), "Legs in flight."),
    "server_up": (("side", "server"), "1 if the server is not passed over."),
}


class Histogram:
    """Observations in seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one: in the first bucket whose bound is above it."""
        bits = int(seconds * 1024).bit_length()
        self.counts[bits if bits < _LAST else _LAST] += 1
        self.total += seconds


class Metrics:
    """What one worker has counted."""

    __slots__ = ("counters", "first_content", "handoff", "prefill", "request")

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, int]] = {name: {} for name in _COUNTERS}
        self.prefill = Histogram()
        self.handoff = Histogram()
        self.first_content = Histogram()
        self.request = Histogram()

    def count(self, name: str, *labels: str) -> None:
        """One more of the counter `name` with these values of its labels."""
        values = self.counters[name]
        values[labels] = values.get(labels, 0) + 1

    def value(self, name: str, *labels: str) -> int:
        """A counter's value; without labels the sum over all."""
        values = self.counters[name]
        return values.get(labels, 0) if labels else sum(values.values())

    def snapshot(self, gauges: Snapshot) -> Snapshot:
        """Plain numbers, for another process. `gauges`: see `gauges_of`."""
        histograms = {"prefill_seconds": self.prefill, "handoff_seconds": self.handoff}
        histograms |= {"first_content_seconds": self.first_content, "request_seconds": self.request}
        return (
            {name: dict(values) for name, values in self.counters.items()}
            | {name: {(): [*item.counts, item.total]} for name, item in histograms.items()}
            | {name: dict(values) for name, values in gauges.items()}
        )


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Several workers' as one: sums, of `server_up` the least."""
    merged: Snapshot = {}
    for snapshot in snapshots:
        for name, values in snapshot.items():
            into = merged.setdefault(name, {})
            for labels, value in values.items():
                if labels not in into:
                    into[labels] = value
                elif isinstance(value, list):
                    into[labels] = [a + b for a, b in zip(into[labels], value, strict=True)]
                else:
                    into[labels] = min(into[labels], value) if name == "server_up" else into[labels] + value
    return merged


def _labelled(name: str, labels: Labels, values: Labels) -> str:
    pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)]
    return f"{PREFIX}{name}{{{','.join(pairs)}}}" if pairs else f"{PREFIX}{name}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def text(snapshot: Snapshot) -> str:
    """Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for kind, family in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, (labels, about) in family.items():
            lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
            values = snapshot.get(name, {})
            if not labels and not values:
                values = {(): 0}
            lines += [f"{_labelled(name, labels, key)} {value}" for key, value in sorted(values.items())]
    for name, about in _HISTOGRAMS.items():
        lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} histogram"]
        for numbers in snapshot.get(name, {}).values():
            counts, seen = numbers[:-1], 0
            for bound, count in zip((*_BOUNDS_S, None), counts, strict=True):
                seen += count
                edge = "+Inf" if bound is None else f"{bound:g}"
                lines.append(f'{PREFIX}{name}_bucket{{le="{edge}"}} {seen}')
            lines += [f"{PREFIX}{name}_sum {numbers[-1]:.9g}", f"{PREFIX}{name}_count {seen}"]
    return "\n".join(lines) + "\n"
