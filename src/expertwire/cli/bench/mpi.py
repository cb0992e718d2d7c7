"""The same exchange with the same packing as gloo.py, moved by `MPI_Alltoallv`. Its ranks are started by cli/mpi.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from expertwire.cli.bench.arms import GlooArm
from expertwire.cli.bench.gloo import GlooExchange
from expertwire.cli.mpi import node_map
from expertwire.ep.layout import expert_bounds
from expertwire.errors import UnavailableError


class MpiExchange(GlooExchange):
    """`GlooExchange` over MPI's world, whose ranks have the numbers of the default group."""

    def _swap(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Alltoall([sent.numpy(), MPI.INT64_T], [received.numpy(), MPI.INT64_T])

    def _move(self, received: torch.Tensor, sent: torch.Tensor, receive_counts: list[int], send_counts: list[int]) -> None:
        from mpi4py import MPI

        row_bytes = sent.shape[1] * sent.element_size()

        def message(rows: torch.Tensor, counts: list[int]) -> list[Any]:
            sizes = [count * row_bytes for count in counts]
            begins = [0, *itertools.accumulate(sizes[:-1])]
            return [rows.view(torch.uint8).numpy(), (sizes, begins), MPI.BYTE]

        MPI.COMM_WORLD.Alltoallv(message(sent.contiguous(), send_counts), message(received, receive_counts))


class MpiArm(GlooArm):
    """The exchange as users write it with MPI (MPICH), whose nodes are the caller's. Its layout is part of its dispatch."""

    name = "mpi"

    def __init__(self, node_of: tuple[int, ...], experts: int) -> None:
        from mpi4py import MPI

        super().__init__(len(node_of), experts)
        world, found = MPI.COMM_WORLD, node_map()
        if (world.rank, world.size) != (dist.get_rank(), dist.get_world_size()):
            raise UnavailableError(f"MPI calls this rank {world.rank} of {world.size}, not {dist.get_rank()} of {dist.get_world_size()}")
        if found != [node_of.index(node) for node in node_of]:
            raise UnavailableError(
                f"the nodes of MPI are {found} (first rank of each rank's node), which are not the nodes {list(node_of)}: "
                "only MPICH can be told (MPIR_CVAR_NUM_CLIQUES), and only nodes of one size"
            )
        self.exchange = MpiExchange(None, torch.tensor(expert_bounds(experts, len(node_of))))
        version = " ".join(MPI.Get_library_version().split()[:3])
        self.provider = f"{version}, nodes by their first ranks {','.join(map(str, found))}"
