"""The CUDA backend: operations on a GPU's tensors among the ranks of one node, over memory that they map by CUDA IPC."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from expertwire.ep.bootstrap import Launch, connect, settings_for, together
from expertwire.ep.checks import Payload, Routing, Rows
from expertwire.ep.config import Config, align_up
from expertwire.ep.cpu.backend import LINGER_MS, Received, context_options
from expertwire.ep.cpu.pool import Extent
from expertwire.ep.cpu.sizes import DATA_BYTES
from expertwire.ep.cuda import failures
from expertwire.ep.cuda.exchange import Exchange, Route, control_bytes, row_bytes, tuning_of
from expertwire.ep.cuda.handle import CudaHandle
from expertwire.ep.cuda.launches import ALIGNMENT_BYTES, dense, next_power
from expertwire.ep.cuda.low_latency import CudaLowLatency
from expertwire.ep.cuda.low_latency_exchange import PER_BYTE, LowLatencyExchange, low_latency_control_bytes
from expertwire.ep.cuda.pool import DevicePool
from expertwire.ep.cuda.streams import CommStream
from expertwire.ep.cuda.symmetric import DeviceBytes, Symmetric, allocate, device_tensor
from expertwire.ep.event import EventOverlap, Order
from expertwire.ep.handle import Handle, Identity
from expertwire.ep.kernels import notify
from expertwire.ep.plan import combine_extent, dispatch_extent
from expertwire.errors import DeadlineError, ExpertwireError, InvalidArgumentError, StateError, UnavailableError

if TYPE_CHECKING:
    from expertwire.fabric.native import ExchangeHandle

_CONTROL_FLOOR_BYTES = 4096


def shared_device(rank: int, uuids: Sequence[str], share: bool) -> None:
    """Raises `InvalidArgumentError` where two ranks are on one GPU without having asked for it."""
    for place, uuid in enumerate(uuids):
        other = uuids.index(uuid)
        if other != place and not share:
            raise InvalidArgumentError(
                f"rank {rank}: ranks {other} and {place} are both on the GPU {uuid}; call torch.cuda.set_device with another GPU for each "
                "before making the Buffer, or set EXPERTWIRE_SHARE_DEVICE=1 if they are meant to share it (under MPS)"
            )


def local_device() -> tuple[torch.device, str]:
    """The caller's current GPU, by number here and by name everywhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    return device, str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class _Landing:
    """Where a dispatch's rows come to."""

    extent: Extent
    captured: bool


class CudaBackend:
    """One rank's exchange on CUDA tensors. Arguments come checked; calls come one at a time."""

    low_latency: CudaLowLatency | None = None
    provider = "cuda-ipc"

    def __init__(
        self,
        context: Any,
        exchange: Exchange,
        data: Symmetric,
        low: LowLatencyExchange | None,
        node_of: tuple[int, ...],
        timeout_ms: int,
        sharing: int,
    ) -> None:
        """sharing: ranks on this GPU."""
        self.rank, self.node_of, self.timeout_ms = exchange.rank, node_of, timeout_ms
        self.device = data.device
        self.data_bytes = data.length
        self._context, self._exchange, self._data = context, exchange, data
        self._comm = CommStream(self.device)
        self._sharing = sharing
        self._pool = DevicePool(data.length, self._comm.mark)
        self._order = Order()  # of the call that runs now
        if low is not None:
            self.low_latency = CudaLowLatency(low, exchange.local_experts_max, self._comm.capturing)
        self._closed = False
        self._resets = 0
        self._finalizer = weakref.finalize(self, _release, context, exchange)

    @classmethod
    def open(
        cls,
        launch: Launch,
        *,
        data_bytes: int,
        local_experts_max: int,
        node_of: Sequence[object] | None,
        timeout_ms: int | None,
        low_latency_bytes: int = 0,
        shrink: bool = False,
    ) -> CudaBackend:
        """Allocate this rank's part on the caller's current device and map the others'. Collective."""
        from expertwire.fabric.native import Context

        settings = settings_for("", timeout_ms, None)
        device, uuid = local_device()
        region_bytes = align_up(data_bytes or (1 if low_latency_bytes else DATA_BYTES), 2 << 20)

        def build(_nodes: tuple[int, ...], chosen: Any, hosts: int) -> Any:
            context = Context(launch.rank, launch.size, context_options(chosen, hosts))
            context.create_region("control", _CONTROL_FLOOR_BYTES)
            return context

        sizes = {"num_nvl_bytes": str(data_bytes), "low-latency bytes": str(low_latency_bytes)}
        facts = {"device": "cuda", "max_local_experts": str(local_experts_max), "enable_shrink": str(shrink), **sizes}
        wiring = connect(launch, settings, node_of, facts, build, lambda _: _CONTROL_FLOOR_BYTES)
        try:
            uuids = together(launch, lambda: uuid)
            shared_device(launch.rank, uuids, settings.share_device)
            if max(wiring.node_of):
                raise UnavailableError(f"ranks are on {max(wiring.node_of) + 1} nodes; CUDA tensors are exchanged within one node so far")
            control = allocate(launch, control_bytes(launch.size, local_experts_max), device)
            data = allocate(launch, region_bytes, device)
            low = None
            if low_latency_bytes:
                words = allocate(launch, low_latency_control_bytes(launch.size, local_experts_max), device)
                rows = allocate(launch, align_up(PER_BYTE * low_latency_bytes, 2 << 20), device)
                low = LowLatencyExchange(words, rows, local_experts_max, settings.timeout_ms, shrink)
        except BaseException:
            wiring.context.close(0)
            raise
        exchange = Exchange(control, data, local_experts_max, settings.timeout_ms)
        return cls(wiring.context, exchange, data, low, wiring.node_of, settings.timeout_ms, uuids.count(uuid))

    def statistics(self) -> dict[str, int]:
        """Counters, a snapshot."""
        return {"graph_bytes": self._pool.graph_bytes, "free_bytes": self._pool.free_bytes}

    @contextmanager
    def ordered(self, previous_event: EventOverlap | None, async_finish: bool, sms: int = Config.num_sms) -> Iterator[Order]:
        """One call's place among the streams; the block runs with the stream current that it is to launch on."""
        self._exchange.tuning = tuning_of(sms, self._sharing)
        with self._comm.ordered(previous_event, async_finish) as self._order:
            yield self._order

    @property
    def comm_stream(self) -> torch.cuda.Stream:
        """The stream that operations run on."""
        return self._comm.stream

    def check(self) -> None:
        """Raise what kernels have reported since the last call: a deadline that has passed, ranks that disagreed, rows left out."""
        failures.raise_recorded(self._exchange.record, self.rank)
        if self.low_latency is not None:
            self.low_latency.check()

    # ---- operations

    def layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows per rank i32[R], distinct rows per node i32[1], rows per expert i32[E], token in rank bool[T, R]."""
        self.check()
        topk_idx = dense(topk_idx)
        key = "layout", topk_idx.shape[1], topk_idx.dtype, next_power(num_experts + 1)
        self._load(key, lambda: self._exchange.layout(topk_idx.new_empty((1, topk_idx.shape[1])), num_experts))
        per_rank, per_expert, in_rank = self._exchange.layout(topk_idx, num_experts)
        self._order.keep(topk_idx)
        self._order.give(per_rank, per_expert, in_rank)
        return per_rank, per_rank[:0], per_expert, in_rank

    def dispatch(self, sent: Payload, routing: Routing, expert_alignment: int, identity: Identity) -> Received:
        """Send rows by the routing given."""
        self.check()
        sent, routing = Payload(dense(sent.x), sent.scales), _dense_routing(routing)
        worst = routing.num_worst_tokens
        if self._comm.capturing() and not worst:
            raise StateError(
                "dispatch without num_worst_tokens cannot be recorded into a graph: the host waits for the counts that it returns; "
                "give num_worst_tokens, or handle"
            )
        topk = 0 if routing.topk_idx is None else routing.topk_idx.shape[1]
        index_bytes = 8 if routing.topk_idx is None else routing.topk_idx.element_size()
        has_weights = routing.topk_weights is not None

        beside = topk, index_bytes, has_weights, row_bytes(sent.scales)
        at = dispatch_extent(worst, row_bytes(sent.x), *beside)

        def launch(offer: tuple[int, int], notified: torch.cuda.Event | None) -> tuple[Route, torch.Tensor | None]:
            parts = sent.x, sent.scales, routing.in_rank, routing.per_expert, routing.topk_idx, routing.topk_weights
            ids = offer[0] + at.topk_idx if worst and at.total <= offer[1] else -1
            return self._exchange.dispatch(*parts, offer, worst, expert_alignment, notified, ids)

        step = next_power(-(-routing.num_experts // len(self.node_of)))
        self._load(("dispatch", row_bytes(sent.x), *beside, step), lambda: launch((0, 0), None))
        landing = self._land(at.total)
        try:
            notified = None if worst else self._comm.point()
            route, mailbox = launch((landing.extent.offset, landing.extent.length), notified)
            counts: list[int] = []
            rows = worst
            if notified is not None and mailbox is not None:
                notified.synchronize()
                self.check()
                box = mailbox.tolist()
                failures.raise_status(box[:4], self.rank, "dispatch")
                rows, counts = box[notify.MAILBOX_TOTAL], box[notify.MAILBOX : notify.MAILBOX + self._local_experts(routing.num_experts)]
        except BaseException:
            self._withdraw(landing)  # on this stream nobody writes to it any more: what peers wrote has its end in the kernel
            raise
        self._order.keep(sent.x, sent.scales, routing.in_rank, routing.per_expert, routing.topk_idx, routing.topk_weights)
        if not worst:
            at = dispatch_extent(rows, row_bytes(sent.x), *beside)
        memory, whole = self._settle(landing, at.total)
        self._order.give(route.owner, whole)
        handle = CudaHandle(
            native=cast("ExchangeHandle", None),  # the CPU's
            buffer=identity,
            rank=self.rank,
            node_of=self.node_of,
            num_experts=routing.num_experts,
            num_tokens=sent.x.shape[0],
            num_recv_tokens=rows,
            num_worst_tokens=worst,
            num_topk=topk,
            expert_alignment=expert_alignment,
            num_recv_tokens_per_expert=tuple(counts),
            is_token_in_rank=routing.in_rank,
            sources=_Sources(weakref.ref(memory), at.src_idx, rows, self.device),
            route=route,
        )
        self._pool.reserve_for(handle, combine_extent(rows, 2 * sent.x.shape[1], topk, topk > 0).total)
        ids = weights = None
        if routing.topk_idx is not None:
            ids = device_tensor(whole, routing.topk_idx.dtype, (rows, topk), at.topk_idx)
        if has_weights:
            weights = device_tensor(whole, torch.float32, (rows, topk), at.topk_weights)
        return Received(self._rows(whole, sent, rows, at.rows, at.scales), ids, weights, handle, [])

    def dispatch_again(self, sent: Payload, handle: Handle) -> Rows:
        """Send rows by the routing of an earlier dispatch. The host waits for nothing: where a rank has no room, every rank's next call
        raises."""
        assert isinstance(handle, CudaHandle)
        self.check()
        sent = Payload(dense(sent.x), sent.scales)
        at = dispatch_extent(handle.num_rows, row_bytes(sent.x), 0, 8, False, row_bytes(sent.scales))

        def launch(offer: tuple[int, int]) -> None:
            self._exchange.dispatch_again(sent.x, sent.scales, handle.route, offer, handle.num_worst_tokens, wait=False)

        self._load(("dispatch again", row_bytes(sent.x), row_bytes(sent.scales)), lambda: launch((0, 0)))
        landing = self._land(at.total if self._comm.capturing() else 0)
        try:
            launch((landing.extent.offset, landing.extent.length))
        except BaseException:
            self._withdraw(landing)
            raise
        self._order.keep(sent.x, sent.scales, handle.route.owner)
        _, whole = self._settle(landing, at.total)
        self._order.give(whole)
        return self._rows(whole, sent, handle.num_rows, at.rows, at.scales)

    def combine(
        self, x: torch.Tensor, handle: Handle, weights: torch.Tensor | None, biases: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows back, summed."""
        assert isinstance(handle, CudaHandle)
        self.check()
        x, weights, biases = dense(x), None if weights is None else dense(weights), [dense(bias) for bias in biases]
        topk = 0 if weights is None else weights.shape[1]
        hidden = x.shape[1]
        out = torch.empty((handle.num_tokens, hidden), dtype=x.dtype, device=self.device)
        out_weights = None if weights is None else torch.empty((handle.num_tokens, topk), dtype=torch.float32, device=self.device)
        x_offset, weights_offset = self._offset_of(x), self._offset_of(weights)

        def stage(to: int, weights_to: int) -> None:
            self._exchange.stage(x, weights, handle.route, to, weights_to, handle.num_rows)

        def launch(x_from: int, weights_from: int) -> None:
            self._exchange.combine(x_from, weights_from, topk, handle.route, tuple(biases), out, out_weights)

        def both() -> None:
            stage(0, 0)
            launch(0, 0)

        self._load(("combine", hidden, topk, len(biases)), both)
        landing = None
        if x_offset is None or weights_offset is None:
            at = combine_extent(handle.num_rows, 2 * hidden, topk, topk > 0)
            landing = self._land(at.total)
            start = landing.extent.offset
            if landing.extent.length < at.total:
                self._withdraw(landing)
                raise failures.no_room("combine", self.rank, at.total, landing.extent.length)
            stage(start + at.rows, start + at.topk_weights)
            x_offset, weights_offset = start + at.rows, start + at.topk_weights
        launch(x_offset, weights_offset)
        if landing is not None:
            self._withdraw(landing)
        self._order.keep(x, weights, handle.route.owner, *biases)
        self._order.give(out, out_weights)
        return out, out_weights

    def data_tensor(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """The data region from byte `offset`, as it is."""
        length = math.prod(shape) * dtype.itemsize
        return device_tensor(self._memory(Extent(offset, length)), dtype, shape)

    def close(self, *, linger: bool) -> None:
        """Tell the others that this rank leaves, and release everything but the memory under tensors that live."""
        if self._closed:
            return
        self._closed = True
        try:
            if linger:
                self._comm.synchronize()  # behind it no peer reads or writes here: an operation ends with everybody's word
                self._context.barrier(min(self.timeout_ms, LINGER_MS))
                self._exchange.close()
                self._context.barrier(min(self.timeout_ms, LINGER_MS))  # nobody has it mapped when its owner frees it
        except ExpertwireError:
            pass  # the others leave later, in another order, or are dead
        finally:
            self._finalizer()
            if self.low_latency is not None:
                self.low_latency.close()
        if linger:
            self.check()

    def reset(self, timeout_ms: int) -> None:
        """Everything as before the first call, but numbers, which go on, and what graphs have. Collective."""
        self._comm.synchronize()  # whoever waits does so until its deadline at most
        answer = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        with self._comm.ordered(None, False):
            for exchange in (self._exchange, *(() if self.low_latency is None else (self.low_latency.exchange,))):
                exchange.renew(self._resets + 1, timeout_ms, answer)
                self._comm.synchronize()
                if missing := int(answer):
                    raise DeadlineError(f"rank {self.rank}: reset: rank {missing - 1} did not come within {timeout_ms} ms: call it again")
        self._resets += 1
        self._exchange.record.zero_()
        if self.low_latency is not None:
            self.low_latency.renewed()

    def shrink(self, timeout_ms: int) -> tuple[tuple[int, ...], CudaBackend]:
        """Raises `UnavailableError`."""
        raise UnavailableError(
            f"rank {self.rank}: shrink is not there for CUDA tensors; destroy the Buffer and make one among the ranks that are left"
        )

    def excluded(self) -> ExpertwireError | None:
        """None: nobody shrinks."""
        return None

    # ---- parts

    def _load(self, shape: tuple[Hashable, ...], launches: Callable[[], object]) -> None:
        self._exchange.launch.load(shape, launches, self._comm.capturing)

    def _local_experts(self, experts: int) -> int:
        ranks = len(self.node_of)
        return experts // ranks + (self.rank < experts % ranks)

    def _land(self, length: int) -> _Landing:
        """Room for what an operation writes here: all that is free, or, for a graph, `length` bytes of its own."""
        if self._comm.capturing():
            return _Landing(self._pool.captured(length), True)
        extent, marks = self._pool.offer()
        for mark in marks:
            self._comm.wait_for(mark)
        return _Landing(extent, False)

    def _withdraw(self, landing: _Landing) -> None:
        if landing.captured:
            self._pool.follow(DeviceBytes(0, 0, self.device, None), landing.extent, (), True)
        else:
            self._pool.withdraw(landing.extent)

    def _memory(self, extent: Extent) -> DeviceBytes:
        return DeviceBytes(self._data.address + extent.offset, extent.length, self.device, self._data)

    def _settle(self, landing: _Landing, used_bytes: int) -> tuple[DeviceBytes | torch.Tensor, torch.Tensor]:
        """The memory of a result, and all of it as bytes: in place, or, where that would eat into the reserve, a copy."""
        if landing.captured:
            memory = self._memory(landing.extent)
            self._pool.follow(memory, landing.extent, (), True)
            return memory, memory.whole()
        if used_bytes > landing.extent.length:  # no row moves, and every rank's next call says so; until then ids are −1
            self._pool.withdraw(landing.extent)
            blank = torch.full((used_bytes,), 255, dtype=torch.uint8, device=self.device)
            return blank, blank
        kept = self._pool.keep(landing.extent, used_bytes)
        if kept is not None:
            memory = self._memory(kept)
            self._pool.follow(memory, kept, (self._comm.caller,), False)
            return memory, memory.whole()
        source = device_tensor(self._memory(landing.extent), torch.uint8, (used_bytes,))
        copy = source.clone()
        self._pool.withdraw(landing.extent)
        return copy, copy

    def _rows(self, memory: torch.Tensor, sent: Payload, rows: int, x_offset: int, scales_offset: int) -> Rows:
        x = device_tensor(memory, sent.x.dtype, (rows, sent.x.shape[1]), x_offset)
        if sent.scales is None:
            return x
        return x, device_tensor(memory, sent.scales.dtype, (rows, sent.scales.shape[1]), scales_offset)

    def _offset_of(self, tensor: torch.Tensor | None) -> int | None:
        """Where in the data region it lies; 0 for none; None: elsewhere."""
        if tensor is None or not tensor.numel():
            return 0
        start = tensor.data_ptr() - self._data.address
        inside = 0 <= start <= self._data.length - tensor.numel() * tensor.element_size()
        return start if inside and start % ALIGNMENT_BYTES == 0 else None


def _dense_routing(routing: Routing) -> Routing:
    def given(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else dense(tensor)

    ids, weights = given(routing.topk_idx), given(routing.topk_weights)
    return replace(routing, in_rank=dense(routing.in_rank), per_expert=dense(routing.per_expert), topk_idx=ids, topk_weights=weights)


class _Sources:
    """recv_src_idx of a handle: a copy, made when it is asked for, which must be while received tensors live: a handle holds no rows."""

    def __init__(self, memory: weakref.ref[Any], offset: int, rows: int, device: torch.device) -> None:
        self._memory, self._offset, self._rows, self._device = memory, offset, rows, device

    def __call__(self) -> torch.Tensor:
        if not self._rows:  # no memory then
            return torch.empty(0, dtype=torch.int32, device=self._device)
        memory = self._memory()
        if memory is None:
            raise StateError("recv_src_idx was asked for after the received tensors had died, beside which it lay: read it before")
        return device_tensor(memory, torch.int32, (self._rows,), self._offset).clone()


def _release(context: Any, exchange: Exchange) -> None:
    exchange.close()
    context.close(2000)
