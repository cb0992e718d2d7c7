"""What a dispatch leaves for its combine, and for later dispatches with the same routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from expertwire.ep.plan import Nodes

if TYPE_CHECKING:
    from expertwire.fabric.native import ExchangeHandle


@dataclass(frozen=True)
class Identity:
    """Names a Buffer, between two calls of shrink or reset, in its handles, which thus keep nothing of it alive."""

    number: int
    rank: int
    shrinks: int = 0
    resets: int = 0

    def __repr__(self) -> str:
        after = [f" after {what} {count}" for what, count in (("shrink", self.shrinks), ("reset", self.resets)) if count]
        return f"<Buffer {self.number} of rank {self.rank}{''.join(after)}>"


@dataclass(frozen=True, eq=False)
class Handle:
    """Routing of one dispatch. Belongs to the `Buffer` that made it, and stays valid until that is destroyed.

    Indexes and unpacks like DeepEP's tuples: 6 entries on one node, 10 on several, tokens in one channel. Entries that describe DeepEP's
    queues between nodes have no counterpart here and are None.
    """

    native: ExchangeHandle = field(repr=False)
    buffer: Identity = field(repr=False)  # of the Buffer that made it
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
    sources: Callable[[], torch.Tensor] = field(repr=False)  # gives recv_src_idx

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
        return torch.tensor(counts, dtype=torch.int32, device="cpu") if self.num_worst_tokens else counts

    @property
    def returned_counts(self) -> list[int] | torch.Tensor:
        """Rows per local expert as the dispatch returns them: rounded up to `expert_alignment`."""
        counts = self.num_recv_tokens_per_expert_aligned
        return torch.tensor(counts, dtype=torch.int32, device="cpu") if self.num_worst_tokens else counts

    @cached_property
    def recv_src_idx(self) -> torch.Tensor:
        """i32[N]: token number at its source, by received row."""
        return self.sources()

    @cached_property
    def num_tokens_matrix(self) -> torch.Tensor:
        """i32[R, R]: rows from source (first index) to destination (second)."""
        ranks = len(self.node_of)
        return torch.tensor(self.native.matrix, dtype=torch.int32, device="cpu").view(ranks, ranks)

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
        """i32[RR]: rows that enter this node through this rank, added up over the nodes that they come from; of the own node, its own."""
        nodes = Nodes(self.node_of)
        mine = self.node_of[self.rank]
        rows = [0] * nodes.count
        for source, node in enumerate(self.node_of):
            through = source if node == mine else nodes.entry(source, mine)
            if through == self.rank:
                rows[node] += self.native.node_matrix[source * nodes.count + mine]
        return torch.cumsum(torch.tensor(rows, dtype=torch.int32, device="cpu"), dim=0, dtype=torch.int32)

    @cached_property
    def is_token_in_node(self) -> torch.Tensor:
        """bool[T, RR]: whether a token goes to any rank of the node."""
        nodes = Nodes(self.node_of)
        return torch.stack([self.is_token_in_rank[:, nodes.members(node)].any(1) for node in range(nodes.count)], dim=1)

    @property
    def _entries(self) -> tuple[Callable[[], torch.Tensor] | None, ...]:
        """Where DeepEP cuts the tokens into channels there is one channel here, of all of them."""

        def channel(chosen: torch.Tensor) -> torch.Tensor:
            return chosen.sum(0, dtype=torch.int32).unsqueeze(1)

        if max(self.node_of) == 0:
            return (
                lambda: self.rank_prefix_matrix,
                lambda: channel(self.is_token_in_rank),
                lambda: torch.zeros((len(self.node_of), 1), dtype=torch.int32, device="cpu"),
                lambda: self.recv_src_idx,
                lambda: self.is_token_in_rank,
                lambda: _heads(self.is_token_in_rank),
            )
        return (
            lambda: self.is_token_in_rank,
            lambda: channel(self.is_token_in_node),
            lambda: channel(self.is_token_in_rank),
            None,
            lambda: self.recv_rdma_rank_prefix_sum,
            None,
            lambda: self.recv_gbl_rank_prefix_sum,
            None,
            lambda: _heads(self.is_token_in_node),
            None,
        )

    def __len__(self) -> int:
        return len(self._entries)

    @cached_property
    def _found(self) -> dict[int, torch.Tensor]:
        return {}

    def __getitem__(self, index: int) -> torch.Tensor | None:
        place = range(len(self))[index]
        entry = self._entries[place]
        if entry is None:
            return None
        return self._found[place] if place in self._found else self._found.setdefault(place, entry())

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return (self[place] for place in range(len(self)))


def _heads(chosen: torch.Tensor) -> torch.Tensor:
    """i32 like bool[T, …]: the how many-th of the tokens with the same destination each is, −1 where it does not go there."""
    return torch.where(chosen, chosen.cumsum(0) - 1, -1).to(torch.int32)
