"""Launches of kernels whose numbers are never specialised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton


class Launches:
    """Triton's own way binds and hashes the arguments each time, some 30 µs: ours are numbers, so the kernel compiled for these options is
    the one. `kernel.warmup` compiles; indexing what it gives loads the code."""

    def __init__(self) -> None:
        self._loading = False
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

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
        key = (kernel, *options.values())
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel.warmup(*arguments, grid=(programs,), **options)
            constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
            found = self._compiled[key] = (compiled, constants)
        run = found[0][(programs, 1, 1)]
        if not self._loading:
            run(*arguments, *found[1])
