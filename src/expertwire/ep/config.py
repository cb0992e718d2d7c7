"""`Config`, the tables of tuned values per number of ranks, and the size hints that callers allocate by. Pure; loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from expertwire.errors import InvalidArgumentError, InvalidTypeError

# (nvl send, nvl recv, rdma send, rdma recv) per number of ranks.
_Row = tuple[int, int, int, int]

DISPATCH_TABLE: Mapping[int, _Row] = MappingProxyType(
    {
        2: (24, 256, 6, 128),
        4: (6, 256, 6, 128),
        8: (6, 256, 6, 128),
        16: (36, 288, 20, 128),
        24: (32, 288, 8, 128),
        32: (32, 288, 8, 128),
        48: (32, 288, 8, 128),
        64: (32, 288, 8, 128),
        96: (20, 480, 12, 128),
        128: (20, 560, 12, 128),
        144: (32, 720, 12, 128),
        160: (28, 720, 12, 128),
    }
)
COMBINE_TABLE: Mapping[int, _Row] = MappingProxyType(
    {
        2: (10, 256, 6, 128),
        4: (9, 256, 6, 128),
        # DeepEP has 6 in the third place; it was found broken for two nodes of four, where 8 works.
        8: (4, 256, 8, 128),
        16: (4, 288, 12, 128),
        24: (1, 288, 8, 128),
        32: (1, 288, 8, 128),
        48: (1, 288, 8, 128),
        64: (1, 288, 8, 128),
        96: (1, 480, 8, 128),
        128: (1, 560, 8, 128),
        144: (2, 720, 8, 128),
        160: (2, 720, 8, 128),
    }
)

# What one received row needs beside its own bytes: source index, and ids and weights of up to this many experts (8 + 4 bytes each).
_HINT_TOPK = 16
_HINT_META_BYTES = 4 + _HINT_TOPK * 12
_ALIGNMENT = 128

# Limits of what a Buffer is asked for, all far above what any machine has: what exceeds them is a mistake, or would overflow the core.
REGION_BYTES_MAX = 1 << 48
LOCAL_EXPERTS_MAX = 1 << 20
ROWS_MAX = (1 << 31) - 1  # a row's source is an int32
CALL_ROWS_MAX = (1 << 28) - 1  # what a word of the exchange counts to, beside its epoch
HIDDEN_MAX = 1 << 24
TOPK_MAX = 1 << 16
SCALE_COLUMNS = 128  # of an FP8 row that share a scale


def require_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """`value` as an int in [least, most]. Raises `InvalidTypeError` or `InvalidArgumentError` naming all three."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidTypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    number = int(value.__index__())
    if number < least:
        raise InvalidArgumentError(f"{name} is {number}; it must be at least {least}")
    if most is not None and number > most:
        raise InvalidArgumentError(f"{name} is {number}; it must be at most {most}")
    return number


def align_up(value: int, alignment: int) -> int:
    """`value` rounded up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning values: positional or by keyword, readable attributes.

    `num_sms` says how many programs the kernels of an operation on CUDA tensors have. On CPU tensors only results that fit matter: chunk
    sizes are chosen from the staging ring there, so these values size the hints alone.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        require_int("num_sms", self.num_sms, 0)
        for fabric in ("nvl", "rdma"):
            send_name, receive_name = f"num_max_{fabric}_chunked_send_tokens", f"num_max_{fabric}_chunked_recv_tokens"
            send = require_int(send_name, getattr(self, send_name), 1)
            receive = require_int(receive_name, getattr(self, receive_name), 1)
            if send >= receive:
                raise InvalidArgumentError(f"{send_name} is {send}; it must be less than {receive_name}, which is {receive}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `Buffer(num_nvl_bytes=…)`: received rows of `hidden_bytes` from `num_ranks` ranks, with their ids and weights."""
        row_bytes = require_int("hidden_bytes", hidden_bytes, 1) + _HINT_META_BYTES
        ranks = require_int("num_ranks", num_ranks, 1)
        channels = max(self.num_sms // 2, 1)
        return align_up(channels * ranks * self.num_max_nvl_chunked_recv_tokens * row_bytes, _ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for `Buffer(num_rdma_bytes=…)`: rings to and from `num_ranks` ranks. 0 for one rank: nothing leaves the node."""
        row_bytes = require_int("hidden_bytes", hidden_bytes, 1) + _HINT_META_BYTES
        ranks = require_int("num_ranks", num_ranks, 1)
        if ranks == 1:
            return 0
        channels = max(self.num_sms // 2, 1)
        return align_up(2 * channels * ranks * self.num_max_rdma_chunked_recv_tokens * row_bytes, _ALIGNMENT)


def nearest_config(table: Mapping[int, _Row], num_ranks: int, num_sms: int) -> Config:
    """The entry of the table for `num_ranks`, or the nearest one (the smaller of two equally near): DeepEP refuses, we take any number."""
    ranks = require_int("num_ranks", num_ranks, 1)
    nearest = min(table, key=lambda entry: (abs(entry - ranks), entry))
    return Config(num_sms, *table[nearest])


def low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes for `Buffer(num_rdma_bytes=…, low_latency_mode=True)`, the formula that callers know."""
    tokens = require_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
    width = require_int("hidden", hidden, 1)
    require_int("num_ranks", num_ranks, 1)
    experts = require_int("num_experts", num_experts, 1)
    scales = width // 128
    dispatch_message = 16 + max(2 * width, width + 4 * scales)
    combine_message = 4 * scales + 2 * width
    send = max(tokens * dispatch_message, experts * tokens * combine_message)
    receive = experts * tokens * max(dispatch_message, combine_message)
    signals = align_up(4 * experts, 128)
    return (2 * (send + receive + signals) + 128) // 128 * 128
