"""What a dispatch of CUDA tensors leaves: as `Handle`, with its counts on the device where the host has not waited for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from expertwire.ep.cuda.exchange import Route
from expertwire.ep.handle import Handle
from expertwire.ep.kernels.words import ROUTING


@dataclass(frozen=True, eq=False)
class CudaHandle(Handle):
    """With `num_worst_tokens` = W the host knows no count: `num_recv_tokens` is W, the counts are tensors, and nothing here waits but what
    is asked for as Python numbers."""

    route: Route = field(repr=False, kw_only=True)

    @cached_property
    def num_tokens_matrix(self) -> torch.Tensor:
        """i32[R, R]: rows from source (first index) to destination (second)."""
        ranks = len(self.node_of)
        first = ROUTING.value
        return self.route.owner[first : first + ranks * ranks].view(ranks, ranks).int()

    @cached_property
    def real_counts(self) -> list[int] | torch.Tensor:
        """Rows per local expert before `expert_alignment`, of the kind that the dispatch returned."""
        return self.route.counted(real=True) if self.route.counts else list(self.num_recv_tokens_per_expert)

    @property
    def returned_counts(self) -> list[int] | torch.Tensor:
        """Rows per local expert as the dispatch returns them: rounded up to `expert_alignment`."""
        return self.route.counted(real=False) if self.route.counts else self.num_recv_tokens_per_expert_aligned
