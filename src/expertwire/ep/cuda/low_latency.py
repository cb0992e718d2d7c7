"""The low-latency mode on a GPU's tensors: what `CpuLowLatency` offers, over kernels. The caller chooses the stream.

Launches: a dispatch is `low_latency_dispatch` and `low_latency_pack`, a combine `low_latency_return` and `low_latency_combine`; with a hook
each has a third between them, the wait. The host waits for nothing, so what kernels find wrong is raised by a later call or `check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from expertwire.ep.cpu.low_latency import Sent
from expertwire.ep.cuda.failures import low_latency_status, raise_recorded
from expertwire.ep.cuda.launches import ALIGNMENT_BYTES, dense
from expertwire.ep.cuda.low_latency_exchange import (
    EXPERTS_MAX,
    PER_BYTE,
    THIRDS,
    TOKENS_MAX,
    LowLatencyExchange,
    LowRoute,
    Shape,
    needed_bytes,
)
from expertwire.ep.low_latency_handle import LowLatencyHandle
from expertwire.errors import CapacityError, InvalidArgumentError, StateError


class CudaLowLatency:
    """One rank's low-latency exchange. Arguments come checked; calls come one at a time."""

    def __init__(
        self,
        exchange: LowLatencyExchange,
        local_experts_max: int,
        capturing: Callable[[], bool],
    ) -> None:
        """capturing: whether the current stream records a graph."""
        self.exchange = exchange
        self._memory = memory = exchange.memory
        self._capturing = capturing
        self._local_experts_max = local_experts_max
        self._masks = memory(exchange.masks_at, torch.int64, (exchange.ranks,))
        self._begun = 0
        self._buffer_call = 0
        self._live: dict[int, str] = {}  # calls whose hooks have not been called
        self._resets = 0
        self.data_bytes = exchange.data_bytes

    def data_tensor(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """The data region from byte `offset`, as it is."""
        return self._memory(self.exchange.buffer_at - THIRDS * self.exchange.third_bytes + offset, dtype, shape)

    def close(self) -> None:
        """Let go of the others' memory."""
        self.exchange.close()

    def check(self) -> None:
        """Raise what kernels have reported since the last call."""
        raise_recorded(self.exchange.record, self.exchange.rank, low_latency_status)

    def renewed(self) -> None:
        """All ranks' words are as after the last call that any has begun: begin again there."""
        self.exchange.record.zero_()
        self._live.clear()
        self._buffer_call = 0
        self._resets += 1

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        tokens_max: int,
        num_experts: int,
        row_format: int,
        statistics: torch.Tensor | None,
        wait_ns: torch.Tensor | None,
        identity: object,
        hook: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, LowLatencyHandle, Sent]:
        """Send rows. Returns rows, scales, counts and handle, all of which `Sent.receive` fills."""
        exchange = self.exchange
        shape = Shape(tokens_max, x.shape[1], num_experts, topk_idx.shape[1], row_format)
        self._fits(shape, x.shape[0])
        number = self._begin("low_latency_dispatch", hook)
        x, topk_idx = dense(x), dense(topk_idx)
        self._load(x, topk_idx, shape)
        made = exchange.dispatch(x, topk_idx, shape, statistics, wait_ns, hook)

        resets = self._resets

        def receive() -> None:
            self._require(resets, "low_latency_dispatch", number)
            if hook:
                exchange.await_dispatch(made, statistics, wait_ns)
            exchange.pack(made)
            self._live.pop(number, None)

        filled = tuple(
            one for one in (made.rows, made.scales, made.counts, made.src_info, made.layout_range, made.route.owner) if one is not None
        )
        handle = LowLatencyHandle.of(
            made.src_info, made.layout_range, tokens_max, x.shape[1], num_experts, native=(number, made.route), buffer=identity
        )
        scales = None if made.scales is None else made.scales.transpose(1, 2)
        return made.rows, scales, made.counts, handle, Sent(filled, receive)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool,
        out: torch.Tensor | None,
        wait_ns: torch.Tensor | None,
        hook: bool = True,
    ) -> tuple[torch.Tensor, Sent]:
        """Send rows back. `Sent.receive` fills the sums."""
        exchange, route = self.exchange, self._route(handle)
        if tuple(topk_idx.shape) != (route.tokens, route.shape.topk):
            raise InvalidArgumentError(
                f"topk_idx is {list(topk_idx.shape)}, the handle's dispatch had [{route.tokens}, {route.shape.topk}]"
            )
        start = self._rows_of(x, zero_copy)
        number = self._begin("low_latency_combine", hook)
        x, topk_idx, weights = x if start else dense(x), dense(topk_idx), dense(weights)
        into = out
        if into is None or into.data_ptr() % ALIGNMENT_BYTES:
            into = torch.empty((route.tokens, route.shape.hidden), dtype=torch.bfloat16, device=exchange.device)
        made = exchange.combine(start or x.data_ptr(), topk_idx, weights, route, into, wait_ns, hook)
        combined = into if out is None else out

        resets = self._resets

        def receive() -> None:
            self._require(resets, "low_latency_combine", number)
            if hook:
                exchange.await_combine(made, wait_ns)
            exchange.sum(made)
            if combined is not into:
                combined.copy_(into)
            self._live.pop(number, None)

        return combined, Sent((combined, into, made.owner, route.owner), receive)

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Where the rows of the next call, a zero-copy combine, are to be written: bf16 [E_l, R·M, H]."""
        shape = (*handle.src_info.shape, handle.hidden)
        room = self.exchange.data_bytes - THIRDS * self.exchange.third_bytes
        if math.prod(shape) * 2 > room:
            raise CapacityError(
                f"the combine buffer needs {math.prod(shape) * 2} bytes, and half of num_rdma_bytes, {room}, is kept for it: give "
                "num_rdma_bytes as get_low_latency_rdma_size_hint says, or combine without zero_copy"
            )
        self._may_begin("get_next_low_latency_combine_buffer")
        self._buffer_call = self._begun + 1
        return self._memory(self.exchange.buffer_at, torch.bfloat16, shape)

    def mask(self, rank: int, masked: bool) -> None:
        """Leave the rank out from now on, or take it in again."""
        self._masks[rank] = int(masked)
        if not masked and rank != self.exchange.rank:
            self.exchange.resume(rank)

    def masked(self) -> list[bool]:
        """Whom this rank leaves out, by rank. Waits for the device."""
        return [bool(one) for one in self._masks.tolist()]

    # ---- parts

    def _load(self, x: torch.Tensor, topk_idx: torch.Tensor, shape: Shape) -> None:
        """What calls of this shape need, with hooks and without."""
        exchange = self.exchange

        def launches() -> None:
            for hook in (False, True):
                sent = exchange.dispatch(x, topk_idx, shape, None, None, hook)
                exchange.await_dispatch(sent, None, None)
                exchange.pack(sent)
                weights = torch.empty(topk_idx.shape, dtype=torch.float32, device=exchange.device)
                back = exchange.combine(exchange.buffer_at, topk_idx, weights, sent.route, torch.empty_like(x), None, hook)
                exchange.await_combine(back, None)
                exchange.sum(back)

        exchange.launch.load(("low_latency_dispatch", shape, topk_idx.dtype), launches, self._capturing)

    def _require(self, resets: int, what: str, number: int) -> None:
        if resets != self._resets:
            raise StateError(f"rank {self.exchange.rank}: the hook of {what} (call {number}) of before a reset: its rows are lost")

    def _may_begin(self, what: str) -> int:
        number = self._begun + 1
        if (older := self._live.get(number - 2)) is not None:
            live = " and of ".join(f"{name} (call {call})" for call, name in sorted(self._live.items()))
            raise StateError(
                f"rank {self.exchange.rank}: {what} would be call {number}, which takes the memory of call {number - 2}, {older}, but "
                f"the hook of {live} has not been called: at most two results live at a time, call it first"
            )
        return number

    def _begin(self, what: str, hook: bool) -> int:
        self.check()
        self._begun = number = self._may_begin(what)
        if hook:
            self._live[number] = what
        return number

    def _fits(self, shape: Shape, tokens: int) -> None:
        ranks = self.exchange.ranks
        if tokens > shape.tokens_max:
            raise InvalidArgumentError(f"x has {tokens} rows, num_max_dispatch_tokens_per_rank is {shape.tokens_max}")
        if shape.topk < 1:
            raise InvalidArgumentError("topk_idx has no columns, must have at least 1")
        most = min(self._local_experts_max, EXPERTS_MAX)
        if shape.owned(0, ranks) > most or shape.tokens_max > TOKENS_MAX:
            raise InvalidArgumentError(
                f"rank 0 owns {shape.owned(0, ranks)} experts and num_max_dispatch_tokens_per_rank is {shape.tokens_max}; at most {most} "
                f"(max_local_experts) and {TOKENS_MAX} are possible here"
            )
        if shape.third_bytes(ranks) > self.exchange.third_bytes:
            raise CapacityError(
                f"num_max_dispatch_tokens_per_rank {shape.tokens_max}, hidden {shape.hidden}, num_experts {shape.experts} and top-k "
                f"{shape.topk} need num_rdma_bytes of {needed_bytes(shape, ranks) // PER_BYTE}; it is {self.data_bytes // PER_BYTE}"
            )

    def _route(self, handle: LowLatencyHandle) -> LowRoute:
        number, route = handle.native
        if number in self._live:
            raise StateError(f"the hook of the handle's dispatch (call {number}) has not been called")
        assert isinstance(route, LowRoute)
        return route

    def _rows_of(self, x: torch.Tensor, zero_copy: bool) -> int:
        """Address of the rows if they lie in the combine buffer; 0: elsewhere."""
        exchange = self.exchange
        first = exchange.buffer_at - THIRDS * exchange.third_bytes
        inside = x.numel() > 0 and first <= x.data_ptr() < first + exchange.data_bytes
        if not zero_copy and not inside:
            return 0
        if self._buffer_call != self._begun + 1:
            raise StateError(
                f"rows are in the combine buffer, which was handed out for call {self._buffer_call}, and this is call {self._begun + 1}: "
                "take get_next_low_latency_combine_buffer after every other call, just before the combine"
            )
        if not zero_copy and x.data_ptr() != exchange.buffer_at:
            raise InvalidArgumentError("x lies in the low-latency memory of this Buffer but is not the combine buffer of this call")
        return exchange.buffer_at
