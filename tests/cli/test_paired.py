"""The bench's own oracles: right by the slow reference, and able to see what they are there to see."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from expertwire.cli.bench.arms import Received
from expertwire.cli.bench.ep import Setup, make_inputs
from expertwire.cli.bench.paired import (
    CALC_DIFF_MAX,
    Expected,
    calc_diff,
    check_combine,
    check_dispatch,
    destinations,
    expect,
    expert_rows,
    ordered_sum,
    same_bytes,
    turn,
    variant,
)
from expertwire.ep.reference import reference_combine, reference_dispatch, reference_layout

NODES = (0, 0, 1, 1, 1)


@dataclass
class NamedArm:
    name: str
    seconds: dict[str, float] = field(default_factory=dict)


def setup(routing: str, experts: int = 11) -> Setup:
    tokens = (7, 0, 5, 16, 1)
    return Setup(NODES, tokens, 24, experts, 3, routing, None, (), 1, 0, 5)


@pytest.mark.parametrize("routing", ["uniform", "skewed", "duplicates", "holes", "none"])
@pytest.mark.parametrize("experts", [11, 4])
def test_what_is_expected_is_what_the_reference_says(routing: str, experts: int) -> None:
    shape = setup(routing, experts)
    inputs = [make_inputs(shape, rank) for rank in range(shape.ranks)]
    in_ranks = [reference_layout(one.topk_idx, experts, NODES).in_rank for one in inputs]
    dispatched = reference_dispatch(
        [one.x for one in inputs], in_ranks, [one.topk_idx for one in inputs], [one.topk_weights for one in inputs], experts
    )
    made = [expert_rows(one.x, rank) for rank, one in enumerate(dispatched)]
    combined = reference_combine(made, in_ranks, NODES)
    for rank in range(shape.ranks):
        expected = expect(rank, shape.ranks, experts, lambda source: inputs[source])
        assert torch.equal(expected.rows, dispatched[rank].x)
        assert torch.equal(expected.topk_idx, dispatched[rank].topk_idx)
        assert torch.equal(expected.topk_weights, dispatched[rank].topk_weights)
        assert torch.equal(expected.in_rank, in_ranks[rank])
        total = ordered_sum(inputs[rank].x, expected.in_rank, list(NODES), rank)
        assert torch.equal(total, combined[rank][0])
        for number in (1, 2, 3):
            turned = ordered_sum(variant(inputs[rank].x, number), expected.in_rank, list(NODES), rank)
            assert torch.equal(turned, variant(total, number)), "the sum turns with the rows"


def test_destinations_ignore_what_is_no_expert() -> None:
    ids = torch.tensor([[0, 3, -1], [-1, -1, -1], [2, 2, 2]])
    assert destinations(ids, 4, 2).tolist() == [[True, True], [False, False], [False, True]]


def received() -> tuple[Received, Expected]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(40, 16, generator=generator).to(torch.bfloat16)
    ids, weights = torch.randint(-1, 4, (40, 2), generator=generator), torch.rand(40, 2, generator=generator)
    expected = Expected(rows.clone(), ids, weights, torch.ones(40, 1, dtype=torch.bool))
    expected.turn(5)
    expected.turn(2)
    return Received(variant(rows, 2), ids.clone(), weights.clone()), expected


def test_a_right_dispatch_passes() -> None:
    got, expected = received()
    assert check_dispatch(got, expected) == []


def test_a_row_of_the_iteration_before_is_seen() -> None:
    got, expected = received()
    turn(expected.rows, 2, 3)
    got.rows[7] = expected.rows[7]
    turn(expected.rows, 3, 2)
    assert check_dispatch(got, expected) == ["dispatch: 1 rows differ, the first is row 7"]


def test_two_swapped_rows_are_seen() -> None:
    got, expected = received()
    got.rows[[4, 31]] = got.rows[[31, 4]]
    assert check_dispatch(got, expected) == ["dispatch: 2 rows differ, the first is row 4"]


def test_one_flipped_bit_is_seen() -> None:
    got, expected = received()
    got.rows.view(torch.int16)[39, 15] ^= 1
    assert check_dispatch(got, expected) == ["dispatch: 1 rows differ, the first is row 39"]


def test_wrong_ids_weights_and_counts_are_seen() -> None:
    got, expected = received()
    got.topk_idx[3, 1] += 1
    got.topk_weights[0, 0] += 1e-6
    assert check_dispatch(got, expected) == ["dispatch: expert ids differ", "dispatch: weights differ"]
    short = Received(got.rows[:-1], got.topk_idx[:-1], got.topk_weights[:-1])
    assert check_dispatch(short, expected) == ["dispatch gave (39, 16) rows, expected (40, 16)"]


def test_our_sums_are_compared_bit_for_bit_and_others_by_distance() -> None:
    generator = torch.Generator().manual_seed(4)
    wanted = torch.randn(30, 64, generator=generator).to(torch.bfloat16)
    ours, gloo = NamedArm("expertwire"), NamedArm("gloo")
    off = wanted.clone()
    off.view(torch.int16)[11, 5] ^= 1
    assert check_combine(ours, wanted.clone(), wanted) == []
    assert check_combine(ours, off, wanted) == ["combine: 1 tokens differ, the first is 11"]
    assert check_combine(gloo, off, wanted) == []
    off[11] = 0
    assert len(check_combine(gloo, off, wanted)) == 1
    assert len(check_combine(ours, wanted[:-1], wanted)) == 1
    zero = torch.zeros(1, 4, dtype=torch.bfloat16)
    assert check_combine(ours, -zero, zero) == []


def test_no_two_iterations_that_follow_each_other_share_an_element() -> None:
    rows = torch.randn(9, 30, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    for number in range(200):
        now = variant(rows, number)
        assert torch.equal(torch.sign(now), torch.sign(rows) * (-1) ** number)
        for later in (1, 2, 3):
            assert not (now == variant(rows, number + later)).any()
        back = now.clone()
        turn(back, number, 0)
        assert torch.equal(back, rows), "turning is exact"


@pytest.mark.parametrize("hidden", [1, 6, 8, 2880])
def test_every_byte_counts(hidden: int) -> None:
    rows = torch.randn(3, hidden, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    for place in {0, hidden // 2, hidden - 1}:
        other = rows.clone()
        assert same_bytes(rows, other)
        other.view(torch.int16)[2, place] ^= 1 << 14
        assert not same_bytes(rows, other)
        assert same_bytes(rows[:2], other[:2])
    assert same_bytes(rows[1:], rows.clone()[1:])


def test_calc_diff_is_zero_for_equal_and_counts_a_lost_token() -> None:
    rows = torch.randn(1500, 8, generator=torch.Generator().manual_seed(5))
    assert abs(calc_diff(rows, rows.clone())) < 1e-12
    lost = rows.clone()
    lost[1234] = 0
    assert calc_diff(lost, rows) > CALC_DIFF_MAX
    assert calc_diff(torch.zeros(3, 2), torch.zeros(3, 2)) == 0.0
