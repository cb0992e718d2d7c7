"""The low-latency half of `Buffer`: DeepEP's surface. It checks arguments and delegates to the backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from expertwire.ep import checks
from expertwire.ep.config import HIDDEN_MAX, ROWS_MAX, require_int
from expertwire.ep.event import EventOverlap
from expertwire.ep.layout import expert_bounds
from expertwire.ep.low_latency_handle import LowLatencyHandle
from expertwire.ep.variants import LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, keywords
from expertwire.errors import InvalidArgumentError, InvalidTypeError, StateError

if TYPE_CHECKING:
    from expertwire.ep.cpu.backend import CpuBackend
    from expertwire.ep.cpu.low_latency import CpuLowLatency, Sent
    from expertwire.ep.cuda.backend import CudaBackend
    from expertwire.ep.cuda.low_latency import CudaLowLatency

Hook = Callable[[], None]
_FORMATS = {(False, False): 1, (True, False): 2, (True, True): 3}  # FP8: (round_scale, use_ue8m0)


def _in_place(name: str, value: object, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor that will be written to, so that a copy of it would not do; None stays None."""
    if value is None:
        return None
    found = checks.tensor(name, value, (dtype,), shape)
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        raise InvalidArgumentError(f"{name} is not contiguous; it is written to where it lies, give a contiguous tensor")
    return value if value.data_ptr() == found.data_ptr() else found


class LowLatencyOperations:
    """What `Buffer(low_latency_mode=True)` has beside its other methods.

    A call has two parts: it sends, and its hook receives. With `return_recv_hook` the hook is the caller's to call, before anything that it
    fills is read; else it runs within the call. Calls of all ranks come in the same order. At most two live between their parts: a third
    send with an uncalled hook in its way raises `StateError`, which names it.
    """

    rank: int
    group_size: int
    low_latency_mode: bool
    enable_shrink: bool
    runtime: CpuBackend | CudaBackend
    _identity: object

    if TYPE_CHECKING:

        def _calling(self, operation: str) -> AbstractContextManager[None]: ...

        def _holding(self, operation: str) -> AbstractContextManager[None]: ...

    @keywords(LOW_LATENCY_DISPATCH)
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each row to its experts. Collective.

        Args:
            x: rows bf16 [T, H], T ≤ M, any H and strides; may be overwritten when the call has returned.
            topk_idx: int64 or int32 [T, K], −1 is "no expert". An id that a token has twice sends its row twice.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks. num_experts: E, of all ranks.
            cumulative_local_expert_recv_stats: i32 [E_l], the counts are added to it.
            dispatch_wait_recv_cost_stats: i64 [R], nanoseconds that the hook waited for each rank are added to it.
            use_fp8: send e4m3 with a scale for each 128 columns (the last block may be shorter): amax/448. round_scale: the next power of
                two. use_ue8m0: four exponents of such scales in an int32.
            async_finish: return an event, complete on CPU; excludes return_recv_hook.

        Returns:
            recv_x bf16 [E_l, R·M, H], or (e4m3, scales) with scales f32 [E_l, R·M, ceil(H/128)], UE8M0 int32 [E_l, R·M, ceil(H/512)], dim 1
            contiguous; recv_count i32 [E_l]: rows [0, count) of an expert are there, by source rank, then token, the rest is undefined;
            handle; event; hook.

        Raises:
            InvalidArgumentError, StateError: nothing was sent. MismatchError: ranks disagree on M, H, E, K, the format or the operation.
            CapacityError: the shape does not fit in num_rdma_bytes. PeerError, DeadlineError: the Buffer is failed; with `enable_shrink`
            the rank is masked instead. ExcludedError: others have masked this one; says who, and how it comes back.
        """
        backend = self._low_latency("low_latency_dispatch")
        given = {"cumulative_local_expert_recv_stats": cumulative_local_expert_recv_stats}
        checks.on_device(self.runtime.device, x=x, topk_idx=topk_idx, dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats, **given)
        _exclusive(async_finish, return_recv_hook)
        if use_ue8m0 and not round_scale:
            raise InvalidArgumentError("use_ue8m0 is True with round_scale=False; its scales are powers of two: give round_scale=True")
        tokens_max = require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1, ROWS_MAX)
        experts = require_int("num_experts", num_experts, 1, ROWS_MAX)
        rows = checks.rows("x", x)
        require_int("x.shape[1]", rows.shape[1], 1, HIDDEN_MAX)
        ids = checks.expert_ids("topk_idx", topk_idx, rows.shape[0])
        bounds = expert_bounds(experts, self.group_size)
        mine = bounds[self.rank + 1] - bounds[self.rank]
        statistics = _in_place("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, torch.int32, (mine,))
        waits = _in_place("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, torch.int64, (self.group_size,))
        row_format = _FORMATS[bool(round_scale), bool(use_ue8m0)] if use_fp8 else 0
        with self._calling("low_latency_dispatch"), self.runtime.ordered(None, async_finish) as order:
            received, scales, counts, handle, sent = backend.dispatch(
                rows, ids, tokens_max, experts, row_format, statistics, waits, self._identity, return_recv_hook
            )
            if not return_recv_hook:
                sent.receive()
            order.keep(rows, ids, statistics, waits)
            order.give(*sent.tensors)
        hook = self._hook("low_latency_dispatch", sent) if return_recv_hook else None
        return received if scales is None else (received, scales), counts, handle, order.event, hook

    @keywords(LOW_LATENCY_COMBINE)
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Bring rows back to their tokens, each weighted, summed in fp32 in top-k order (every product rounded to fp32). Collective.

        Args:
            x: bf16 [E_l, R·M, H], rows where the dispatch put them; may be overwritten when the call has returned.
            topk_idx, topk_weights: as in the dispatch, [T, K] and f32 [T, K]; ids may have become −1. Read at the call.
            use_logfmt: rows may be compressed on their way, to ten bits a value. Here they never are: bf16 goes over the wire either way,
                so that the sum does not depend on it.
            zero_copy: the rows are in what `get_next_low_latency_combine_buffer` gave, x is not read.
            out: bf16 [T, H], contiguous: the sums go there.
            combine_wait_recv_cost_stats: i64 [R], nanoseconds that the hook waited for each rank are added to it.

        Returns:
            combined_x bf16 [T, H], event, hook. A row of a masked rank is left out of the sum.

        Raises:
            as `low_latency_dispatch`.
        """
        backend = self._low_latency("low_latency_combine")
        given = {"combine_wait_recv_cost_stats": combine_wait_recv_cost_stats}
        checks.on_device(self.runtime.device, x=x, topk_idx=topk_idx, topk_weights=topk_weights, out=out, **given)
        _exclusive(async_finish, return_recv_hook)
        routing = self._handle(handle)
        experts, capacity = routing.src_info.shape
        rows = checks.tensor("x", x, (torch.bfloat16,), (experts, capacity, routing.hidden))
        ids = checks.expert_ids("topk_idx", topk_idx)
        weights = checks.tensor("topk_weights", topk_weights, (torch.float32,), (ids.shape[0], ids.shape[1]))
        target = _in_place("out", out, torch.bfloat16, (ids.shape[0], routing.hidden))
        waits = _in_place("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, torch.int64, (self.group_size,))
        with self._calling("low_latency_combine"), self.runtime.ordered(None, async_finish) as order:
            combined, sent = backend.combine(rows, ids, weights, routing, bool(zero_copy), target, waits, return_recv_hook)
            if not return_recv_hook:
                sent.receive()
            order.keep(rows, ids, weights, target, waits)
            order.give(*sent.tensors)
        return combined, order.event, self._hook("low_latency_combine", sent) if return_recv_hook else None

    @keywords()
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Where to write the rows of the next call, a combine by `handle` with `zero_copy=True`: bf16 [E_l, R·M, H].

        Raises `StateError` while a hook is uncalled whose result lies there, `CapacityError` where `num_rdma_bytes` has no room for it.
        """
        backend = self._low_latency("get_next_low_latency_combine_buffer")
        routing = self._handle(handle)
        with self._holding("get_next_low_latency_combine_buffer"):
            return backend.combine_buffer(routing)

    @keywords()
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: the modes share no memory, and words are never reset. Checks its arguments."""
        self._low_latency("clean_low_latency_buffer")
        require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
        require_int("hidden", hidden, 1)
        require_int("num_experts", num_experts, 1)

    @keywords()
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of this rank's low-latency calls from now on, or, with mask=False, take it in again. Local.

        Both of a pair must leave each other out, and take each other in between the same two calls, with no hook uncalled. A rank that was
        stopped and left out gets `ExcludedError`, and has nothing to take in: once all others have taken it in, its next call is theirs.
        Until then, or until its process has ended, calls keep their shape: M, H, E and K.

        Raises `StateError` where a rank cannot be taken in: a hook is uncalled, rows to it are under way, or work for it failed meanwhile.
        """
        backend = self._shrinking("low_latency_update_mask_buffer")
        rank = require_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if rank == self.rank and mask:
            raise InvalidArgumentError(f"rank_to_mask is {rank}, this rank itself; a rank cannot leave itself out")
        with self._holding("low_latency_update_mask_buffer"), self.runtime.ordered(None, False):
            backend.mask(rank, bool(mask))

    @keywords()
    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that this rank leaves out, else 0, to `mask_status`, i32 [R]."""
        backend = self._shrinking("low_latency_query_mask_buffer")
        target = _in_place("mask_status", mask_status, torch.int32, (self.group_size,))
        checks.on_device(self.runtime.device, mask_status=mask_status)
        if target is None:
            raise InvalidTypeError("mask_status is None; it must be an int32 tensor with an element for each rank")
        with self._holding("low_latency_query_mask_buffer"), self.runtime.ordered(None, False):
            target.copy_(torch.tensor(backend.masked(), dtype=torch.int32, device="cpu"))

    @keywords()
    def low_latency_clean_mask_buffer(self) -> None:
        """Take every rank in again. Local."""
        backend = self._shrinking("low_latency_clean_mask_buffer")
        with self._holding("low_latency_clean_mask_buffer"), self.runtime.ordered(None, False):
            for rank, masked in enumerate(backend.masked()):
                if masked:
                    backend.mask(rank, False)

    def _hook(self, operation: str, sent: Sent) -> Hook:
        def hook() -> None:
            with self._calling(f"the hook of {operation}"), self.runtime.ordered(None, False) as order:
                sent.receive()
                order.give(*sent.tensors)

        return hook

    def _low_latency(self, operation: str) -> CpuLowLatency | CudaLowLatency:
        backend = self.runtime.low_latency
        if backend is None:
            raise StateError(
                f"rank {self.rank}: {operation} on a Buffer without the low-latency mode: make it with low_latency_mode=True and "
                "num_rdma_bytes from get_low_latency_rdma_size_hint"
            )
        return backend

    def _shrinking(self, operation: str) -> CpuLowLatency | CudaLowLatency:
        backend = self._low_latency(operation)
        if not self.enable_shrink:
            raise StateError(f"rank {self.rank}: {operation} on a Buffer without a mask: make it with enable_shrink=True")
        return backend

    def _handle(self, value: object) -> LowLatencyHandle:
        if not isinstance(value, LowLatencyHandle):
            raise InvalidTypeError(f"handle must be what low_latency_dispatch returned, got {type(value).__name__}")
        if value.buffer is not self._identity:
            raise InvalidArgumentError(
                f"handle was made by another Buffer ({value.buffer!r}, not {self._identity!r}): use the Buffer that dispatched"
            )
        return value


def _exclusive(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise InvalidArgumentError(
            "async_finish and return_recv_hook are both True; they exclude each other: wait for the event or call the hook"
        )
