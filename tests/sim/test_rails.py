"""Rails: one request over several NICs of different rate and latency, its signal gated over all of them; and one of them is lost."""

from __future__ import annotations

from typing import Any

import pytest

from expertwire import _simulation

MIB = 1 << 20


def run(rails: list[tuple[float, int]], size: int, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = _simulation.run_rails(rails, size, **options)
    return result


@pytest.mark.parametrize("rails", [[(25.0, 2000)] * 2, [(25.0, 2000), (12.5, 2000)], [(25.0, 2000), (25.0, 40_000), (5.0, 500)]])
def test_chunks_go_where_they_arrive_first(rails: list[tuple[float, int]]) -> None:
    size = 8 * MIB
    result = run(rails, size)
    assert result["error"] == ""
    assert sum(result["carried"]) == size
    assert result["records"] == 1
    rate = sum(rail[0] for rail in rails)
    slowest = max(latency for _, latency in rails)
    assert result["ns"] < 1.1 * size / rate + 4 * slowest
    if slowest == rails[0][1]:
        for (speed, _), carried in zip(rails, result["carried"], strict=True):
            assert carried / size == pytest.approx(speed / rate, rel=0.05)


def test_a_small_request_takes_the_nearest_rail_alone() -> None:
    result = run([(25.0, 2000), (25.0, 500)], 4096)
    assert result["error"] == ""
    assert result["carried"] == [0, 4096]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_lost_rail_fails_the_request_and_the_next_goes_over_the_others(failing: int) -> None:
    rails = [(25.0, 2000), (12.5, 1000)]
    result = run(rails, 4 * MIB, failing=failing, fail_ns=20_000)
    assert result["error"] == ""
    assert result["attempts"] == result["records"] == 2, "64 chunks over two rails, one record; and one for the next request"
    assert result["carried"][1 - failing] > 4 * MIB


def test_without_any_rail_left_it_is_said() -> None:
    assert "status" in run([(25.0, 2000)], MIB, failing=0, fail_ns=1)["error"]


def test_the_number_of_rails_is_checked() -> None:
    with pytest.raises(ValueError, match="between 1 and 8"):
        run([], 10)
