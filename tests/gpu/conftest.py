"""One world of ranks for all tests on GPUs: to start eight processes with a GPU each costs more than most tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness import World

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()
SHARED = os.environ.get("EXPERTWIRE_SHARE_DEVICE") == "1"  # under MPS: scripts/gpu_check
RANKS = 8 if SHARED else min(GPUS, 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != HERE:
            continue
        count = getattr(item, "callspec", None) and item.callspec.params.get("count", 1)
        if not GPUS:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        elif (count or 1) > RANKS:
            item.add_marker(pytest.mark.skip(reason=f"{count} ranks and {GPUS} GPUs: they share under MPS (scripts/gpu_check)"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[World]:
    world = World(RANKS)
    yield world
    world.close()
