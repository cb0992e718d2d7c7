"""The engines that a bench compares, behind one face: dispatch rows, combine rows, say how long each took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from expertwire.cli.bench.ep import ORDINARY, RECEIVED
from expertwire.cli.bench.gloo import GlooExchange, GlooPlan
from expertwire.ep import Buffer, Config
from expertwire.ep.layout import expert_bounds

if TYPE_CHECKING:
    from expertwire.cli.bench.ep import Setup
    from expertwire.ep.handle import Handle


Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # bf16, or e4m3 with scales


@dataclass(frozen=True)
class Received:
    """What a dispatch gave: rows bf16 or e4m3 [N, H], local expert ids [N, K] (−1 elsewhere), weights f32 [N, K], scales of e4m3 rows."""

    rows: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    scales: torch.Tensor | None = None


class Arm(Protocol):
    """One engine. Times are seconds of the last call on this rank, by phase."""

    name: str
    provider: str  # what carries rows between nodes
    combine_inputs: tuple[str, ...]  # where combine's rows are put: each is measured
    seconds: dict[str, float]

    def wire_operations(self) -> int:
        """Writes and signals that this rank has given its provider so far."""
        ...

    def dispatch(self, x: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor, worst: int = 0) -> Received:
        """Send each row to the ranks of its experts; `worst`: as `num_worst_tokens`, where there is such a thing. Collective."""
        ...

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Bring the rows of the last dispatch home, summed per token: bf16 [T, H]. Collective."""
        ...

    def close(self) -> None:
        """Release everything. Collective."""
        ...


class OursArm:
    """`expertwire.ep.Buffer`, called as a user calls it; `dispatch` and `layout` are timed apart."""

    def __init__(self, setup: Setup, received_max: int, *, sync: bool | None = None, name: str = "") -> None:
        rank, node_of, experts = dist.get_rank(), setup.node_of, setup.experts
        self.name = name or ("sync" if sync else "expertwire")
        # Sums cannot be written over FP8 rows.
        self.combine_inputs: tuple[str, ...] = (RECEIVED, ORDINARY) if setup.dtype == "bf16" else (ORDINARY,)
        if setup.sms is not None:
            Buffer.set_num_sms(setup.sms)
        self.dispatch_config = Config(Buffer.num_sms, *setup.dispatch_config) if setup.dispatch_config else None
        self.combine_config = Config(Buffer.num_sms, *setup.combine_config) if setup.combine_config else None
        local_experts_max = max(1, -(-experts // len(node_of)))
        plan = Buffer.memory_plan(
            node_of, num_max_recv_tokens=received_max, hidden=setup.hidden, num_topk=setup.topk, max_local_experts=local_experts_max
        )
        self.experts = experts
        self.seconds: dict[str, float] = {}
        self.buffer = Buffer(
            dist.group.WORLD,
            num_nvl_bytes=plan[rank].data_bytes,
            explicitly_destroy=True,
            node_of=node_of,
            provider=setup.provider,
            max_local_experts=local_experts_max,
            sync_writes=sync,
        )
        self.provider = self.buffer.provider
        self.handle: Handle | None = None

    def wire_operations(self) -> int:
        """See `Arm`."""
        return self.buffer.statistics()["provider_posted"]

    def dispatch(self, x: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor, worst: int = 0) -> Received:
        """See `Arm`."""
        begin = time.perf_counter()
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.experts)
        middle = time.perf_counter()
        came, ids, weights, _, handle, _ = self.buffer.dispatch(
            cast(torch.Tensor, x),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_worst_tokens=worst,
            config=self.dispatch_config,
        )
        self.seconds["layout"], self.seconds["dispatch"] = middle - begin, time.perf_counter() - middle
        assert ids is not None
        assert weights is not None
        self.handle = handle
        rows, scales = came if isinstance(x, tuple) else (came, None)
        return Received(rows, ids, weights, scales)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """See `Arm`."""
        assert self.handle is not None
        begin = time.perf_counter()
        combined, _, _ = self.buffer.combine(y, self.handle, config=self.combine_config)
        self.seconds["combine"] = time.perf_counter() - begin
        return combined

    def close(self) -> None:
        """See `Arm`."""
        self.handle = None
        self.buffer.destroy()


class GlooArm:
    """The exchange as users write it with gloo (gloo.py). Its layout is part of its dispatch."""

    name = "gloo"
    combine_inputs: tuple[str, ...] = (ORDINARY,)

    def __init__(self, ranks: int, experts: int) -> None:
        self.provider = "gloo"
        self.exchange = GlooExchange(None, torch.tensor(expert_bounds(experts, ranks)))
        self.seconds: dict[str, float] = {}
        self.plan: GlooPlan | None = None
        self.tokens = 0

    def wire_operations(self) -> int:
        """See `Arm`. Nobody counts them here."""
        return 0

    def dispatch(self, x: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor, worst: int = 0) -> Received:
        """See `Arm`. Of bf16 rows alone."""
        assert isinstance(x, torch.Tensor)
        rows, ids, weights, self.plan = self.exchange.dispatch(x, topk_idx, topk_weights)
        self.tokens = x.shape[0]
        times = self.exchange.times
        self.seconds.update(layout=0.0, dispatch=times.dispatch, dispatch_exchange=times.dispatch_exchange)
        return Received(rows, ids, weights)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """See `Arm`."""
        assert self.plan is not None
        combined = self.exchange.combine(y, self.plan, self.tokens)
        times = self.exchange.times
        self.seconds.update(combine=times.combine, combine_exchange=times.combine_exchange)
        return combined

    def close(self) -> None:
        """See `Arm`."""


def make_arms(setup: Setup, received: int) -> list[Arm]:
    """The engines of one run, on this rank, which receives so many rows. Collective."""
    most = torch.tensor(max(1, received))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    arms: list[Arm] = [OursArm(setup, int(most), sync=False if "sync" in setup.against else None)]
    if "sync" in setup.against:
        arms.append(OursArm(setup, int(most), sync=True))
    if "gloo" in setup.against:
        arms.append(GlooArm(setup.ranks, setup.experts))
    if "mpi" in setup.against:
        from expertwire.cli.bench.mpi import MpiArm

        arms.append(MpiArm(setup.node_of, setup.experts))
    return arms
