"""The baseline that we compare with is right too: its rows bit for bit, its sums by the slow reference."""

from __future__ import annotations

from cli import targets
from expertwire.cli.launch import launch


def test_the_gloo_exchange_delivers_and_sums() -> None:
    shapes = [((5, 0, 9), 7, 2), ((70, 130, 1), 12, 4)]
    faults = launch(targets.gloo_exchange, (shapes,), 3, timeout_s=60)
    assert faults == [[], [], []]
