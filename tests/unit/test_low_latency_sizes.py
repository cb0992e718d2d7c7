"""What the low-latency mode needs fits in what `get_low_latency_rdma_size_hint` says, for that is what a caller allocates."""

from __future__ import annotations

import pytest

from expertwire._native import LowLatency
from expertwire.ep import Buffer
from expertwire.ep.cpu.low_latency import BF16, FP8, FP8_ROUND, FP8_UE8M0
from expertwire.ep.layout import expert_bounds


def fits(ranks: int, per_node: int, tokens: int, hidden: int, experts: int, topk: int) -> bool:
    hint = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
    node_of = [rank // per_node for rank in range(ranks)]
    shape = (node_of, tokens, hidden, experts, topk)
    return all(LowLatency.needed_bytes(*shape, kind, expert_bounds(experts, ranks)) <= hint for kind in (BF16, FP8, FP8_ROUND, FP8_UE8M0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 64])
def test_experts_divisible_by_the_ranks_always_fit(ranks: int) -> None:
    for per_node in (1, 4, 8):
        for share in (1, 2, 9, 36):
            for tokens, hidden in ((1, 1), (1, 128), (2, 64), (7, 127), (8, 511), (32, 2880), (128, 7168), (1024, 7168)):
                for topk in (1, 2, 8, 22):
                    if topk <= share * ranks:
                        assert fits(ranks, per_node, tokens, hidden, share * ranks, topk), (per_node, share, tokens, hidden, topk)


def test_experts_that_are_not_divisible_fit_where_ranks_have_some() -> None:
    for ranks in (2, 4, 8, 12, 16):
        for per_node in (1, 4):
            for experts in range(4 * ranks, 4 * ranks + 9):
                assert fits(ranks, per_node, 32, 2880, experts, 8), (ranks, per_node, experts)


def test_more_than_four_gigabytes_are_counted_whole() -> None:
    needed = LowLatency.needed_bytes([rank // 8 for rank in range(64)], 1024, 7168, 512, 8, BF16, expert_bounds(512, 64))
    assert 8 << 30 < needed <= Buffer.get_low_latency_rdma_size_hint(1024, 7168, 64, 512)
