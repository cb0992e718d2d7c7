"""ep/plan.py: against brute force, against the slow reference, and against the numbers that the core computes."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire import _simulation
from expertwire.ep import plan
from expertwire.ep.reference import reference_layout


@st.composite
def node_tables(draw: st.DrawFn) -> tuple[int, ...]:
    nodes = draw(st.integers(1, 5))
    rest = draw(st.lists(st.integers(0, nodes - 1), max_size=12))
    return tuple(draw(st.permutations(list(range(nodes)) + rest)))


@given(st.integers(0, 400), st.integers(1, 40))
def test_experts_are_dealt_out_in_order(num_experts: int, ranks: int) -> None:
    first = plan.expert_first(num_experts, ranks)
    owned = np.diff(first)
    assert first[0] == 0
    assert first[-1] == num_experts
    assert list(owned) == [num_experts // ranks + (rank < num_experts % ranks) for rank in range(ranks)]
    assert list(plan.owners(num_experts, ranks)) == [rank for rank in range(ranks) for _ in range(owned[rank])]


@given(node_tables())
def test_every_rank_enters_every_other_node_once(table: tuple[int, ...]) -> None:
    nodes = plan.Nodes(table)
    for node in range(nodes.count):
        entries = [nodes.entry(rank, node) for rank in range(nodes.ranks) if table[rank] != node]
        assert all(table[entry] == node for entry in entries)
        members = nodes.members(node)
        for rank in range(nodes.ranks):
            assert nodes.entry(rank, node) == members[nodes.members(table[rank]).index(rank) % len(members)]


@pytest.mark.parametrize("table", [(), (1,), (0, 2), (0, 0, 3)])
def test_nodes_with_gaps_are_refused(table: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="node_of"):
        plan.Nodes(table)


@settings(max_examples=60)
@given(node_tables(), st.integers(1, 30), st.integers(0, 12), st.integers(1, 6), st.randoms(use_true_random=False))
def test_layout_counts_equal_the_reference(table: tuple[int, ...], experts: int, tokens: int, topk: int, random: object) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    ids = rng.integers(-1, experts, size=(tokens, topk))
    counts = plan.layout_counts(ids, experts, plan.Nodes(table))
    expected = reference_layout(torch.from_numpy(ids), experts, table)
    assert counts.per_rank.tolist() == expected.per_rank.tolist()
    assert counts.per_expert.tolist() == expected.per_expert.tolist()
    assert counts.in_rank.tolist() == expected.in_rank.tolist()
    if expected.per_node is None:
        assert max(table) == 0
    else:
        assert counts.per_node.tolist() == expected.per_node.tolist()


@pytest.mark.parametrize("value", [-2, 8, 1 << 40])
def test_a_wrong_id_is_named(value: int) -> None:
    ids = np.array([[0, 1], [2, value]])
    with pytest.raises(ValueError, match=rf"topk_idx\[1, 1\] is {value}, .* \[0, 8\)"):
        plan.layout_counts(ids, 8, plan.Nodes((0, 0)))


def test_rows_are_ordered_by_source() -> None:
    matrix = np.array([[1, 2], [3, 4], [5, 6]])
    assert plan.offsets(matrix).tolist() == [[0, 0], [1, 2], [4, 6]]


@given(node_tables(), st.integers(0, 20), st.integers(1, 6), st.integers(1, 40))
def test_region_sizes_and_entries_equal_the_core(table: tuple[int, ...], experts: int, slots: int, lines: int) -> None:
    nodes = plan.Nodes(table)
    for rank in range(nodes.ranks):
        core = _simulation.exchange_layout(rank, list(table), experts, slots, lines * 64)
        assert core["control_bytes"] == plan.control_bytes(nodes, experts, slots)
        assert core["staging_bytes"] == plan.staging_bytes(nodes, rank, slots, lines * 64)
        assert core["entries"] == [nodes.entry(rank, node) for node in range(nodes.count)]


SHAPES = (st.integers(1, 20_000), st.integers(0, 3), st.integers(0, 22), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 300))


@given(st.integers(1, 2_000).map(lambda lines: lines * 64), *SHAPES)
def test_chunk_rows_equal_the_core(slot: int, row: int, words: int, topk: int, index: int, weights: bool, scales: int) -> None:
    weights = weights and topk > 0
    shape = (slot, row, words, topk, index, weights, scales)
    assert plan.chunk_rows(*shape) == _simulation.exchange_chunk_rows(*shape)


@given(st.integers(0, 5_000), st.integers(1, 20_000), st.integers(0, 22), st.sampled_from([4, 8]), st.booleans(), st.integers(0, 300))
def test_extents_equal_the_core_and_do_not_overlap(rows: int, row: int, topk: int, index: int, weights: bool, scales: int) -> None:
    extent = plan.dispatch_extent(rows, row, topk, index, weights, scales)
    core = _simulation.exchange_extent(rows, row, topk, index, weights, scales)
    assert core == astuple(extent)
    assert rows * row <= extent.src_idx
    assert extent.src_idx + rows * 4 <= extent.topk_idx
    assert extent.topk_idx + rows * topk * index <= extent.topk_weights
    assert extent.topk_weights + (rows * topk * 4 if weights else 0) <= extent.scales
    assert extent.scales + rows * scales <= extent.total


@pytest.mark.parametrize("rows", [(1 << 32) // 14336 - 1, (1 << 32) // 14336 + 1, 600_000, 3_000_000])
def test_extents_beyond_4_gib_equal_the_core(rows: int) -> None:
    """Offsets are 64-bit throughout."""
    extent = plan.dispatch_extent(rows, 14336, 16, 8, True, 448)
    assert _simulation.exchange_extent(rows, 14336, 16, 8, True, 448) == astuple(extent)
    assert extent.src_idx >= rows * 14336
    assert extent.total >= rows * (14336 + 4 + 16 * 12 + 448)


def test_rings_beyond_4_gib_equal_the_core() -> None:
    table = tuple(rank // 2 for rank in range(64))
    nodes = plan.Nodes(table)
    for rank in (0, 63):
        core = _simulation.exchange_layout(rank, list(table), 4, 64, 4 << 20)
        assert core["staging_bytes"] == plan.staging_bytes(nodes, rank, 64, 4 << 20) > 4 << 30


@given(st.integers(0, 1_000), st.integers(1, 50))
def test_chunks_hold_all_rows(rows: int, capacity: int) -> None:
    sizes = plan.chunk_sizes(rows, capacity)
    assert sum(sizes) == rows
    assert len(sizes) == plan.chunks_for(rows, capacity)
    assert all(size == capacity for size in sizes[:-1])


def test_round_up() -> None:
    assert plan.round_up([0, 1, 127, 128, 129], 128) == [0, 128, 128, 128, 256]
