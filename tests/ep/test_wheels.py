"""Callers' own Python against our Buffer, where their wheels are installed; the replays of callers.py are there always."""

from __future__ import annotations

from importlib import metadata

import pytest

from ep import wheels
from ep.test_callers import TABLES
from harness import World


def require(distribution: str) -> None:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed (pip install --no-deps {distribution})")


def test_megatron_core(world: World) -> None:
    require("megatron-core")
    for node_of in TABLES:
        for diffs in world.run(len(node_of), wheels.megatron_core, node_of, timeout_s=170):
            assert len(diffs) == 4
            assert max(diffs) < 2e-5, diffs


def test_vllm() -> None:
    """On ranks of its own, which end with it: a Buffer that was used through vLLM's class has outlived it, why was not found."""
    require("vllm")
    ranks = World(4)
    try:
        for node_of in TABLES:
            assert set(ranks.run(len(node_of), wheels.vllm, node_of, timeout_s=170)) == {len(set(node_of))}
    finally:
        ranks.close()
