"""The payloads of `bench transfer` (X4): each follows from (source, epoch) and the byte's offset, after a marker of 8 bytes.

A phase has an epoch of its own for each of its places; the marker is that of the transfer. So bytes of an older phase, of another
place, of another agent, shifted or torn ones are seen, and so is a transfer that never came where another one had been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertwire.cli.bench.transfer_plan import Area
from expertwire.testing.oracle import check_payload, mix64, payload, payload_seed

Bytes = npt.NDArray[np.uint8]
Marker = np.ndarray[Any, np.dtype[np.uint64]]

MARKER_BYTES = 8
STALE = 0xA5  # what a place holds before anything has been moved there
_EPOCHS_OF_A_PHASE = 1 << 32
_ITERATIONS = 1 << 16  # epochs of the places come first, those of the transfers after them


@dataclass(frozen=True)
class Content:
    """The payloads of one area in one phase. `source`: the number of the agent whose memory they come from, 0 is the source's."""

    area: Area
    source: int
    seed: int
    phase: int

    def fill(self, region: Bytes, marked: bool) -> None:
        """Give every place its payload and, `marked`, the marker of its own, for transfers in which the other side fetches it."""
        for place in range(self.area.places):
            at = self.area.offset(place)
            region[at : at + self.area.nbytes] = payload(self._seed_of(place), 0, self.area.nbytes)
            if marked:
                self.marker_at(region, place)[0] = self.marker(place)

    def clear(self, region: Bytes) -> None:
        """Make every byte of the area one that no payload is made of."""
        region[self.area.at : self.area.offset(self.area.places)] = STALE

    def marker_at(self, region: Bytes, place: int) -> Marker:
        """The first 8 bytes of a place, as one word."""
        at = self.area.offset(place)
        return region[at : at + MARKER_BYTES].view(np.uint64)

    def marker(self, number: int) -> int:
        """Of the transfer of that number, or of a place whose transfers all carry the same bytes."""
        return mix64(payload_seed(self.source, self._epoch(_ITERATIONS + number)) ^ self.area.at)

    def faults(self, region: Bytes, place: int, number: int | None) -> list[str]:
        """What is wrong at a place to which transfer `number` was the last one; None: its own marker, or no transfer at all."""
        at = self.area.offset(place)
        found = region[at : at + self.area.nbytes]
        wanted = self.marker(place if number is None else number)
        have = int(self.marker_at(region, place)[0])
        where = f"phase {self.phase}, place {place} of {self.area.nbytes} bytes"
        faults = [] if have == wanted else [f"{where}: the marker is {have:#x}, that of transfer {number} is {wanted:#x}"]
        wrong = check_payload(found[MARKER_BYTES:], self._seed_of(place), MARKER_BYTES)
        return faults if wrong is None else [*faults, f"{where}: {wrong}"]

    def untouched(self, region: Bytes, place: int) -> list[str]:
        """What is wrong at a place that nothing was moved to."""
        at = self.area.offset(place)
        wrong = np.flatnonzero(region[at : at + self.area.nbytes] != STALE)
        return [f"phase {self.phase}, place {place}: {wrong.size} bytes were written by nobody"] if wrong.size else []

    def _seed_of(self, place: int) -> int:
        return payload_seed(self.source, self._epoch(place)) ^ mix64(self.seed)

    def _epoch(self, number: int) -> int:
        return self.phase * _EPOCHS_OF_A_PHASE + number


def last_of(area: Area, transfers: int) -> list[int | None]:
    """By place, the number of the last of so many transfers that go round the places; None where none came."""
    return [None if place >= transfers else place + (transfers - 1 - place) // area.places * area.places for place in range(area.places)]
