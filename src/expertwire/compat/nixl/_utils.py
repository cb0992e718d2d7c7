"""What callers import from `nixl._utils`: host memory by address, for programs that have no tensors."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]

_FILL = 0xBA


def _c() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


def malloc_passthru(size: int) -> int:
    """The address of `size` bytes of host memory. Raises `MemoryError`."""
    if size <= 0:
        raise ValueError(f"{size} bytes cannot be allocated; give at least 1")
    found = _c().malloc(size)
    if not found:
        raise MemoryError(f"{size} bytes of host memory cannot be had")
    return int(found)


def free_passthru(ptr: int) -> None:
    """Give back what `malloc_passthru` gave."""
    _c().free(ptr)


def ba_buf(ptr: int, size: int) -> None:
    """Fill it with bytes 0xBA."""
    ctypes.memset(ptr, _FILL, size)


def verify_transfer(ptr1: int, ptr2: int, size: int) -> None:
    """Raises `ValueError` at the first byte where the two differ."""
    one, other = ctypes.string_at(ptr1, size), ctypes.string_at(ptr2, size)
    if one != other:
        index = next(index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        raise ValueError(f"byte {index} of {size} is {one[index]:#x} at {ptr1:#x} and {other[index]:#x} at {ptr2:#x}")
