"""A rank uses its current GPU and no other, whatever its launcher wrote into LOCAL_RANK."""

from __future__ import annotations

import pytest

from gpu import places
from gpu.conftest import GPUS, SHARED
from harness import World

pytestmark = pytest.mark.skipif(GPUS < 2 or SHARED, reason="needs two GPUs, and none shared: MPS stands in for who uses one")


@pytest.mark.parametrize("devices", [(1,), (1, 0)], ids=str)
def test_nothing_of_ours_on_another_gpu(devices: tuple[int, ...]) -> None:
    world = World(len(devices))
    try:
        answers = world.run(len(devices), places.on_its_own, devices)
    finally:
        world.close()
    for found, uuid in answers:
        assert found == [uuid]
