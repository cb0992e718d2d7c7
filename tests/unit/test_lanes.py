"""Which lane a transfer takes."""

from __future__ import annotations

import pytest

from expertwire.fabric.lanes import SMALL_BYTES_MAX, lane_for


def test_small_transfers_have_the_first_lane_to_themselves() -> None:
    for endpoints, lanes in ((2, 2), (2, 4), (3, 6)):
        assert lane_for(SMALL_BYTES_MAX, lanes, endpoints) == 0
        assert lane_for(1, lanes, endpoints, turn=5) == 0


@pytest.mark.parametrize(("lanes", "endpoints", "bulk"), [(2, 2, [1, 1, 1]), (4, 2, [1, 3, 1]), (4, 4, [1, 2, 3]), (3, 3, [1, 2, 1])])
def test_bulk_goes_round_the_lanes_of_the_other_endpoints(lanes: int, endpoints: int, bulk: list[int]) -> None:
    assert [lane_for(SMALL_BYTES_MAX + 1, lanes, endpoints, turn) for turn in range(3)] == bulk
    assert all(lane % endpoints for lane in bulk)


@pytest.mark.parametrize("lanes", [1, 8])
def test_with_one_endpoint_nothing_changes(lanes: int) -> None:
    assert lane_for(1 << 30, lanes, 1, turn=3) == 0
