"""Several lanes over several endpoints to one peer, on real libfabric: every byte, the order within a lane, regions in use."""

from __future__ import annotations

import dataclasses

import pytest

from fabric import lanes_bodies as bodies
from fabric.ranks import TCP, ranks


@pytest.mark.parametrize(
    ("lanes", "endpoints", "hold_us", "outstanding"), [(2, 2, 500, 512), (5, 3, 0, 4)], ids=["as-it-comes", "three-endpoints-four-slots"]
)
def test_small_writes_beside_bulk_arrive_whole_and_in_order(lanes: int, endpoints: int, hold_us: int, outstanding: int) -> None:
    settings = dataclasses.replace(TCP, max_outstanding=outstanding)
    options = {"bulk_chunk_bytes": 16 << 10, "bulk_window": 2, "bulk_hold_us": hold_us}
    with ranks(2, settings, lanes=lanes, endpoints=endpoints, **options) as group:
        for epoch in range(1, 6):
            group[1].call(bodies.guard)
            group[0].ask(bodies.write_both, epoch)
            group[1].ask(bodies.check_both, epoch)
            before = group[0].answer()
            group[1].answer()
            print(f"epoch {epoch}: {before} of {len(bodies.pieces(epoch))} small writes ended before the bulk")
        group[1].call(bodies.guard)
        group[1].call(bodies.clear_places, 20_480)
        group[0].ask(bodies.write_in_order, 10, 20_480)
        group[1].call(bodies.check_in_order, 10, 20_480)
        group[0].answer()
        group[0].call(bodies.deregister_in_use)
