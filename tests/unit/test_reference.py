"""The slow oracle against cases small enough to work out by hand, and against the contract's own words."""

from __future__ import annotations

import pytest
import torch

from expertwire.ep.reference import QUIET_NAN, reference_combine, reference_dispatch, reference_layout, round_bf16


def test_a_duplicate_counts_once_per_rank_and_twice_per_expert() -> None:
    layout = reference_layout(torch.tensor([[0, 0, 3], [-1, -1, -1], [1, 2, -1]]), 4, [0, 1])
    assert layout.per_rank.tolist() == [2, 2]
    assert layout.per_expert.tolist() == [2, 1, 1, 1]
    assert layout.in_rank.tolist() == [[True, True], [False, False], [True, True]]
    assert layout.per_node is not None
    assert layout.per_node.tolist() == [2, 2]
    assert reference_layout(torch.tensor([[0]]), 4, [0, 0]).per_node is None


def test_an_id_that_is_no_expert_is_named() -> None:
    with pytest.raises(ValueError, match=r"topk_idx\[0, 1\] is 4"):
        reference_layout(torch.tensor([[0, 4]]), 4, [0, 0])


def test_rows_come_by_source_then_token_with_local_ids() -> None:
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    ids = [torch.tensor([[0, 3], [2, -1]], dtype=torch.int32), torch.tensor([[3, 3]], dtype=torch.int32)]
    weights = [torch.tensor([[0.5, 0.25], [1.0, 9.0]]), torch.tensor([[0.125, 0.0625]])]
    in_ranks = [reference_layout(part, 4, [0, 0]).in_rank for part in ids]
    first, second = reference_dispatch(xs, in_ranks, ids, weights, num_experts=4)
    assert first.x.tolist() == [[1.0]]
    assert first.src_idx.tolist() == [0]
    assert first.topk_idx is not None
    assert first.topk_idx.tolist() == [[0, -1]]
    assert first.topk_idx.dtype == torch.int32
    assert first.topk_weights is not None
    assert first.topk_weights.tolist() == [[0.5, 0.0]]
    assert first.expert_counts == [1, 0]
    assert second.x.tolist() == [[1.0], [2.0], [3.0]]
    assert second.src_rank.tolist() == [0, 0, 1]
    assert second.src_idx.tolist() == [0, 1, 0]
    assert second.topk_idx is not None
    assert second.topk_idx.tolist() == [[-1, 1], [0, -1], [1, 1]]
    assert second.topk_weights is not None
    assert second.topk_weights.tolist() == [[0.0, 0.25], [1.0, 0.0], [0.125, 0.0625]]
    assert second.expert_counts == [1, 3]


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bfloat16)


def test_the_sum_of_another_node_is_rounded_once_and_the_own_is_not() -> None:
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    nowhere = torch.zeros(0, 4, dtype=torch.bool)
    ys = [bf16(1.0), bf16(2.0**-8), bf16(2.0**-9), bf16(-1.0)]
    in_ranks = [everywhere, nowhere, nowhere, nowhere]
    own = reference_combine(ys, in_ranks, [0, 0, 0, 0])[0][0]
    assert own.item() == 2.0**-8 + 2.0**-9
    # Ranks 0 and 1 are rank 3's other node: 1 + 2**-8 lies in the middle and rounds to the even 1.
    across = reference_combine(ys, [nowhere, nowhere, nowhere, everywhere], [0, 0, 1, 1])[3][0]
    assert across.item() == torch.tensor(1.0 + (2.0**-9 - 1.0)).item()


def test_bias_comes_first_and_tokens_without_ranks_get_it_alone() -> None:
    in_ranks = [torch.tensor([[True], [False]])]
    ((out, weights),) = reference_combine([bf16(3.0)], in_ranks, [0], biases=[[bf16(1.0).repeat(2, 1), bf16(0.5).repeat(2, 1)]])
    assert out.tolist() == [[4.5], [1.5]]
    assert weights is None


def test_weights_are_summed_over_ranks_and_not_rounded() -> None:
    in_ranks = [torch.ones(1, 2, dtype=torch.bool), torch.zeros(0, 2, dtype=torch.bool)]
    odd = 1.0 + 2.0**-20
    got = reference_combine([bf16(1.0), bf16(1.0)], in_ranks, [0, 1], weights=[torch.tensor([[odd, 0.0]]), torch.tensor([[0.0, odd]])])
    assert got[0][1] is not None
    assert got[0][1].tolist() == [[odd, odd]]
    assert got[1][0].shape == (0, 1)


def test_every_nan_becomes_the_same_quiet_one() -> None:
    bits = torch.tensor([0x7F800001, -0x3FFFFF, 0x7FC00000], dtype=torch.int32)
    assert (round_bf16(bits.view(torch.float32)).view(torch.int16) == QUIET_NAN).all()
    assert round_bf16(torch.tensor([float("inf")])).isinf().all()
