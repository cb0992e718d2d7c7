"""Launches of kernels whose numbers are never specialised, and what such kernels are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from expertwire.errors import StateError

ALIGNMENT_BYTES = 16  # of what kernels take: the widest load
INDEX_TYPES = {torch.int64: tl.int64, torch.int32: tl.int32}
UNITS = {16: (8, tl.int64), 8: (8, tl.int64), 4: (4, tl.int32), 2: (2, tl.int16), 1: (1, tl.int8)}  # by alignment: bytes, type of a move


class Launches:
    """Triton's own way binds and hashes the arguments each time, some 30 µs: ours are numbers, so the kernel compiled for these options is
    the one. `kernel.warmup` compiles; indexing what it gives by a grid loads the code, and gives what launches it, which is kept."""

    def __init__(self) -> None:
        self._loading = False
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...], dict[int, Any]]] = {}
        self._loaded: set[tuple[Hashable, ...]] = set()

    def load(self, shape: tuple[Hashable, ...], launches: Callable[[], object], capturing: Callable[[], bool]) -> None:
        """Compile and load what this shape, which begins with its operation, needs before the first of its kernels waits: a driver may load
        nothing beside one that runs. Each rank does so for itself: another that waits meanwhile holds no load up, for one program of it
        waits (8 ranks on one H200 under MPS). Ranks that went together would meet a deadline where their shapes differ, which kernels
        name."""
        if shape in self._loaded:
            return
        if capturing():
            raise StateError(f"{shape[0]} of a shape that is new to this Buffer cannot be recorded into a graph: make one such call before")
        with self.loading():
            launches()
        self._loaded.add(shape)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Kernels called inside are compiled and loaded, and none is launched."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def __call__(self, kernel: Any, programs: int, *arguments: int, **options: Any) -> None:
        """Launch. Options: constants in the kernel's order, then what Triton takes."""
        if self._interpreted:
            if not self._loading:
                kernel[(programs,)](*arguments, **options)
            return
        key = (id(kernel), *options.values())  # hashing a kernel takes a lock; kernels are never forgotten
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel.warmup(*arguments, grid=(programs,), **options)
            constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
            found = self._compiled[key] = (compiled, constants, {})
        run = found[2].get(programs)
        if run is None:
            run = found[2][programs] = found[0][(programs, 1, 1)]
        if not self._loading:
            run(*arguments, *found[1])


def next_power(value: int) -> int:
    """The least power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def alignment_of(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all of them."""
    bits = ALIGNMENT_BYTES
    for number in numbers:
        bits |= number
    return bits & -bits


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy made on the current stream. A lazily negated view is contiguous and has the wrong bytes. One that
    begins at an odd address is copied, too: the kernel for it would have to be loaded on this rank alone."""
    if tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
