"""What kernels report to the host, as errors in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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

_HEADER = {
    words.H_OPERATION.value: "the operation (1 dispatch, 2 dispatch with a handle, 3 combine)",
    words.H_HANDLE.value: "the dispatch that the handle is of (its call number)",
    words.H_WORST.value: "num_worst_tokens",
    words.H_ROW.value: "the bytes of a row",
    words.H_SHAPE.value: "what travels beside a row (top-k, ids, weights, scales)",
    words.H_EXPERTS.value: "the number of experts",
}


_FAILED = "this Buffer is failed: destroy it on every rank and make a new one"


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
    if code == words.S_BUSY.value:
        return StateError(
            f"rank {rank}: {operation}: two operations of this Buffer ran at the same time, as replays of two graphs on two streams do; "
            "replay them one after the other"
        )
    return MismatchError(
        f"rank {rank}: {operation}: ranks disagree on {_HEADER.get(code // 16, 'a header')}: rank 0 has {want}, rank {peer} has {got}"
    )


def raise_status(status: Sequence[int], rank: int, operation: str) -> None:
    """Raise what `status_error` finds."""
    error = status_error(status, rank, operation)
    if error is not None:
        raise error


def deadline_error(record: Sequence[int], here: int) -> DeadlineError:
    """What a kernel wrote when it gave up, or was told that another rank's had."""
    rank, phase, peer, want, seen = (
        record[place.value] for place in (words.F_RANK, words.F_PHASE, words.F_PEER, words.F_WANT, words.F_SEEN)
    )
    begun = phase == words.PHASE_NOTIFY.value
    if record[words.F_CODE.value] == words.TOLD.value:
        what = "begin a call" if begun else "end a call that it has begun"
        return DeadlineError(f"rank {here}: rank {rank} waited until its deadline for rank {peer} to {what}, and gave up; {_FAILED}")
    if begun:
        what = f"begin call {want}; it has begun {seen} calls: it is not in this call, or has ended"
    else:
        what = f"end call {want}, which it has begun; it has ended {seen}: its rows did not all arrive"
    return DeadlineError(f"rank {rank}: a kernel waited until its deadline for rank {peer} to {what}. {_FAILED.capitalize()}")


def raise_recorded(record: torch.Tensor, rank: int) -> None:
    """Raise what is in the record that kernels write to. What does not end the Buffer is said once."""
    found = record.tolist()
    if found[words.F_CODE.value]:
        raise deadline_error(found, rank)
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
    first = words.F_STATUS.value
    if found[first]:
        record[first] = 0
        raise_status(found[first : first + 4], rank, "an earlier call")
