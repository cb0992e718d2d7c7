"""What kernels report to the host, as errors in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from expertwire.ep.kernels import low_latency_words as low_words
from expertwire.ep.kernels import words
from expertwire.errors import (
    CapacityError,
    DeadlineError,
    ExpertwireError,
    InvalidArgumentError,
    MismatchError,
    StateError,
    WorstTokensError,
)

Status = Callable[[Sequence[int], int, str], ExpertwireError | None]
_HEADER = {
    words.H_OPERATION.value: "the operation (1 dispatch, 2 dispatch with a handle, 3 combine)",
    words.H_HANDLE.value: "the dispatch that the handle is of (its call number)",
    words.H_WORST.value: "num_worst_tokens",
    words.H_ROW.value: "the bytes of a row",
    words.H_SHAPE.value: "what travels beside a row (top-k, ids, weights, scales)",
    words.H_EXPERTS.value: "the number of experts",
}
_LOW_FIELDS = ("the number of the call", "the operation", "num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "num_topk")
_LOW_HEADER = (*_LOW_FIELDS, "the format of rows (use_fp8, round_scale, use_ue8m0)", "the handle (number of its dispatch)")
_ROUTING = {
    low_words.BAD_ID.value: "topk_idx had ids that are neither -1 nor in [0, num_experts)",
    low_words.TOO_MANY.value: "topk_idx named experts twice in a row, more often than num_max_dispatch_tokens_per_rank leaves room for",
    low_words.NOT_SENT.value: "topk_idx of a combine had ids that its dispatch had not in the same places",
}
# What was waited for, by phase, and what the last word seen means.
_PHASES = {
    words.PHASE_NOTIFY.value: ("begin", "call", "it has begun {} calls: it is not in this call, or has ended"),
    words.PHASE_ROWS.value: ("end", "call", "it has begun it, and ended {}: its rows did not all arrive"),
    low_words.PHASE_ARRIVED.value: ("send its part of", "low-latency call", "its last part was of call {}: it is not in it, or has ended"),
    low_words.PHASE_CONSUMED.value: ("call the hook of", "low-latency call", "the last of those that it has consumed is call {}"),
}
_FAILED = "this Buffer is failed: reset it on every rank, or destroy it and make a new one"


def no_room(operation: str, rank: int, needed: int, room: int) -> CapacityError:
    """A rank's data region is too small."""
    return CapacityError(
        f"{operation}: rank {rank} needs {needed} bytes of its data region and has {room} free in one piece; give a larger num_nvl_bytes, "
        "or let go of tensors received before"
    )


def status_error(status: Sequence[int], rank: int, operation: str) -> ExpertwireError | None:
    """(status, peer, wanted, got) of an operation that moved no rows; None: it did."""
    code, peer, want, got = status
    if code == 0:
        return None
    if code == words.S_CAPACITY.value:
        return no_room(operation, peer, want, got)
    if code == words.S_UNSENT.value:
        return InvalidArgumentError(f"rank {rank}: {operation}: its handle is of call {want}, which moved no rows: dispatch again")
    return MismatchError(
        f"rank {rank}: {operation}: ranks disagree on {_HEADER.get(code // 16, 'a header')}: rank 0 has {want}, rank {peer} has {got}"
    )


def raise_status(status: Sequence[int], rank: int, operation: str) -> None:
    """Raise what `status_error` finds."""
    error = status_error(status, rank, operation)
    if error is not None:
        raise error


def low_latency_status(status: Sequence[int], rank: int, operation: str) -> ExpertwireError | None:
    """The same of a low-latency call."""
    code, peer, want, got = status
    if code == 0:
        return None
    if code == low_words.S_MISSING.value:
        return MismatchError(f"rank {rank}: {operation}: rank {peer} brought back {got} rows of {want} that were sent there")
    if code == low_words.S_CHANGED.value:
        return StateError(f"rank {rank}: {operation}: by its handle {got} rows had come, by its dispatch {want}: its memory has changed")
    return MismatchError(f"rank {rank}: {operation}: ranks disagree on {_LOW_HEADER[code // 16]}: {want} elsewhere, rank {peer} has {got}")


def failure(record: Sequence[int], here: int) -> ExpertwireError:
    """What a kernel wrote when it gave up, or was told that another rank's had."""
    rank, phase, peer, want, seen = (
        record[place.value] for place in (words.F_RANK, words.F_PHASE, words.F_PEER, words.F_WANT, words.F_SEEN)
    )
    if phase == words.PHASE_TWO.value:
        return StateError(
            f"rank {here}: two operations of this Buffer ran at the same time on rank {rank}, as replays of two graphs on two streams do; "
            f"replay them one after the other. {_FAILED.capitalize()}"
        )
    what, call, last = _PHASES[phase]
    if record[words.F_CODE.value] == words.TOLD.value:
        asked = f"rank {here}: rank {rank} waited until its deadline for rank {peer} to {what} a {call}, and gave up"
        return DeadlineError(f"{asked}; {_FAILED}")
    return DeadlineError(
        f"rank {rank}: a kernel waited until its deadline for rank {peer} to {what} {call} {want}; {last.format(seen)}. "
        f"{_FAILED.capitalize()}"
    )


def raise_recorded(record: torch.Tensor, rank: int, status: Status = status_error) -> None:
    """Raise what is in the record that kernels of a mode write to. What does not end the Buffer is said once."""
    found = record.tolist()
    if not any(found):
        return
    if found[words.F_CODE.value]:
        raise failure(found, rank)
    first = words.F_OVERFLOW.value
    if found[first]:
        record[first] = 0
        over, total, most, epoch = found[first] - 1, *found[first + 1 : first + 4]
        raise WorstTokensError(
            f"dispatch (call {epoch}): rank {over} was sent {total} rows and num_worst_tokens is {most}; the last {total - most} were left "
            f"out. Give num_worst_tokens of at least {total}; the Buffer works on",
            over,
            total,
            most,
            epoch,
        )
    if found[words.F_BAD_ID.value]:
        record[words.F_BAD_ID.value] = 0
        raise InvalidArgumentError("topk_idx, given to an earlier get_dispatch_layout, had ids that are neither -1 nor in [0, num_experts)")
    if wrong := found[low_words.F_ROUTING.value]:
        record[low_words.F_ROUTING.value] = 0
        said = "; ".join(text for bit, text in _ROUTING.items() if wrong & bit)
        raise InvalidArgumentError(f"rank {rank}: an earlier low-latency call: {said}; those rows were left out")
    first = words.F_STATUS.value
    error = status(found[first : first + 4], rank, "an earlier call")
    if error is not None:
        record[first] = 0
        raise error
