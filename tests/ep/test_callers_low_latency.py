"""vLLM's and SGLang's low-latency calls find what they call, and get what one process would compute. Calls: callers_low_latency.py."""

from __future__ import annotations

from ep import callers_low_latency as callers
from harness import World

TABLES = ((0, 0, 0), (0, 0, 1, 1))


def test_vllm_low_latency(world: World) -> None:
    for node_of in TABLES:
        for fp8, ue8m0 in ((False, False), (True, False), (True, True)):
            assert all(world.run(len(node_of), callers.vllm_low_latency, node_of, fp8, ue8m0))


def test_sglang_in_both_modes_on_one_buffer(world: World) -> None:
    for node_of in TABLES:
        for hooks in (False, True):
            assert all(world.run(len(node_of), callers.sglang_auto, node_of, hooks))
