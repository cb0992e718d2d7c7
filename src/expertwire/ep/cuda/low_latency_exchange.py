"""Low-latency operations as launches of kernels over symmetric memory. No streams here.

The memory may be a GPU's or, in Triton's interpreter, the host's: the kernels are the same, and so is everything here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from expertwire.ep.config import SCALE_COLUMNS, align_up
from expertwire.ep.cuda.launches import INDEX_TYPES, UNITS, Launches, alignment_of, next_power
from expertwire.ep.cuda.symmetric import DeviceBytes, Symmetric, device_tensor
from expertwire.ep.kernels import low_latency_words as low_words
from expertwire.ep.kernels import words
from expertwire.ep.kernels.low_latency_await import low_latency_await_combine, low_latency_await_dispatch
from expertwire.ep.kernels.low_latency_combine import low_latency_combine
from expertwire.ep.kernels.low_latency_dispatch import low_latency_dispatch
from expertwire.ep.kernels.low_latency_pack import low_latency_pack
from expertwire.ep.kernels.low_latency_resume import low_latency_resume
from expertwire.ep.kernels.low_latency_return import low_latency_return
from expertwire.ep.kernels.renew import renew

BF16, FP8, FP8_ROUND, FP8_UE8M0 = range(4)  # formats of rows
THIRDS = 3
PER_BYTE = 2  # bytes of the data region for one of num_rdma_bytes, which callers know as what two of its four parts need
TOKENS_MAX, EXPERTS_MAX = 1 << 16, 1 << 15  # a row's token and local expert travel in 32 bits
_PARTS = THIRDS + 1  # of the data region: the thirds, and the combine buffer
_RECORD_WORDS = 32
_ALIGNMENT = 128
_COUNTED = 16  # experts whose rows a program counts at once


@dataclass(frozen=True)
class LowLatencyTuning:
    """How kernels are launched: most programs, warps of each; rows that a program moves at once; columns that it sums at once."""

    send_programs: int = 256
    send_warps: int = 8
    pack_programs: int = 256
    pack_warps: int = 4
    pack_rows: int = 2
    sum_programs: int = 512
    sum_warps: int = 4
    sum_block: int = 1024


@dataclass(frozen=True)
class Shape:
    """What all ranks agree on."""

    tokens_max: int
    hidden: int
    experts: int
    topk: int
    row_format: int

    @property
    def row_bytes(self) -> int:
        """Of a dispatch, without scales."""
        return self.hidden * (2 if self.row_format == BF16 else 1)

    @property
    def scale_words(self) -> int:
        """32-bit words of a row's scales."""
        if self.row_format == BF16:
            return 0
        blocks = -(-self.hidden // SCALE_COLUMNS)
        return -(-blocks // 4) if self.row_format == FP8_UE8M0 else blocks

    def owned(self, rank: int, ranks: int) -> int:
        """Experts of a rank."""
        return self.experts // ranks + (rank < self.experts % ranks)

    def rows_limit(self, rank: int, ranks: int) -> int:
        """Most rows between a rank and the experts of `rank`."""
        return self.tokens_max * min(self.topk, self.owned(rank, ranks))

    def third_bytes(self, ranks: int) -> int:
        """What a dispatch and its combine need of a third, as kernels/low_latency_words.py lays it out."""
        limits = [self.rows_limit(rank, ranks) for rank in range(ranks)]
        block = align_up(align_up(limits[0] * self.row_bytes, 4) + limits[0] * (4 * self.scale_words + 4), 16)
        return max(ranks * block, sum(align_up(limit * 2 * self.hidden, 16) for limit in limits))


@dataclass(frozen=True)
class LowRoute:
    """What a dispatch leaves for its combine: addresses in `owner`, device memory."""

    shape: Shape
    tokens: int
    call: int
    places: int
    origins: int
    owner: torch.Tensor


@dataclass(frozen=True)
class Dispatch:
    """A dispatch between its parts. Tensors as ep/low_latency.py describes them; scales [E_l, words, R·M]."""

    route: LowRoute
    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


@dataclass(frozen=True)
class Combine:
    """A combine between its parts."""

    route: LowRoute
    owner: torch.Tensor
    call: int
    found: int
    kept: int
    out: torch.Tensor


def low_latency_control_bytes(ranks: int, local_experts_max: int) -> int:
    """Bytes of a rank's control region for this mode."""
    first = align_up(words.FIRST.value + 7 * ranks + THIRDS, 16)
    return 8 * (first + THIRDS * ranks * _slot_words(local_experts_max) + 2 * ranks)  # the last to meet by


def needed_bytes(shape: Shape, ranks: int) -> int:
    """Bytes of a rank's data region with which calls of that shape have room."""
    return _PARTS * align_up(shape.third_bytes(ranks), _ALIGNMENT)


def _slot_words(local_experts_max: int) -> int:
    return align_up(low_words.LL_HEADER.value + (local_experts_max + 1) // 2, 16)


class LowLatencyExchange:
    """One rank's launches. Every rank begins the same calls in the same order; each call's second part comes when it likes."""

    def __init__(
        self,
        control: Symmetric,
        data: Symmetric,
        local_experts_max: int,
        timeout_ms: int,
        shrink: bool,
        tuning: LowLatencyTuning | None = None,
    ) -> None:
        self.rank, self.ranks = control.rank, len(control.addresses)
        self.device = control.device
        self.tuning = tuning or LowLatencyTuning()
        self.local_experts_max = local_experts_max
        self.launch = Launches()
        self._owners = control, data
        self.third_bytes = data.length // _PARTS // _ALIGNMENT * _ALIGNMENT
        self.data_bytes = data.length
        self.record = torch.zeros(_RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        nanoseconds, slot = timeout_ms * 1_000_000, _slot_words(local_experts_max)
        head = [control.address, 0, self.record.data_ptr(), self.rank, nanoseconds, self.third_bytes, int(shrink), slot]
        self.state = torch.tensor([*head, *control.addresses, *data.addresses], dtype=torch.int64, device=self.device)
        self._state_at = self.state.data_ptr()
        self._fixed = {"R": self.ranks, "RP": next_power(self.ranks)}
        self.masks_at = control.address + 8 * (words.FIRST.value + 6 * self.ranks + THIRDS)  # int64 [R], 1: left out
        self.buffer_at = data.address + THIRDS * self.third_bytes

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        shape: Shape,
        statistics: torch.Tensor | None,
        waits: torch.Tensor | None,
        hook: bool,
    ) -> Dispatch:
        """The first part; without `hook` also the wait."""
        tokens, topk, ranks = x.shape[0], shape.topk, self.ranks
        local, capacity, limit = shape.owned(self.rank, ranks), ranks * shape.tokens_max, shape.rows_limit(self.rank, ranks)
        call_words = low_words.CALL.value + 2 * ranks + (ranks * local + 1) // 2
        slots = tokens * topk
        owner = torch.empty(
            call_words + 3 * slots + (shape.experts + 1) // 2 + (ranks * limit + 1) // 2, dtype=torch.int64, device=self.device
        )
        call = owner.data_ptr()
        targets = call + 8 * call_words
        places = targets + 16 * slots
        counts = places + 8 * slots
        route = LowRoute(shape, tokens, call, places, align_up(counts + 4 * shape.experts, 8), owner)
        made = Dispatch(
            route,
            torch.empty(
                (local, capacity, shape.hidden),
                dtype=torch.bfloat16 if shape.row_format == BF16 else torch.float8_e4m3fn,
                device=self.device,
            ),
            self._scales(shape, local, capacity),
            torch.empty(local, dtype=torch.int32, device=self.device),
            torch.empty((local, capacity), dtype=torch.int32, device=self.device),
            torch.empty((local, ranks), dtype=torch.int64, device=self.device),
        )
        align = alignment_of(2 * shape.hidden, x.data_ptr())
        size, unit = UNITS[align]
        blocks = max(next_power(-(-shape.hidden // SCALE_COLUMNS)), 4)
        topk_power = next_power(topk)
        # Comparisons at once: elements of topk_idx with the experts of a token, or with as many experts as are counted together.
        chunk = min(512 * self.tuning.send_warps, next_power(shape.tokens_max * topk) * max(topk_power, _COUNTED))
        self.launch(
            low_latency_dispatch,
            max(min(tokens, self.tuning.send_programs), 1),
            *(self._state_at, call, x.data_ptr(), topk_idx.data_ptr(), places, targets, counts),
            *(tokens, shape.tokens_max, shape.experts, made.layout_range.data_ptr(), made.counts.data_ptr()),
            *(_address(statistics), _address(waits)),
            **self._fixed,
            TOPK=topk,
            KP=topk_power,
            ID=INDEX_TYPES[topk_idx.dtype],
            CHUNK=max(chunk, topk_power, _COUNTED),
            STEP=_COUNTED,
            HIDDEN=shape.hidden,
            FORMAT=shape.row_format,
            ROW_BYTES=shape.row_bytes,
            WORDS=shape.scale_words,
            BLOCKS=blocks,
            ROW=2 * shape.hidden // size,
            COLS=min(next_power(2 * shape.hidden // size), 16384 // size),
            UNIT=unit,
            ALIGN=align,
            ALIGN_OUT=alignment_of(shape.row_bytes),
            AWAIT=not hook,
            num_warps=self.tuning.send_warps,
            maxnreg=128,  # of 65,536 for two programs of 8 warps on a multiprocessor; left alone it takes 159, and spills none at 128
        )
        return made

    def await_dispatch(self, sent: Dispatch, statistics: torch.Tensor | None, waits: torch.Tensor | None) -> None:
        """What the first part leaves to a hook."""
        shape = sent.route.shape
        self.launch(
            low_latency_await_dispatch,
            1,
            *(self._state_at, sent.route.call, sent.layout_range.data_ptr(), sent.counts.data_ptr()),
            *(_address(statistics), _address(waits), shape.tokens_max, shape.experts),
            **self._fixed,
            TOPK=shape.topk,
            num_warps=1,
        )

    def pack(self, sent: Dispatch) -> None:
        """The last part of a dispatch."""
        shape, tuning = sent.route.shape, self.tuning
        most = sum(-(-shape.rows_limit(self.rank, self.ranks) // tuning.pack_rows) for _ in range(self.ranks))
        align = alignment_of(shape.row_bytes, sent.rows.data_ptr())
        size, unit = UNITS[align]
        self.launch(
            low_latency_pack,
            max(min(most, tuning.pack_programs), 1),
            *(self._state_at, sent.route.call, sent.rows.data_ptr(), _address(sent.scales), sent.src_info.data_ptr()),
            *(sent.route.origins, shape.tokens_max, shape.experts),
            **self._fixed,
            TOPK=shape.topk,
            GROUP=tuning.pack_rows,
            ROW=shape.row_bytes // size,
            COLS=min(next_power(shape.row_bytes // size), 16384 // size),
            UNIT=unit,
            ALIGN=align,
            ROW_BYTES=shape.row_bytes,
            WORDS=shape.scale_words,
            WP=next_power(shape.scale_words),
            num_warps=tuning.pack_warps,
        )

    def combine(
        self,
        x: int,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        route: LowRoute,
        out: torch.Tensor,
        waits: torch.Tensor | None,
        hook: bool,
    ) -> Combine:
        """The first part; without `hook` also the wait. x: address of the rows."""
        shape, tuning, ranks = route.shape, self.tuning, self.ranks
        slots = route.tokens * shape.topk
        call_words = low_words.CALL.value + ranks
        owner = torch.empty(call_words + slots + (slots + 1) // 2, dtype=torch.int64, device=self.device)
        call = owner.data_ptr()
        made = Combine(route, owner, call, call + 8 * call_words, call + 8 * (call_words + slots), out)
        most = -(-shape.rows_limit(self.rank, ranks) * ranks // tuning.pack_rows)
        align = alignment_of(2 * shape.hidden, x)
        size, unit = UNITS[align]
        self.launch(
            low_latency_return,
            max(min(most, tuning.pack_programs), 1),
            *(self._state_at, call, route.call, x, route.origins, topk_idx.data_ptr(), weights.data_ptr(), route.places),
            *(made.found, made.kept, route.tokens, shape.tokens_max, shape.experts, _address(waits)),
            **self._fixed,
            TOPK=shape.topk,
            ID=INDEX_TYPES[topk_idx.dtype],
            HIDDEN=shape.hidden,
            GROUP=tuning.pack_rows,
            ROW=2 * shape.hidden // size,
            COLS=min(next_power(2 * shape.hidden // size), 16384 // size),
            UNIT=unit,
            ALIGN=align,
            LINES=32,
            AWAIT=not hook,
            num_warps=tuning.pack_warps,
        )
        return made

    def await_combine(self, sent: Combine, waits: torch.Tensor | None) -> None:
        """What the first part leaves to a hook."""
        arguments = self._state_at, sent.call, sent.route.call, _address(waits)
        self.launch(low_latency_await_combine, 1, *arguments, **self._fixed, num_warps=1)

    def sum(self, sent: Combine) -> None:
        """The last part of a combine."""
        hidden, tuning = sent.route.shape.hidden, self.tuning
        block = min(next_power(hidden), tuning.sum_block)
        self.launch(
            low_latency_combine,
            max(min(sent.route.tokens * -(-hidden // block), tuning.sum_programs), 1),
            *(self._state_at, sent.call, sent.found, sent.kept, sent.out.data_ptr(), sent.route.tokens),
            **self._fixed,
            TOPK=sent.route.shape.topk,
            HIDDEN=hidden,
            BLOCK=block,
            ALIGN=alignment_of(2 * hidden, sent.out.data_ptr()),
            num_warps=tuning.sum_warps,
            enable_fp_fusion=False,
        )

    def resume(self, rank: int) -> None:
        """Tell a rank that was left out what has been consumed meanwhile."""
        self.launch(low_latency_resume, 1, self._state_at, rank, R=self.ranks, num_warps=1)

    def renew(self, number: int, timeout_ms: int, answer: torch.Tensor) -> None:
        """All words as after the last call that any rank has begun, and masks clean; see `Exchange.renew`."""
        meeting = low_latency_control_bytes(self.ranks, self.local_experts_max) // 8 - 2 * self.ranks
        words = 6 * self.ranks + THIRDS, self.ranks
        arguments = self._state_at, number, meeting, timeout_ms * 1_000_000, *words, answer.data_ptr()
        self.launch(renew, 1, *arguments, **self._fixed, num_warps=1)

    def memory(self, address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over this rank's own memory."""
        length = math.prod(shape) * dtype.itemsize
        return device_tensor(DeviceBytes(address, length, self.device, self._owners), dtype, shape)

    def close(self) -> None:
        """Let go of the others' memory. No call may follow, and none of this rank may be running."""
        for memory in self._owners:
            memory.unmap()

    def _scales(self, shape: Shape, local: int, capacity: int) -> torch.Tensor | None:
        if shape.row_format == BF16:
            return None
        kind = torch.int32 if shape.row_format == FP8_UE8M0 else torch.float32
        return torch.empty((local, shape.scale_words, capacity), dtype=kind, device=self.device)  # a column of scales lies together


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
