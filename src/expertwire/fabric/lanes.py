"""Which lane a transfer takes: small ones have an endpoint to themselves, so that no bulk stands before them. Pure."""

from __future__ import annotations

__all__ = ["BULK_CHUNK_BYTES", "BULK_HOLD_US", "BULK_WINDOW", "SMALL_BYTES_MAX", "lane_for"]

SMALL_BYTES_MAX = 16_384  # what is larger is no longer a matter of latency: its own bytes take longer than the way
BULK_CHUNK_BYTES = 262_144
BULK_WINDOW = 8  # chunks in flight, of what is read half as many
BULK_HOLD_US = 250


def lane_for(nbytes: int, lanes: int, endpoints: int, turn: int = 0) -> int:
    """The lane for a transfer of `nbytes`: 0 for a small one, else the bulk lanes in turn; 0 where there are none."""
    bulk = [lane for lane in range(lanes) if lane % endpoints]
    return bulk[turn % len(bulk)] if bulk and nbytes > SMALL_BYTES_MAX else 0
