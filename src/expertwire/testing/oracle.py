"""The payload oracle: bytes that a reader can check without having seen them.

Every byte mixes the whole seed, which stands for (source, epoch), with its offset: a stale, shifted or torn byte is seen.
The simulation's C++ oracle uses the same function.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from expertwire.errors import InvalidArgumentError

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit words."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def payload_seed(source: int, epoch: int) -> int:
    """One seed for one payload. `source` is a rank, `epoch` counts its uses of the buffer."""
    return mix64(mix64(source + _GOLDEN) + epoch)


def payload(seed: int, offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Bytes [offset, offset + size) of the payload of `seed`, as uint8[size].

    Raises `InvalidArgumentError` for a negative offset or size.
    """
    if offset < 0 or size < 0:
        raise InvalidArgumentError(f"payload(offset={offset}, size={size}): neither may be negative")
    first = offset // 8
    count = (offset + size + 7) // 8 - first
    words = (np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(_GOLDEN)) + np.uint64(seed & _WORD)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    start = offset - first * 8
    return words.astype("<u8").view(np.uint8)[start : start + size]


@dataclasses.dataclass(frozen=True, slots=True)
class Misplaced:
    """The first byte that is not what it should be."""

    offset: int
    expected: int
    found: int
    wrong: int  # how many bytes of the range are wrong


def check_payload(data: npt.NDArray[np.uint8], seed: int, offset: int = 0) -> Misplaced | None:
    """Compares uint8[size] that should hold the payload of `seed` from `offset`. None: every byte is right."""
    expected = payload(seed, offset, data.size)
    wrong = np.flatnonzero(data != expected)
    if wrong.size == 0:
        return None
    first = int(wrong[0])
    return Misplaced(offset + first, int(expected[first]), int(data[first]), int(wrong.size))
