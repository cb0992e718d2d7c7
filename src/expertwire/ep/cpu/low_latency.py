"""The low-latency mode on CPU tensors: the native exchange over a region of its own, and the tensors that it fills."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from expertwire.ep.config import SCALE_COLUMNS, align_up
from expertwire.ep.cpu.memory import address_of, apart, tensor_over
from expertwire.ep.cpu.outputs import Outputs
from expertwire.ep.layout import expert_bounds
from expertwire.ep.low_latency_handle import LowLatencyHandle

if TYPE_CHECKING:
    from expertwire.fabric.native import Context, LowLatency, LowLatencyCall

DATA_ALIGNMENT = 4096
BF16, FP8, FP8_ROUND, FP8_UE8M0 = range(4)  # formats of rows, as the core numbers them


def region_bytes(num_rdma_bytes: int) -> int:
    """Bytes of the low-latency region of a Buffer that was given so many."""
    return align_up(num_rdma_bytes, DATA_ALIGNMENT)


def control_bytes(ranks: int, local_experts_max: int) -> int:
    """Bytes of this mode's words and records."""
    from expertwire.fabric.native import LowLatency

    return int(LowLatency.control_bytes(ranks, local_experts_max))


def data_bytes_for(node_of: Sequence[int], tokens_max: int, hidden: int, num_experts: int, topk: int, row_format: int) -> int:
    """Bytes of the region with which a dispatch of that shape and its combine have room on every rank."""
    from expertwire.fabric.native import LowLatency

    bounds = expert_bounds(num_experts, len(node_of))
    return int(LowLatency.needed_bytes(list(node_of), tokens_max, hidden, num_experts, topk, row_format, bounds))


@dataclass(frozen=True)
class Sent:
    """A call between its parts. `receive` fills `tensors`, which it keeps alive."""

    tensors: tuple[torch.Tensor, ...]
    receive: Callable[[], None]


class CpuLowLatency:
    """One rank's low-latency exchange. Arguments come checked; calls come one at a time."""

    def __init__(
        self, context: Context, rank: int, node_of: Sequence[int], local_experts_max: int, shrink: bool, timeout_ms: int, outputs: Outputs
    ) -> None:
        from expertwire.fabric.native import LowLatency

        self._native: LowLatency = LowLatency(context, list(node_of), local_experts_max, shrink)
        self._rank = rank
        self._ranks = len(node_of)
        self._node_of = tuple(node_of)
        self._local_experts_max = local_experts_max
        self._timeout_ms = timeout_ms
        self._outputs = outputs
        region = context.region("ll_data")
        self.data_bytes: int = context.region_bytes(region)
        self._memory = (ctypes.c_char * self.data_bytes).from_address(context.region_address(region))
        self._memory.owner = context  # type: ignore[attr-defined]

    def data_tensor(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """The region from byte `offset`, as it is."""
        return tensor_over(self._memory, offset, dtype, shape)

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
        _hook: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, LowLatencyHandle, Sent]:
        """Send rows. Returns rows, scales, counts and handle, all of which `Sent.receive` fills."""
        bounds = expert_bounds(num_experts, self._ranks)
        experts, capacity = bounds[self._rank + 1] - bounds[self._rank], self._ranks * tokens_max
        hidden, topk = x.shape[1], topk_idx.shape[1]
        dtype = torch.bfloat16 if row_format == BF16 else torch.float8_e4m3fn
        # What does not fit is said by the call, to every rank; memory for its results, of any size, need not be there.
        if experts * capacity * hidden * dtype.itemsize > self.data_bytes and (
            experts > self._local_experts_max
            or data_bytes_for(self._node_of, tokens_max, hidden, num_experts, topk, row_format) > self.data_bytes
        ):
            experts = 0
        rows = self._outputs.empty((experts, capacity, hidden), dtype)
        scales = None
        if row_format != BF16:
            words = -(-hidden // SCALE_COLUMNS)
            if row_format == FP8_UE8M0:
                words = -(-words // 4)
            # Column-major: a column of scales lies together.
            scales = torch.empty((experts, words, capacity), dtype=torch.int32 if row_format == FP8_UE8M0 else torch.float32, device="cpu")
        counts = torch.empty(experts, dtype=torch.int32, device="cpu")
        src_info = torch.empty((experts, capacity), dtype=torch.int32, device="cpu")
        layout_range = torch.empty((experts, self._ranks), dtype=torch.int64, device="cpu")
        call = self._native.dispatch(
            address_of(x := apart(x, ctypes.addressof(self._memory), self.data_bytes)),
            x.shape[0],
            hidden,
            address_of(topk_idx),
            topk_idx.element_size(),
            topk,
            tokens_max,
            num_experts,
            bounds,
            row_format,
            address_of(rows),
            address_of(scales),
            address_of(counts),
            address_of(src_info),
            address_of(layout_range),
            address_of(statistics),
            address_of(wait_ns),
            self._timeout_ms,
        )
        filled = tuple(one for one in (rows, scales, counts, src_info, layout_range, statistics, wait_ns) if one is not None)
        handle = LowLatencyHandle.of(src_info, layout_range, tokens_max, hidden, num_experts, native=call, buffer=identity)
        return rows, None if scales is None else scales.transpose(1, 2), counts, handle, Sent(filled, self._receiver(call))

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool,
        out: torch.Tensor | None,
        wait_ns: torch.Tensor | None,
        _hook: bool = True,
    ) -> tuple[torch.Tensor, Sent]:
        """Send rows back. `Sent.receive` fills the sums."""
        tokens, topk = topk_idx.shape
        combined = self._outputs.empty((tokens, x.shape[2]), torch.bfloat16) if out is None else out
        call = self._native.combine(
            address_of(x),
            zero_copy,
            address_of(topk_idx),
            topk_idx.element_size(),
            address_of(weights),
            tokens,
            topk,
            x.shape[2],
            handle.native,
            address_of(combined),
            address_of(wait_ns),
            self._timeout_ms,
        )
        filled = (combined,) if wait_ns is None else (combined, wait_ns)
        return combined, Sent(filled, self._receiver(call))

    def combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Where the rows of the next call, a zero-copy combine, are to be written: bf16 [E_l, R·M, H]."""
        offset = self._native.combine_buffer(handle.native, self._timeout_ms)
        shape = (*handle.src_info.shape, handle.hidden)
        assert offset + math.prod(shape) * 2 <= self.data_bytes
        return self.data_tensor(torch.bfloat16, offset, shape)

    def mask(self, rank: int, masked: bool) -> None:
        """Leave the rank out from now on, or take it in again."""
        self._native.mask(rank, masked)

    def masked(self) -> list[bool]:
        """Whom this rank leaves out, by rank."""
        return list(self._native.masked())

    def _receiver(self, call: LowLatencyCall) -> Callable[[], None]:
        native, timeout_ms = self._native, self._timeout_ms
        return lambda: native.receive(call, timeout_ms)
