"""Checks of arguments, made before anything is sent: each error names the argument, its value and the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from expertwire.ep.config import CALL_ROWS_MAX, Config, require_int
from expertwire.ep.event import EventOverlap
from expertwire.ep.handle import Handle, Identity
from expertwire.ep.layout import expert_bounds
from expertwire.errors import (
    CapacityError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    StateError,
    UnavailableError,
    WorstTokensError,
)

# Device for "no device at all": meta, sparse and the like are named by it too.
_DEVICES = ("cpu", "cuda")
# Failures found before a row left, and by every rank alike where they concern all: the Buffer stays usable.
UNSENT = (InvalidArgumentError, UnavailableError, MismatchError, CapacityError)
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # as a dispatch returns them: FP8 with scales
ID_TYPES = (torch.int64, torch.int32)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCALE_TYPES = (torch.float32, torch.int32)  # int32: four UE8M0 exponents each


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> torch.Tensor:
    """`value` as a contiguous CPU tensor of one of the dtypes and the shape (a name: any length). Raises `InvalidArgumentError`."""
    if not isinstance(value, torch.Tensor):
        raise InvalidTypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise InvalidTypeError(f"{name} has dtype {value.dtype}; it must be {' or '.join(str(dtype) for dtype in dtypes)}")
    if value.layout != torch.strided:
        raise InvalidArgumentError(f"{name} has layout {value.layout}; it must be strided")
    if value.device.type not in _DEVICES:
        raise UnavailableError(f"{name} is on device {value.device}; it must be a CPU or a CUDA tensor")
    if value.dim() != len(shape) or any(isinstance(want, int) and got != want for got, want in zip(value.shape, shape, strict=True)):
        raise InvalidArgumentError(f"{name} has shape {list(value.shape)}; it must be [{', '.join(map(str, shape))}]")
    if value.device.type == "cuda":
        return value.detach()  # made contiguous by the backend, on its stream
    return value.detach().resolve_neg().contiguous()  # a lazily negated view is contiguous and has the wrong bytes


def rows(name: str, value: object, count: int | None = None, hidden: int | None = None) -> torch.Tensor:
    """BF16 rows [count, hidden], contiguous."""
    return _rows(name, value, (torch.bfloat16,), count, hidden)


def _rows(name: str, value: object, dtypes: Sequence[torch.dtype], count: int | None, hidden: int | None) -> torch.Tensor:
    found = tensor(name, value, dtypes, ("tokens" if count is None else count, "hidden" if hidden is None else hidden))
    if found.shape[1] < 1:
        raise InvalidArgumentError(f"{name} has shape {list(found.shape)}; a row needs at least 1 element")
    return found


@dataclass(frozen=True)
class Payload:
    """What a dispatch sends for each token, contiguous: a row, and the scales of its FP8 elements."""

    x: torch.Tensor
    scales: torch.Tensor | None = None


def payload(name: str, value: object, count: int | None = None) -> Payload:
    """BF16 rows [count, hidden], or a pair of FP8 rows and their scales f32 or int32 [count, any]."""
    if isinstance(value, torch.Tensor) and value.dtype in FP8_TYPES:
        raise InvalidTypeError(f"{name} has dtype {value.dtype} and no scales; FP8 rows are given as a tuple ({name}, scales)")
    if not isinstance(value, tuple | list):
        return Payload(rows(name, value, count))
    if len(value) != 2:
        raise InvalidArgumentError(f"{name} is a tuple of {len(value)}; it must be a tensor or a tuple of FP8 rows and their scales")
    found = _rows(f"{name}[0]", value[0], FP8_TYPES, count, None)
    scales = tensor(f"{name}[1], the scales,", value[1], SCALE_TYPES, (found.shape[0], "scales"))
    if scales.shape[1] < 1:
        raise InvalidArgumentError(f"{name}[1], the scales, has shape {list(scales.shape)}; a row needs at least 1 scale")
    return Payload(found, scales)


def expert_ids(name: str, value: object, tokens: int | None = None) -> torch.Tensor:
    """Expert numbers [T, K], int64 or int32. That each is −1 or an expert is checked where they are counted, before anything is sent."""
    found = tensor(name, value, ID_TYPES, ("tokens" if tokens is None else tokens, "top-k"))
    if found.shape[1] < 1:
        raise InvalidArgumentError(f"{name} has shape {list(found.shape)}; top-k must be at least 1")
    return found


def counts(name: str, value: object, length: int | None) -> torch.Tensor:
    """Counts i32[length], none negative; None: one for each expert."""
    found = tensor(name, value, (torch.int32,), ("experts" if length is None else length,))
    if found.device.type == "cpu" and found.numel() > 0 and int(found.min()) < 0:  # of a CUDA tensor nobody can know without waiting
        place = int((found < 0).nonzero()[0])
        raise InvalidArgumentError(f"{name}[{place}] is {int(found[place])}; a count must be at least 0")
    return found


def handle(value: object, buffer: Identity) -> Handle:
    """A handle that `buffer` made."""
    if not isinstance(value, Handle):
        raise InvalidTypeError(f"handle must be the Handle that a dispatch returned, got {type(value).__name__}")
    if value.buffer.number == buffer.number and value.buffer.shrinks != buffer.shrinks:
        raise InvalidArgumentError(
            f"handle was made by this Buffer before shrink {buffer.shrinks} ({value.buffer!r}, now {buffer!r}): its ranks, and the rows "
            "that it routes, are no more; dispatch again"
        )
    if value.buffer.number == buffer.number and value.buffer.resets != buffer.resets:
        raise InvalidArgumentError(
            f"handle was made by this Buffer before reset {buffer.resets} ({value.buffer!r}, now {buffer!r}): what it routes may not have "
            "arrived; dispatch again"
        )
    if value.buffer is not buffer:
        raise InvalidArgumentError(f"handle was made by another Buffer ({value.buffer!r}, not {buffer!r}): use the Buffer that dispatched")
    return value


def on_device(device: torch.device, **tensors: object) -> None:
    """Tensors, alone or in tuples, must be where the Buffer works."""
    for name, value in tensors.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, torch.Tensor) and one.device.type in _DEVICES and one.device != device:
                raise UnavailableError(
                    f"{name} is on device {one.device}; this Buffer was made for {device}: move it, or give Buffer(device=…)"
                )


def events(config: object, previous_event: object, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """What every operation takes beside its tensors."""
    if config is not None and not isinstance(config, Config):
        raise InvalidTypeError(f"config must be an expertwire.ep.Config or None, got {type(config).__name__}")
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        raise InvalidTypeError(f"previous_event must be an EventOverlap or None, got {type(previous_event).__name__}")
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise InvalidArgumentError(
            f"allocate_on_comm_stream is True with previous_event={previous_event!r} and async_finish={async_finish!r}; it needs both"
        )


def biases(value: object, count: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """None, one bias or two, each bf16 [count, hidden]."""
    if value is None:
        return ()
    given = value if isinstance(value, tuple | list) else (value,)
    if len(given) not in (1, 2):
        raise InvalidArgumentError(f"bias has {len(given)} tensors; it must be one tensor or a tuple of two")
    several = len(given) > 1
    return tuple(rows(f"bias[{place}]" if several else "bias", one, count, hidden) for place, one in enumerate(given))


def absent(reason: str, **arguments: object) -> None:
    """Each of the arguments must be None, for the reason given."""
    for name, value in arguments.items():
        if value is not None:
            raise InvalidArgumentError(f"{name} is given (type {type(value).__name__}); it must be None {reason}")


def present(reason: str, **arguments: object) -> None:
    """None of the arguments may be None, for the reason given."""
    for name, value in arguments.items():
        if value is None:
            raise InvalidArgumentError(f"{name} is None; it must be given {reason}")


def not_forked(pid_now: int, pid_made: int) -> None:
    """A forked child shares memory and connections with its parent: whatever it did would be done to the parent."""
    if pid_now != pid_made:
        raise StateError(f"this Buffer was made by process {pid_made} and is used by its forked child {pid_now}: make one in the child")


@dataclass(frozen=True)
class Routing:
    """The checked layout arguments of a dispatch without a handle; tensors contiguous."""

    num_experts: int
    bounds: list[int]  # experts of rank r: [bounds[r], bounds[r + 1])
    per_rank: torch.Tensor
    per_node: torch.Tensor | None
    per_expert: torch.Tensor
    in_rank: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_worst_tokens: int


def worst_tokens(value: object, of: Handle | None) -> int:
    """`num_worst_tokens`: 0 or a number of rows; of a repeated dispatch the handle's."""
    found = require_int("num_worst_tokens", value, 0, CALL_ROWS_MAX)
    if of is None:
        return found
    if found not in (0, of.num_worst_tokens):
        raise InvalidArgumentError(
            f"num_worst_tokens is {found} and handle's dispatch had {of.num_worst_tokens}; it must be the same, or 0, when handle is given"
        )
    return of.num_worst_tokens


def overflow(overflows: Sequence[tuple[int, int]], made: Handle, result: object) -> WorstTokensError:
    """What every rank raises where a rank was sent more rows than `num_worst_tokens`."""
    rank, total = overflows[0]
    most, epoch = made.num_worst_tokens, made.native.epoch
    others = [f"rank {other} of {rows}" for other, rows in overflows[1:]]
    return WorstTokensError(
        f"dispatch (call {epoch}): rank {rank} was sent {total} rows and num_worst_tokens is {most}; the last {total - most} were left out"
        f"{', and what was too many for ' + ', '.join(others) if others else ''}. Give num_worst_tokens of at least "
        f"{max(rows for _, rows in overflows)}; the Buffer works on, and `result` of this error has the rows that were kept",
        rank,
        total,
        most,
        epoch,
        result,
    )


def routing(tokens: int, node_of: Sequence[int], layout: Mapping[str, object], num_worst_tokens: int) -> Routing:
    """Check what `get_dispatch_layout` returned and the top-k, each for itself. That the counts are those of `is_token_in_rank` and
    `topk_idx` is checked by the exchange, which counts anyway, before anything is sent."""
    ranks, nodes = len(node_of), max(node_of) + 1
    needed = ["num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"]
    if nodes > 1:
        needed.append("num_tokens_per_rdma_rank")
    present("when handle is not", **{name: layout[name] for name in needed})
    in_rank = tensor("is_token_in_rank", layout["is_token_in_rank"], (torch.bool,), (tokens, ranks))
    per_rank = counts("num_tokens_per_rank", layout["num_tokens_per_rank"], ranks)
    per_node = topk_idx = topk_weights = None
    if layout["num_tokens_per_rdma_rank"] is not None:
        per_node = counts("num_tokens_per_rdma_rank", layout["num_tokens_per_rdma_rank"], nodes)
    per_expert = counts("num_tokens_per_expert", layout["num_tokens_per_expert"], None)
    num_experts = require_int("num_tokens_per_expert.shape[0], the number of experts,", per_expert.shape[0], 1)
    if layout["topk_idx"] is not None:
        topk_idx = expert_ids("topk_idx", layout["topk_idx"], tokens)
    if layout["topk_weights"] is not None:
        if topk_idx is None:
            raise InvalidArgumentError("topk_idx is None; it must be given when topk_weights is")
        topk_weights = tensor("topk_weights", layout["topk_weights"], (torch.float32,), (tokens, topk_idx.shape[1]))
    if num_worst_tokens and topk_idx is None:
        raise InvalidArgumentError(f"topk_idx is None; it must be given when num_worst_tokens is {num_worst_tokens}")
    bounds = expert_bounds(num_experts, ranks)
    return Routing(num_experts, bounds, per_rank, per_node, per_expert, in_rank, topk_idx, topk_weights, num_worst_tokens)
