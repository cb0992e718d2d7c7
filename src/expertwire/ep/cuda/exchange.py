"""High-throughput operations as launches of kernels over symmetric memory. No streams and no pool here: the caller chooses both.

The memory may be a GPU's or, in Triton's interpreter, the host's: the kernels are the same, and so is everything here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from expertwire.ep.config import align_up
from expertwire.ep.cuda.launches import INDEX_TYPES, UNITS, Launches, alignment_of, next_power
from expertwire.ep.cuda.symmetric import Symmetric
from expertwire.ep.kernels import notify, words
from expertwire.ep.kernels.combine import combine
from expertwire.ep.kernels.dispatch import dispatch
from expertwire.ep.kernels.layout import count_layout
from expertwire.ep.kernels.notify import notify_again, notify_dispatch
from expertwire.ep.kernels.renew import renew
from expertwire.ep.kernels.stage import stage

MAILBOXES = 4  # an eager call has been read before the next one of its Buffer begins; the others are for calls that were interrupted
_RECORD_WORDS = 32


@dataclass(frozen=True)
class Tuning:
    """How kernels are launched. `group`: tokens whose places a program finds at once; `block_bytes`: of a row, loaded at once;
    `combine_block`: columns that are summed at once, 0: as many as make 16,384 values of all ranks; `combine_warps`, 0: 16 for two ranks,
    else 8. A thread has one 16-byte load of each rank in flight, however many columns there are (ptxas interleaves loads and sums), so with
    few ranks it takes more threads to cover the link's latency: 1.3 MB are in flight at 160 programs of 16 warps."""

    programs: int = 32
    warps: int = 8
    group: int = 8
    block_bytes: int = 16384
    combine_programs: int = 64
    combine_warps: int = 0
    combine_block: int = 0


@functools.cache
def tuning_of(sms: int, sharing: int) -> Tuning:
    """For `sms` streaming multiprocessors a rank, of a GPU that `sharing` ranks share. A program has an eighth of a multiprocessor's
    threads and waits for memory most of the time, so there are several; beyond those caps more made nothing faster (8 ranks, one H200)."""
    return Tuning(programs=max(min(4 * sms, 256 // sharing), 1), combine_programs=max(min(8 * sms, 512 // sharing), 1))


@dataclass(frozen=True)
class Route:
    """What a dispatch leaves on the device, in `owner`: int64 words, see `kernels.words.ROUTING`; behind them, from byte `positions` on,
    i32[T, R]: row at each receiver, −1 where the token does not go; and from byte `counts` on i32[2, E_l]: rows per local expert, rounded
    up and as they are. `counts` 0: the host was told instead."""

    owner: torch.Tensor
    positions: int
    counts: int
    local: int

    @property
    def address(self) -> int:
        """Of the words."""
        return self.owner.data_ptr()

    def counted(self, real: bool) -> torch.Tensor:
        """Rows per local expert, rounded up, or as they are."""
        first = self.counts // 4 + self.local * real
        return self.owner.view(torch.int32)[first : first + self.local]


def slot_words(ranks: int, local_experts_max: int) -> int:
    """Words of a notify slot: a header, rows per rank, rows per expert of the receiver."""
    return align_up(words.HEADER.value + (ranks + local_experts_max + 1) // 2, 16)


def control_bytes(ranks: int, local_experts_max: int) -> int:
    """Bytes of a rank's control region."""
    first = align_up(words.FIRST.value + 2 * ranks, 16)
    return 8 * (first + 2 * ranks * slot_words(ranks, local_experts_max) + 2 * ranks)  # the last to meet by


def shape_word(topk: int, index_bytes: int, has_weights: bool, scale_bytes: int) -> int:
    """What travels beside a row, in one word, as the kernels take it apart."""
    return topk | index_bytes << 16 | int(has_weights) << 20 | scale_bytes << 32


class Exchange:
    """One rank's launches. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        control: Symmetric,
        data: Symmetric,
        local_experts_max: int,
        timeout_ms: int,
        tuning: Tuning | None = None,
    ) -> None:
        self.rank, self.ranks = control.rank, len(control.addresses)
        self.device = control.device
        self.tuning = tuning or Tuning()
        self.local_experts_max = local_experts_max
        self._owners = control, data
        pinned = self.device.type == "cuda"
        self.meta = torch.zeros(words.META.value + 6 * self.ranks, dtype=torch.int64, device=self.device)
        self.record = torch.zeros(_RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._boxes = torch.zeros((MAILBOXES, notify.MAILBOX + local_experts_max), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._box = 0
        head = [control.address, self.meta.data_ptr(), self.record.data_ptr(), self.rank, timeout_ms * 1_000_000, 0, 0, 0]
        self.state = torch.tensor([*head, *control.addresses, *data.addresses], dtype=torch.int64, device=self.device)
        self._state_at = self.state.data_ptr()
        self._fixed = {"R": self.ranks, "RP": next_power(self.ranks)}
        self._slot = {"SLOT": slot_words(self.ranks, local_experts_max)}
        self.launch = Launches()

    # ---- operations

    def layout(self, topk_idx: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows per rank i32[R], rows per expert i32[E], token in rank bool[T, R]."""
        tokens, topk = topk_idx.shape
        counts = torch.zeros(self.ranks + experts, dtype=torch.int32, device=self.device)
        in_rank = torch.empty((tokens, self.ranks), dtype=torch.bool, device=self.device)
        per_rank, per_expert = counts[: self.ranks], counts[self.ranks :]
        if tokens:
            lines = 32
            self.launch(
                count_layout,
                triton.cdiv(tokens, lines),
                *(self._state_at, topk_idx.data_ptr(), per_rank.data_ptr(), per_expert.data_ptr(), in_rank.data_ptr()),
                *(tokens, experts),
                **self._fixed,
                TOPK=topk,
                KP=next_power(topk),
                ID=INDEX_TYPES[topk_idx.dtype],
                LINES=lines,
                EP=next_power(experts + 1),
                num_warps=4,
            )
        return per_rank, per_expert, in_rank

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        in_rank: torch.Tensor,
        per_expert: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        offer: tuple[int, int],
        worst: int,
        alignment: int,
        notified: torch.cuda.Event | None = None,
        ids_offset: int = -1,
    ) -> tuple[Route, torch.Tensor | None]:
        """Launch both kernels. x contiguous rows; offer: (offset, bytes) of the data region. With `worst` the counts stay on the device,
        else the second result is the mailbox, which has them once `notified` has passed. ids_offset: where `worst` rows' ids come to in the
        data region, if there is room for them."""
        tuning = self.tuning
        tokens, experts = x.shape[0], per_expert.shape[0]
        local = experts // self.ranks + (self.rank < experts % self.ranks)
        positions = 8 * (words.ROUTING.value + self.ranks**2)
        prefix = positions + 4 * tokens * self.ranks
        counts = prefix + 4 * -(-tokens // tuning.group) * self.ranks
        owner = torch.empty((counts + 8 * local + 7) // 8, dtype=torch.int64, device=self.device)
        route = Route(owner, positions, counts if worst else 0, local)
        first = route.address
        mailbox = None if worst else self._next_mailbox()
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        shape = shape_word(topk, 8 if topk_idx is None else topk_idx.element_size(), topk_weights is not None, row_bytes(scales))
        self.launch(
            notify_dispatch,
            1,
            *(self._state_at, in_rank.data_ptr(), per_expert.data_ptr(), first + prefix, first),
            *(first + counts if worst else 0, 0 if mailbox is None else mailbox.data_ptr(), tokens, *offer),
            *(experts, worst, alignment, row_bytes(x), shape),
            **self._fixed,
            **self._slot,
            GROUP=tuning.group,
            TILE=max(1024 // tuning.group, 1),
            STEP=min(max(next_power(triton.cdiv(experts, self.ranks)), 16), 256),
            num_warps=8,
        )
        if notified is not None:
            notified.record()
        self._send(x, scales, in_rank, topk_idx, topk_weights, first + prefix, route, experts, worst, alignment, True, ids_offset)
        return route, mailbox

    def dispatch_again(
        self, x: torch.Tensor, scales: torch.Tensor | None, route: Route, offer: tuple[int, int], worst: int, wait: bool
    ) -> torch.Tensor | None:
        """Rows by the routing of an earlier dispatch. With `wait` the result is a mailbox as of `dispatch`."""
        mailbox = self._next_mailbox() if wait else None
        self._notify_again(notify.NOTIFY_AGAIN, route, mailbox, offer, 0, worst, row_bytes(x), shape_word(0, 8, False, row_bytes(scales)))
        self._send(x, scales, None, None, None, 0, route, 0, worst, 1, False, -1)
        return mailbox

    def combine(
        self,
        x_offset: int,
        weights_offset: int,
        topk: int,
        route: Route,
        biases: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        weights_out: torch.Tensor | None,
    ) -> None:
        """Sum rows, which lie at `x_offset` of the data region, and weights at `weights_offset`. No host wait."""
        tuning = self.tuning
        tokens, hidden = out.shape
        self._notify_again(
            notify.NOTIFY_COMBINE, route, None, (x_offset, 0), weights_offset, 0, 2 * hidden, shape_word(topk, 0, topk > 0, 0)
        )
        first, second = [*(bias.data_ptr() for bias in biases), out.data_ptr(), out.data_ptr()][:2]
        self.launch(
            combine,
            tuning.combine_programs,
            *(self._state_at, route.address + route.positions, out.data_ptr()),
            *(0 if weights_out is None else weights_out.data_ptr(), first, second, tokens),
            **self._fixed,
            GROUP=min(tuning.group, 8),
            HIDDEN=hidden,
            BLOCK=min(next_power(hidden), tuning.combine_block or max(16384 // next_power(self.ranks), 512)),
            ALIGN=alignment_of(2 * hidden, x_offset, out.data_ptr(), first, second),
            BIASES=len(biases),
            TOPK=topk,
            KP=next_power(topk),
            num_warps=tuning.combine_warps or (16 if self.ranks <= 2 else 8),
            enable_fp_fusion=False,
        )

    def stage(self, x: torch.Tensor, weights: torch.Tensor | None, route: Route, to: int, weights_to: int, rows: int) -> None:
        """Copy the rows of x that count, and their weights, to places in this rank's data region."""
        bytes_of_row, base = row_bytes(x), self._owners[1].address
        alignment = alignment_of(bytes_of_row, x.data_ptr(), base + to)
        unit_bytes, unit = UNITS[alignment]
        topk = 0 if weights is None else weights.shape[1]
        self.launch(
            stage,
            max(min(self.tuning.combine_programs, rows), 1),
            *(route.address, x.data_ptr(), base + to, _address(weights), base + weights_to),
            ROW=bytes_of_row // unit_bytes,
            BLOCK=min(next_power(bytes_of_row // unit_bytes), self.tuning.block_bytes // unit_bytes),
            UNIT=unit,
            ALIGN=alignment,
            TOPK=topk,
            KP=next_power(topk),
            num_warps=4,
        )

    def renew(self, number: int, timeout_ms: int, answer: torch.Tensor) -> None:
        """All words as after the last operation that any rank has begun. No kernel of this rank runs; `answer` as the kernel says."""
        meeting = control_bytes(self.ranks, self.local_experts_max) // 8 - 2 * self.ranks
        arguments = self._state_at, number, meeting, timeout_ms * 1_000_000, 2 * self.ranks, 0, answer.data_ptr()
        self.launch(renew, 1, *arguments, **self._fixed, num_warps=1)

    def close(self) -> None:
        """Let go of the others' memory. No call may follow, and none of this rank may be running."""
        for memory in self._owners:
            memory.unmap()

    # ---- parts

    def _notify_again(
        self,
        operation: int,
        route: Route,
        mailbox: torch.Tensor | None,
        offer: tuple[int, int],
        weights_offset: int,
        worst: int,
        row_bytes: int,
        shape: int,
    ) -> None:
        self.launch(
            notify_again,
            1,
            *(self._state_at, route.address, 0 if mailbox is None else mailbox.data_ptr(), operation),
            *(*offer, weights_offset, worst, row_bytes, shape),
            **self._fixed,
            **self._slot,
            num_warps=4,
        )

    def _send(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        in_rank: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        prefix: int,
        route: Route,
        experts: int,
        worst: int,
        expert_alignment: int,
        fresh: bool,
        ids_offset: int,
    ) -> None:
        tuning = self.tuning
        bytes_of_row = row_bytes(x)
        alignment = alignment_of(bytes_of_row, x.data_ptr())
        unit_bytes, unit = UNITS[alignment]
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        width = 0 if scales is None else scales.shape[1]
        down, across = (0, 0) if scales is None else scales.stride()
        self.launch(
            dispatch,
            tuning.programs,
            *(self._state_at, x.data_ptr(), _address(scales), down, across, _address(in_rank), _address(topk_idx)),
            *(_address(topk_weights), prefix, route.address + route.positions, x.shape[0], experts, worst),
            *(route.address + route.counts if route.counts else 0, expert_alignment),
            0 if ids_offset < 0 else self._owners[1].address + ids_offset,
            **self._fixed,
            GROUP=tuning.group,
            FRESH=fresh,
            ROW=bytes_of_row // unit_bytes,
            BLOCK=min(next_power(bytes_of_row // unit_bytes), tuning.block_bytes // unit_bytes),
            UNIT=unit,
            ALIGN=alignment,
            TOPK=topk,
            KP=next_power(topk),
            ID=tl.int64 if topk_idx is None else INDEX_TYPES[topk_idx.dtype],
            WEIGHTS=topk_weights is not None,
            SCALES=width,
            SP=next_power(width),
            num_warps=tuning.warps,
        )

    def _next_mailbox(self) -> torch.Tensor:
        self._box = (self._box + 1) % MAILBOXES
        return self._boxes[self._box]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def row_bytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a row; 0 of none."""
    return 0 if tensor is None else int(tensor.shape[1]) * int(tensor.element_size())
