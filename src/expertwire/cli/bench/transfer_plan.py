"""What `bench transfer` does, in which order, and what its figures are made of. Pure: no clock, no process, no engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

WINDOW = 8  # transfers in flight where bandwidth is measured
PLACES_MAX = 128  # of one size that are used in turn
PLACES_BYTES = 16 << 20  # that they fill together, if two do not fill more
ALIGN_BYTES = 4096
PEERS = ("same", "other")
OPERATIONS = ("read", "write")
KINDS = ("single", "bandwidth", "small_alone", "bulk_alone", "mixed")


@dataclass(frozen=True)
class Phase:
    """One timed stretch of one pair: `kind`, what is posted in it, and to whom. `nbytes` or `bulk_bytes` is 0 where there is none."""

    number: int
    kind: str
    operation: str
    nbytes: int
    bulk_bytes: int
    peer: str  # whom the small or only transfer goes to: "same" is whoever gets the bulk

    @property
    def labels(self) -> dict[str, Any]:
        """What its rows say of it."""
        found: dict[str, Any] = {"op": self.operation, "bytes": self.nbytes or self.bulk_bytes}
        if self.kind in ("small_alone", "mixed"):
            found["bulk_bytes"] = self.bulk_bytes
        return found | {"peer": self.peer}


@dataclass(frozen=True)
class Settings:
    """What both sides of a pair must have been told alike, and do exchange."""

    engine: str
    provider: str
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    bulk_sizes: tuple[int, ...]
    peers: tuple[str, ...]
    lanes: int
    warmup: int
    iterations: int
    seed: int

    @property
    def small_bytes(self) -> int:
        """Of the transfer beside the bulk: the least of the sizes."""
        return min(self.sizes)

    @property
    def targets(self) -> int:
        """How many agents the target process has: a second one where small transfers go to another peer."""
        return len(self.peers) if "same" in self.peers else 2

    def phases(self) -> list[Phase]:
        """Everything that a pair does, in order."""
        number = count(1)
        return [Phase(next(number), *what) for operation in self.operations for what in self._of(operation)]

    def _of(self, operation: str) -> Iterator[tuple[str, str, int, int, str]]:
        for nbytes in self.sizes:
            yield "single", operation, nbytes, 0, "same"
            yield "bandwidth", operation, nbytes, 0, "same"
        for bulk in self.bulk_sizes:
            yield "bulk_alone", operation, 0, bulk, "same"
            for peer in self.peers:
                yield "small_alone", operation, self.small_bytes, bulk, peer
                yield "mixed", operation, self.small_bytes, bulk, peer

    def layout(self) -> Layout:
        """Where in a region of an agent what lies."""
        wide = max((*self.sizes, *self.bulk_sizes), key=lambda nbytes: places_of(nbytes) * nbytes)
        first = -(-places_of(self.small_bytes) * self.small_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return Layout(first, first + places_of(wide) * wide)


@dataclass(frozen=True)
class Layout:
    """Small transfers have their places at 0, everything else from `bulk_at` on; `nbytes` in all."""

    bulk_at: int
    nbytes: int


def places_of(nbytes: int) -> int:
    """How many places of that size are used in turn: two at least, so that no two transfers after each other have the same one."""
    return max(2, min(PLACES_MAX, PLACES_BYTES // nbytes))


@dataclass(frozen=True)
class Area:
    """Places of one size that a phase uses at one peer (its number at the source)."""

    peer: int
    at: int
    nbytes: int

    @property
    def places(self) -> int:
        """How many."""
        return places_of(self.nbytes)

    def offset(self, place: int) -> int:
        """In the region, alike on both sides."""
        return self.at + place * self.nbytes


def areas(phase: Phase, settings: Settings) -> list[Area]:
    """What the phase moves, the bulk first. Bulk and single transfers go to peer 0, and small ones to 1 where they go to another."""
    layout = settings.layout()
    if phase.kind in ("single", "bandwidth"):
        return [Area(0, layout.bulk_at, phase.nbytes)]
    small = Area(int(phase.peer == "other"), 0, phase.nbytes)
    bulk = Area(0, layout.bulk_at, phase.bulk_bytes)
    return {"small_alone": [small], "bulk_alone": [bulk], "mixed": [bulk, small]}[phase.kind]


@dataclass
class Samples:
    """Nanoseconds of the measured iterations of one phase; `elapsed_ns` of all of them, where they overlap."""

    first: list[int] = field(default_factory=list)  # from post to status: the only transfer, or the small one
    bulk: list[int] = field(default_factory=list)
    both: list[int] = field(default_factory=list)  # from the first post to the last status
    post: list[int] = field(default_factory=list)  # inside the call that posts the first
    elapsed_ns: int = 0
    moved_bytes: int = 0


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least `percent` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def figures(phase: Phase, samples: Samples) -> dict[str, tuple[float, str]]:
    """name → (value, unit) of one phase of one pair."""
    if phase.kind == "bandwidth":
        return {"bandwidth_GBps": (round(samples.moved_bytes / samples.elapsed_ns, 4), "GB/s")}
    if phase.kind == "bulk_alone":
        return _spread("bulk_alone", samples.first)
    if phase.kind == "mixed":
        pair = phase.nbytes + phase.bulk_bytes
        rate = {"window_GBps": (round(pair / statistics.median(samples.both), 4), "GB/s")}
        return _spread("small_mixed", samples.first) | _spread("bulk_mixed", samples.bulk) | rate
    found = _spread(phase.kind, samples.first)
    if phase.kind == "single":
        found["post_us"] = (round(statistics.median(samples.post) / 1e3, 3), "µs")
    return found


def _spread(name: str, values: Sequence[int]) -> dict[str, tuple[float, str]]:
    found = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)} | {"min": min(values)}
    return {f"{name}_{what}_us": (round(value / 1e3, 3), "µs") for what, value in found.items()}
