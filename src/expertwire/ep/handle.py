"""What a dispatch leaves for its combine, and for later dispatches with the same routing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from expertwire.fabric.native import ExchangeHandle


@dataclass(frozen=True, eq=False)
class Handle:
    """Routing of one dispatch. Belongs to the `Buffer` that made it, and stays valid until that is destroyed.

    Indexes and unpacks like DeepEP's tuples: 6 entries on one node, 10 on several. Entries that describe DeepEP's channels and queues have
    no counterpart here and are None.
    """

    native: ExchangeHandle = field(repr=False)
    buffer: object = field(repr=False)  # identity of the Buffer that made it
    rank: int
    node_of: tuple[int, ...]
    num_experts: int
    num_tokens: int  # rows of the dispatched x here
    num_recv_tokens: int  # rows received here, without those that num_worst_tokens had no room for
    num_worst_tokens: int  # rows of what the dispatch returned, valid ones first; 0: num_recv_tokens, all valid
    num_topk: int  # 0 when dispatched without top-k
    expert_alignment: int
    num_recv_tokens_per_expert: tuple[int, ...]  # real counts of the local experts, before `expert_alignment`
    is_token_in_rank: torch.Tensor = field(repr=False)  # bool[T, R]
    recv_src_idx: torch.Tensor = field(repr=False)  # i32[N]: token number at its source, by received row

    @property
    def num_recv_tokens_per_expert_aligned(self) -> list[int]:
        """What `dispatch` returned: each count rounded up to `expert_alignment`."""
        alignment = self.expert_alignment
        return [-(-count // alignment) * alignment for count in self.num_recv_tokens_per_expert]

    @property
    def num_rows(self) -> int:
        """Rows of the tensors that the dispatch returned, and of the input of a combine."""
        return self.num_worst_tokens or self.num_recv_tokens

    @cached_property
    def real_counts(self) -> list[int] | torch.Tensor:
        """Rows per local expert before `expert_alignment`, of the kind that the dispatch returned: int32 [E_l] with `num_worst_tokens`."""
        counts = list(self.num_recv_tokens_per_expert)
        return torch.tensor(counts, dtype=torch.int32) if self.num_worst_tokens else counts

    @property
    def returned_counts(self) -> list[int] | torch.Tensor:
        """Rows per local expert as the dispatch returns them: rounded up to `expert_alignment`."""
        counts = self.num_recv_tokens_per_expert_aligned
        return torch.tensor(counts, dtype=torch.int32) if self.num_worst_tokens else counts

    @cached_property
    def num_tokens_matrix(self) -> torch.Tensor:
        """i32[R, R]: rows from source (first index) to destination (second)."""
        ranks = len(self.node_of)
        return torch.tensor(self.native.matrix, dtype=torch.int32).view(ranks, ranks)

    @cached_property
    def rank_prefix_matrix(self) -> torch.Tensor:
        """i32[R, R], [source, destination]: where the rows of that source end at that destination."""
        return torch.cumsum(self.num_tokens_matrix, dim=0, dtype=torch.int32)

    @cached_property
    def recv_gbl_rank_prefix_sum(self) -> torch.Tensor:
        """i32[R]: where the rows of each source end here."""
        return self.rank_prefix_matrix[:, self.rank].contiguous()

    @cached_property
    def recv_rdma_rank_prefix_sum(self) -> torch.Tensor:
        """i32[RR]: where the rows of each node end here, as if ordered by node."""
        nodes = max(self.node_of) + 1
        rows = torch.zeros(nodes, dtype=torch.int32)
        rows.index_add_(0, torch.tensor(self.node_of), self.num_tokens_matrix[:, self.rank])
        return torch.cumsum(rows, dim=0, dtype=torch.int32)

    @cached_property
    def _entries(self) -> tuple[torch.Tensor | None, ...]:
        if max(self.node_of) == 0:
            return (self.rank_prefix_matrix, None, None, self.recv_src_idx, self.is_token_in_rank, None)
        by_node, by_rank = self.recv_rdma_rank_prefix_sum, self.recv_gbl_rank_prefix_sum
        return (self.is_token_in_rank, None, None, None, by_node, None, by_rank, None, None, None)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self._entries[index]

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self._entries)
