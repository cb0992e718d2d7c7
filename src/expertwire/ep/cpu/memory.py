"""Addresses of tensors, and tensors over memory that the core owns."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

Memory = ctypes.Array[ctypes.c_char] | torch.Tensor  # bytes

# What stands for the address of a tensor without elements: not 0, which would say that there is no tensor. Never read.
_NOWHERE = ctypes.create_string_buffer(64)


def address_of(tensor: torch.Tensor | None) -> int:
    """Where its elements are; 0 for None."""
    if tensor is None:
        return 0
    return tensor.data_ptr() if tensor.numel() else ctypes.addressof(_NOWHERE)


def apart(tensor: torch.Tensor, address: int, length: int) -> torch.Tensor:
    """A contiguous tensor, or a copy of one that reaches into those bytes: rows land there while it is read."""
    begin = tensor.data_ptr()
    beside = begin >= address + length or begin + tensor.numel() * tensor.element_size() <= address
    return tensor if beside else tensor.clone()


def tensor_over(memory: Memory, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over a part of the memory, which it keeps alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if isinstance(memory, torch.Tensor):
        return memory[offset : offset + count * dtype.itemsize].view(dtype).view(tuple(shape))
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))
