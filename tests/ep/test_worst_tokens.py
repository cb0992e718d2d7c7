"""Fixed-size results (SPEC E3 to E7): W rows whatever comes, counts as a tensor, and what happens when more comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ep import worst
from ep.cases import Case, expert_output, inputs
from ep.test_exchange_matrix import plain, rows_and_scales
from expertwire.ep.reference import reference_combine, reference_dispatch, reference_keep, reference_layout
from harness import World


def expected(case: Case, most: int) -> list[dict[str, Any]]:
    """What run_worst must give, by rank."""
    given = [inputs(case, rank) for rank in range(case.ranks)]
    ids = [one.topk_idx for one in given]
    weights = [one.topk_weights for one in given] if case.weights else None
    in_ranks = [reference_layout(one, case.experts, case.node_of).in_rank for one in ids]
    totals = [sum(int(in_rank[:, rank].sum()) for in_rank in in_ranks) for rank in range(case.ranks)]
    overflow = next(((rank, total, most) for rank, total in enumerate(totals) if total > most), None)
    kept = reference_keep(in_ranks, most)
    sent, sent_again = ([rows_and_scales(one.sent(again)) for one in given] for again in (False, True))
    received = reference_dispatch([x for x, _ in sent], kept, ids, weights, case.experts, [scales for _, scales in sent])
    again = reference_dispatch([x for x, _ in sent_again], kept)
    ys = [expert_output(one.x, rank) for rank, one in enumerate(received)]
    combined = reference_combine(ys, kept, case.node_of, [one.topk_weights for one in received] if case.weights else None)
    answers = []
    for rank, one in enumerate(received):
        tail = torch.full((most - len(one.x), case.topk), -1, dtype=one.topk_idx.dtype)
        answers.append(
            {
                "overflow": overflow,
                "x": plain(one.x),
                "scales": plain(one.scales) if case.scales else None,
                "topk_idx": plain(torch.cat([one.topk_idx, tail])),
                "counts": [-(-count // 16) * 16 for count in one.expert_counts],
                "real_counts": one.expert_counts,
                "src_idx": plain(one.src_idx),
                "combined": plain(combined[rank][0]),
                "combined_weights": plain(combined[rank][1]),
                "again": plain(again[rank].x),
                **({"topk_weights": plain(one.topk_weights)} if case.weights else {}),
            }
        )
    return answers


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1), (0, 0, 1, 1), (0, 0, 0, 1, 1)], ids=str)
def test_results_have_w_rows_and_say_which_are_valid(world: World, node_of: tuple[int, ...]) -> None:
    overflows = 0
    for case, most in worst.cases(node_of):
        wanted = expected(case, most)
        overflows += wanted[0]["overflow"] is not None
        for rank, (want, got) in enumerate(zip(wanted, world.run(case.ranks, worst.run_worst, case, most), strict=True)):
            assert want.keys() == got.keys()
            for name, value in want.items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{name} of rank {rank}, W = {most}, {case}")
    assert overflows > 2


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_another_w_is_named_on_every_rank(world: World, node_of: tuple[int, ...]) -> None:
    for kind, _, message in world.run(3, worst.differing, node_of):
        assert kind == "MismatchError"
        assert "num_worst_tokens is 64 on rank 0 and 65 on rank 1" in message


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_w_rows_that_do_not_fit_are_refused_with_both_numbers(world: World, node_of: tuple[int, ...]) -> None:
    for kind, _, message in world.run(3, worst.too_large, node_of):
        assert kind == "CapacityError"
        assert f"{1 << 20} rows" in message
        assert str(32 << 20) in message, "the capacity"
