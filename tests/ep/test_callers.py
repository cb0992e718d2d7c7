"""vLLM, SGLang and Megatron-Core find what they call, and get what one process would compute. The calls are in callers.py."""

from __future__ import annotations

from ep import callers
from harness import World

TABLES = ((0, 0, 0), (0, 0, 1, 1))  # 3 ranks: vLLM has no configuration for them, and gives None


def test_vllm_high_throughput(world: World) -> None:
    for node_of in TABLES:
        assert set(world.run(len(node_of), callers.vllm_high_throughput, node_of)) == {len(set(node_of))}


def test_sglang_normal(world: World) -> None:
    for node_of in TABLES:
        for tuned in (False, True):
            for counts in world.run(len(node_of), callers.sglang_normal, node_of, tuned):
                assert len(counts) == callers.EXPERTS // len(node_of)
                assert not tuned or all(count % 128 == 0 for count in counts)


def test_megatron_with_gradients(world: World) -> None:
    for node_of in TABLES:
        for diffs in world.run(len(node_of), callers.megatron, node_of):
            assert len(diffs) == 4
            assert max(diffs) < 2e-5, diffs
