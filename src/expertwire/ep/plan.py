"""Counts, offsets and sizes of a high-throughput exchange, as pure functions.

The native core computes the same numbers (csrc/exchange/layout.hpp); this is how Python sizes regions before they exist, fills a handle's
views, and checks the core in tests. R ranks, RR nodes, T tokens, K top-k, E experts. Everything is plain ints and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ALIGNMENT = 64
NOTIFY_HEADER_BYTES = 136
CHUNK_HEADER_BYTES = 24
COUNT_MAX = (1 << 28) - 1  # rows or chunks that one rank may count in one call


def align_up(count: int) -> int:
    """The next multiple of 64."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Nodes:
    """Which rank is where: a table, so that nodes may be uneven and their ranks need not be neighbours.

    `node_of[r]` is the node of rank r; nodes are numbered 0…RR-1 without a gap (ValueError otherwise).
    """

    node_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.node_of or sorted(set(self.node_of)) != list(range(max(self.node_of) + 1)):
            raise ValueError(f"node_of is {self.node_of}, must number nodes from 0 without a gap")

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.node_of)

    @property
    def count(self) -> int:
        """Nodes, RR."""
        return max(self.node_of) + 1

    def members(self, node: int) -> list[int]:
        """Ranks of the node, ascending."""
        return [rank for rank, where in enumerate(self.node_of) if where == node]

    def local_index(self, rank: int) -> int:
        """Place of the rank among the ranks of its node, ascending."""
        return self.members(self.node_of[rank]).index(rank)

    def entry(self, rank: int, node: int) -> int:
        """The one rank of another node that `rank` talks to: its rows enter there, and leave from there summed."""
        members = self.members(node)
        return members[self.local_index(rank) % len(members)]

    def mask_words(self, node: int) -> int:
        """64-bit words of a mask over the ranks of the node."""
        return -(-len(self.members(node)) // 64)


def expert_first(num_experts: int, ranks: int) -> list[int]:
    """First expert of each rank, and E at the end (R + 1 ints): consecutive, the first E % R ranks own one more."""
    return [rank * (num_experts // ranks) + min(rank, num_experts % ranks) for rank in range(ranks + 1)]


def owners(num_experts: int, ranks: int) -> IntArray:
    """i64[E]: the rank that owns each expert."""
    first = expert_first(num_experts, ranks)
    return np.repeat(np.arange(ranks, dtype=np.int64), np.diff(first))


@dataclass(frozen=True)
class Counts:
    """get_dispatch_layout's result for one rank: i64[R], i64[RR], i64[E], bool[T, R]."""

    per_rank: IntArray
    per_node: IntArray
    per_expert: IntArray
    in_rank: BoolArray


def layout_counts(topk_idx: npt.NDArray[Any], num_experts: int, nodes: Nodes) -> Counts:
    """Who gets what. `topk_idx`: int [T, K], -1 is no expert. ValueError names token, slot and value of any other id outside [0, E)."""
    ids = np.asarray(topk_idx).astype(np.int64)
    wrong = np.argwhere((ids < -1) | (ids >= num_experts))
    if len(wrong):
        at = tuple(int(place) for place in wrong[0])
        raise ValueError(f"topk_idx[{at[0]}, {at[1]}] is {int(ids[at])}, must be -1 (no expert) or in [0, {num_experts})")
    in_rank = np.zeros((len(ids), nodes.ranks), dtype=np.bool_)
    token, slot = np.nonzero(ids >= 0)
    in_rank[token, owners(num_experts, nodes.ranks)[ids[token, slot]]] = True
    per_expert = np.bincount(ids[token, slot], minlength=num_experts).astype(np.int64)
    return Counts(in_rank.sum(axis=0, dtype=np.int64), node_counts(in_rank, nodes), per_expert, in_rank)


def node_counts(in_rank: BoolArray, nodes: Nodes) -> IntArray:
    """i64[RR]: distinct rows per node, from bool[T, R]."""
    return np.array([in_rank[:, nodes.members(node)].any(axis=1).sum() for node in range(nodes.count)], dtype=np.int64)


def offsets(matrix: IntArray) -> IntArray:
    """i64[R, R]: where the rows of source s begin at destination d, from rows [s, d]: ordered by source rank, then source token."""
    return np.cumsum(matrix, axis=0) - matrix


@dataclass(frozen=True)
class Extent:
    """Byte offsets inside the extent that a rank offers, and its size. Rows come first."""

    rows: int
    src_idx: int
    topk_idx: int
    topk_weights: int
    scales: int
    total: int


def dispatch_extent(rows: int, row_bytes: int, topk: int, index_bytes: int, has_weights: bool, scale_bytes: int) -> Extent:
    """What a dispatch that receives `rows` rows writes: x, src_idx i32[N], topk_idx [N, K], topk_weights f32[N, K], scales [N, bytes]."""
    src_idx = align_up(rows * row_bytes)
    indices = align_up(src_idx + rows * 4)
    weights = align_up(indices + rows * topk * index_bytes)
    scales = align_up(weights + (rows * topk * 4 if has_weights else 0))
    return Extent(0, src_idx, indices, weights, scales, align_up(scales + rows * scale_bytes))


def combine_extent(rows: int, row_bytes: int, topk: int, has_weights: bool) -> Extent:
    """What a combine of `rows` rows copies where its input does not lie in the data region: rows, weights f32[N, K]."""
    weights = align_up(rows * row_bytes)
    end = align_up(weights + (rows * topk * 4 if has_weights else 0))
    return Extent(0, weights, weights, weights, end, end)


def control_bytes(nodes: Nodes, local_experts_max: int, ring_slots: int) -> int:
    """Bytes of the control region: words, then notify slots by parity and source, then one outgoing slot per rank."""
    notify = align_up(NOTIFY_HEADER_BYTES + 4 * (nodes.ranks + nodes.count + local_experts_max))
    return align_up(8 * ((8 + ring_slots) * nodes.ranks + (1 + ring_slots) * nodes.count)) + 3 * nodes.ranks * notify


def staging_bytes(nodes: Nodes, rank: int, ring_slots: int, slot_bytes: int) -> int:
    """Bytes of the staging region: a ring per other node (outer halves), and per rank that enters the node here (inner halves)."""
    mine = nodes.node_of[rank]
    inner = sum(1 for other in range(nodes.ranks) if nodes.node_of[other] != mine and nodes.entry(other, mine) == rank)
    return (nodes.count - 1 + inner) * ring_slots * slot_bytes


def chunk_rows(slot_bytes: int, row_bytes: int, mask_words: int, topk: int, index_bytes: int, has_weights: bool, scale_bytes: int) -> int:
    """Rows that fit a ring slot with what travels beside them; 0: not even one. `mask_words` is 0 in a combine."""

    def size(rows: int) -> int:
        indices = CHUNK_HEADER_BYTES + rows * mask_words * 8
        weights = indices + -(-rows * topk * index_bytes // 8) * 8
        tokens = weights + (rows * topk * 4 if has_weights else 0)
        scales = tokens + (rows * 4 if mask_words else 0)
        return align_up(scales + rows * scale_bytes) + rows * row_bytes

    rows = min(max(slot_bytes - CHUNK_HEADER_BYTES, 0) // row_bytes, 1 << 20)
    while rows > 0 and size(rows) > slot_bytes:
        rows -= max(1, (size(rows) - slot_bytes) // (size(1) + row_bytes))
    return max(rows, 0)


def chunks_for(rows: int, capacity: int) -> int:
    """Chunks that `rows` rows take."""
    return -(-rows // capacity)


def chunk_sizes(rows: int, capacity: int) -> list[int]:
    """Rows of each chunk: all full but the last."""
    return [min(capacity, rows - first) for first in range(0, rows, capacity)] if rows else []


def round_up(counts: Sequence[int], alignment: int) -> list[int]:
    """Each count rounded up to a multiple of `alignment` (expert_alignment)."""
    return [-(-count // alignment) * alignment for count in counts]
