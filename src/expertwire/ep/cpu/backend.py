"""The CPU backend: the native exchange over this rank's three regions, and tensors over what it received."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from expertwire.ep.bootstrap import Launch, Wiring, connect, settings_for
from expertwire.ep.checks import UNSENT, Payload, Routing, Rows
from expertwire.ep.cpu.low_latency import CpuLowLatency
from expertwire.ep.cpu.memory import Memory, address_of, tensor_over
from expertwire.ep.cpu.outputs import Outputs
from expertwire.ep.cpu.pool import Extent, Pool
from expertwire.ep.cpu.sizes import geometry_of, region_sizes
from expertwire.ep.event import in_calling_thread
from expertwire.ep.handle import Handle, Identity
from expertwire.ep.layout import expert_bounds
from expertwire.ep.neighbours import STEP_S
from expertwire.ep.shrink import Survivors
from expertwire.errors import ExcludedError, ExpertwireError, UnavailableError
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import choose_binding, library_candidates

if TYPE_CHECKING:
    from expertwire.fabric.native import Context, DispatchResult, Exchange

LINGER_MS = 1000  # how long a rank that leaves waits for the others to leave too
CLOSE_MS = 2000
RETIRE_MS = 100  # for what is on its way over a context that nobody needs any more; that for a stopped rank never ends
PATIENCE_S = 5.0  # for all neighbours to answer at their doors while a Buffer shrinks: one may be dying


@dataclass(frozen=True)
class _Landed:
    """Where the rows of a dispatch have come to: the extent offered, or, after rounds, memory of their own."""

    offer: Extent
    result: DispatchResult
    spill: torch.Tensor | None


@dataclass(frozen=True)
class Received:
    """What a dispatch without a handle gives."""

    rows: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Handle
    overflows: list[tuple[int, int]]  # ranks that were sent more rows than num_worst_tokens, and how many


def _row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[1] * tensor.element_size()


def _type_name(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _kept(in_rank: torch.Tensor, result: DispatchResult, rank: int) -> torch.Tensor:
    """A copy, without what was left out for want of room in `num_worst_tokens`: of each rank's rows the last."""
    if not result.overflows:
        return in_rank.clone()
    ranks = in_rank.shape[1]
    return in_rank & (in_rank.cumsum(0) <= torch.tensor(result.handle.matrix[rank * ranks : (rank + 1) * ranks], device="cpu"))


def context_options(settings: Settings, hosts: int) -> dict[str, object]:
    """The settings as the core takes them."""
    options: dict[str, object] = {
        "provider": settings.provider,
        "max_outstanding": settings.max_outstanding,
        "timeout_ms": settings.timeout_ms,
        "hard_timeout_ms": settings.hard_timeout(),
        "sync_writes": settings.sync_writes,
        "liveness": settings.liveness,
        **settings.provider_settings(),
    }
    if settings.provider != "local":
        options["libraries"] = library_candidates(settings)
        options["source_address"], options["domain"] = choose_binding(settings, settings.provider, hosts)
        options["signal_path"] = settings.signal_path
    return options


def _release(context: Context, pid: int) -> None:
    if os.getpid() == pid:  # a forked child closes nothing of its parent's
        context.close(CLOSE_MS)


class CpuBackend:
    """One rank's exchange on CPU tensors. Arguments come checked; calls come one at a time."""

    low_latency: CpuLowLatency | None = None
    _again: Callable[..., CpuBackend]  # `open` with the same settings
    device = torch.device("cpu")
    comm_stream = None
    ordered = staticmethod(in_calling_thread)

    def __init__(self, launch: Launch, wiring: Wiring, exchange: Exchange, settings: Settings) -> None:
        context = wiring.context
        self.rank = launch.rank
        self.node_of = wiring.node_of
        self.provider = wiring.provider
        self.timeout_ms = settings.timeout_ms
        self._survivors = Survivors(context, launch.rank, wiring.processes, ends_are_known=settings.liveness != "heartbeat")
        self._context = context
        self._exchange = exchange
        region = context.region("data")
        self.data_bytes: int = context.region_bytes(region)
        self._pool = Pool(context.region_address(region), self.data_bytes, context)
        self._outputs = Outputs()
        # Also at the interpreter's exit, while threads still run.
        self._finalizer = weakref.finalize(self, _release, context, os.getpid())

    @classmethod
    def open(
        cls,
        launch: Launch,
        *,
        data_bytes: int,
        staging_bytes_max: int,
        local_experts_max: int,
        node_of: Sequence[object] | None,
        provider: str | None,
        timeout_ms: int | None,
        sync_writes: bool | None = None,
        low_latency: bool = False,
        shrink: bool = False,
        patience_s: float = STEP_S,
    ) -> CpuBackend:
        """Build this rank's part and wire it to the others. Collective.

        With `low_latency`, `staging_bytes_max` is for that mode alone, in a region of its own. The rings of the other mode have their
        default size then; without `data_bytes`, which says that it is not wanted, it gets as good as nothing.
        """
        from expertwire.fabric.native import Context, Exchange

        settings = settings_for(provider, timeout_ms, sync_writes)

        def sizes(nodes: tuple[int, ...]) -> dict[str, int]:
            return region_sizes(
                launch.rank,
                nodes,
                data_bytes=data_bytes,
                rdma_bytes=staging_bytes_max,
                local_experts_max=local_experts_max,
                low_latency=low_latency,
            )

        def build(nodes: tuple[int, ...], chosen: Settings, hosts: int) -> Context:
            context = Context(launch.rank, launch.size, context_options(chosen, hosts))
            for name, count in sizes(nodes).items():
                context.create_region(name, count)
            return context

        facts = {
            "device": "cpu",
            "max_local_experts": str(local_experts_max),
            "num_rdma_bytes": str(staging_bytes_max),
            "low_latency_mode": str(low_latency),
            "enable_shrink": str(shrink),
        }
        wiring = connect(launch, settings, node_of, facts, build, lambda nodes: sum(sizes(nodes).values()), patience_s)
        slots, slot_bytes = geometry_of(
            wiring.node_of,
            data_bytes=data_bytes,
            rdma_bytes=staging_bytes_max,
            local_experts_max=local_experts_max,
            low_latency=low_latency,
        )
        exchange = Exchange(wiring.context, list(wiring.node_of), local_experts_max, slots, slot_bytes)
        backend = cls(launch, wiring, exchange, settings)
        backend._again = functools.partial(
            cls.open,
            data_bytes=data_bytes,
            staging_bytes_max=staging_bytes_max,
            local_experts_max=local_experts_max,
            provider=wiring.provider,
            timeout_ms=timeout_ms,
            sync_writes=sync_writes,
            low_latency=low_latency,
            shrink=shrink,
            patience_s=PATIENCE_S,
        )
        if low_latency:
            backend.low_latency = CpuLowLatency(
                wiring.context, launch.rank, wiring.node_of, local_experts_max, shrink, settings.timeout_ms, backend._outputs
            )
        return backend

    def statistics(self) -> dict[str, int]:
        """Counters of the transport, a snapshot."""
        return dict(self._context.statistics())

    def check(self) -> None:
        """Nothing: a call has told everything when it returns."""

    def reset(self, _timeout_ms: int) -> None:
        """Raises `UnavailableError`."""
        raise UnavailableError(f"rank {self.rank}: reset is for CUDA tensors; on CPU tensors shrink the Buffer, on every rank that is left")

    def layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows per rank i32[R], distinct rows per node i32[RR], rows per expert i32[E], token in rank bool[T, R]."""
        tokens, topk = topk_idx.shape
        ranks = len(self.node_of)
        per_rank = torch.empty(ranks, dtype=torch.int32, device="cpu")
        per_node = torch.empty(max(self.node_of) + 1, dtype=torch.int32, device="cpu")
        per_expert = torch.empty(num_experts, dtype=torch.int32, device="cpu")
        in_rank = torch.empty((tokens, ranks), dtype=torch.bool, device="cpu")
        self._exchange.layout_counts(
            address_of(topk_idx),
            topk_idx.element_size(),
            tokens,
            topk,
            num_experts,
            expert_bounds(num_experts, ranks),
            list(self.node_of),
            address_of(per_rank),
            address_of(per_node),
            address_of(per_expert),
            address_of(in_rank),
        )
        return per_rank, per_node, per_expert, in_rank

    def dispatch(self, sent: Payload, routing: Routing, expert_alignment: int, identity: Identity) -> Received:
        """Send rows by the routing given."""
        topk = 0 if routing.topk_idx is None else routing.topk_idx.shape[1]
        landed = self._exchange_rows(sent, routing, None)
        result = landed.result
        # A copy: the handle shall not keep the rows' memory alive.
        src_idx = result.layout["src_idx"], torch.int32, (result.received,)
        sources = tensor_over(self._pool.whole if landed.spill is None else landed.spill, *src_idx).clone()
        handle = Handle(
            native=result.handle,
            buffer=identity,
            rank=self.rank,
            node_of=self.node_of,
            num_experts=routing.num_experts,
            num_tokens=sent.x.shape[0],
            num_recv_tokens=result.received,
            num_worst_tokens=routing.num_worst_tokens,
            num_topk=topk,
            expert_alignment=expert_alignment,
            num_recv_tokens_per_expert=tuple(result.expert_counts),
            is_token_in_rank=_kept(routing.in_rank, result, self.rank),
            sources=lambda: sources,
        )
        row_bytes = sent.x.shape[1] * torch.bfloat16.itemsize  # a combine's
        self._pool.reserve_for(handle, self._exchange.extent_bytes("combine", result.received, row_bytes, topk, 8, topk > 0))
        rows, topk_idx, topk_weights = self._results(landed, sent, routing, handle.num_rows)
        return Received(rows, topk_idx, topk_weights, handle, result.overflows)

    def dispatch_again(self, sent: Payload, handle: Handle) -> Rows:
        """Send rows by the routing of an earlier dispatch."""
        return self._results(self._exchange_rows(sent, None, handle), sent, None, handle.num_rows)[0]

    def combine(
        self, x: torch.Tensor, handle: Handle, weights: torch.Tensor | None, biases: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back, summed."""
        out = self._outputs.empty((handle.num_tokens, x.shape[1]), x.dtype)
        topk = 0 if weights is None else weights.shape[1]
        out_weights = None if weights is None else torch.empty((handle.num_tokens, topk), dtype=torch.float32, device="cpu")
        offer = self._pool.offer()
        try:
            x, *added = (self._pool.apart(one, offer) for one in (x, *biases))
            weights = None if weights is None else self._pool.apart(weights, offer)
            bias_addresses = [*(address_of(bias) for bias in added), 0, 0]
            self._exchange.combine(
                address_of(x),
                handle.num_recv_tokens,
                _row_bytes(x),
                address_of(weights),
                topk,
                bias_addresses[0],
                bias_addresses[1],
                address_of(out),
                address_of(out_weights),
                handle.native,
                offer.offset,
                offer.length,
                self.timeout_ms,
            )
        finally:
            # Whatever failed, nobody writes to a combine's extent but this rank.
            self._pool.withdraw(offer)
        return out, out_weights

    def data_tensor(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """The data region from byte `offset`, as it is."""
        length = math.prod(shape) * dtype.itemsize
        return tensor_over(self._pool.memory(Extent(offset, length)), 0, dtype, shape)

    def shrink(self, timeout_ms: int) -> tuple[tuple[int, ...], CpuBackend]:
        """The ranks that are left, ascending, and the backend among them, for which this one has been closed. Collective among them."""

        def make(launch: Launch, members: tuple[int, ...]) -> CpuBackend:
            nodes = [self.node_of[member] for member in members]
            kept = sorted(set(nodes))  # in the same order, which is that of sums
            return self._again(launch, node_of=[kept.index(node) for node in nodes])

        members, made = self._survivors.shrink(make, timeout_ms)
        self._context.close(RETIRE_MS)
        self._finalizer()
        return members, made

    def excluded(self) -> ExcludedError | None:
        """Whether the others have gone on without this rank, as far as it was told."""
        return None if self._context.closed else self._survivors.excluded()

    def close(self, *, linger: bool) -> None:
        """Tell the others that this rank leaves, and release everything but the memory under tensors that live. Without `linger`, as after
        a failure, nothing is waited for: what is on its way is of no use to anybody."""
        try:
            if linger and self._finalizer.alive:
                self._context.barrier(min(self.timeout_ms, LINGER_MS))
        except ExpertwireError:
            pass  # the others leave later, in another order, or are dead: nothing here depends on them any more
        finally:
            if not linger and self._finalizer.alive:
                self._context.close(RETIRE_MS)
            self._finalizer()

    def _exchange_rows(self, sent: Payload, routing: Routing | None, handle: Handle | None) -> _Landed:
        topk_idx = None if routing is None else routing.topk_idx
        spills: list[torch.Tensor] = []

        def allocate(length: int) -> int:
            spills.append(self._outputs.empty((length,), torch.uint8))
            return spills[0].data_ptr()

        offer = self._pool.offer()
        x = self._pool.apart(sent.x, offer)
        scales = None if sent.scales is None else self._pool.apart(sent.scales, offer)
        weights = None if routing is None or routing.topk_weights is None else self._pool.apart(routing.topk_weights, offer)
        topk_idx = None if topk_idx is None else self._pool.apart(topk_idx, offer)
        try:
            result = self._exchange.dispatch(
                address_of(x),
                sent.x.shape[0],
                _row_bytes(sent.x),
                _type_name(sent.x),
                address_of(scales),
                _row_bytes(sent.scales),
                _type_name(sent.scales),
                0 if routing is None else address_of(routing.in_rank),
                address_of(topk_idx),
                8 if topk_idx is None else topk_idx.element_size(),
                0 if topk_idx is None else topk_idx.shape[1],
                address_of(weights),
                0 if routing is None else address_of(routing.per_rank),
                0 if routing is None else address_of(routing.per_node),
                0 if routing is None else address_of(routing.per_expert),
                0 if routing is None else routing.num_experts,
                [] if routing is None else routing.bounds,
                0 if routing is None else routing.num_worst_tokens,
                None if handle is None else handle.native,
                offer.offset,
                offer.length,
                allocate,
                self.timeout_ms,
            )
        except UNSENT:
            self._pool.withdraw(offer)  # after any other failure it stays taken: rows may still arrive in it
            raise
        return _Landed(offer, result, spills[0] if spills else None)

    def _results(
        self, landed: _Landed, sent: Payload, routing: Routing | None, count: int
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None]:
        """Rows, ids and weights received: views of the data region, copies where a view would eat into the reserve, or, after rounds, views
        of memory of their own."""
        offer, layout, used_bytes = landed.offer, landed.result.layout, landed.result.used_bytes
        memory: Memory | None = landed.spill
        if memory is None and count:
            memory = self._pool.keep(offer, used_bytes)
        source = memory if memory is not None else self._pool.memory(Extent(offer.offset, used_bytes))
        first = 0 if landed.spill is not None else offer.offset

        def tensor(name: str, dtype: torch.dtype, width: int) -> torch.Tensor:
            found = tensor_over(source, layout[name] - first, dtype, (count, width))
            return found if memory is not None else self._outputs.empty(found.shape, dtype).copy_(found)

        x = tensor("x", sent.x.dtype, sent.x.shape[1])
        rows: Rows = x if sent.scales is None else (x, tensor("scales", sent.scales.dtype, sent.scales.shape[1]))
        topk_idx = topk_weights = None
        if routing is not None and routing.topk_idx is not None:
            topk_idx = tensor("topk_idx", routing.topk_idx.dtype, routing.topk_idx.shape[1])
        if routing is not None and routing.topk_weights is not None:
            topk_weights = tensor("topk_weights", torch.float32, routing.topk_weights.shape[1])
        if memory is None or landed.spill is not None:
            self._pool.withdraw(offer)
        return rows, topk_idx, topk_weights
