"""Registered memory."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from expertwire.errors import CapacityError, InvalidArgumentError, StateError

if TYPE_CHECKING:
    import numpy
    import torch

    from expertwire.fabric.endpoint import Endpoint


class Region:
    """Memory that peers may write and read: `endpoint.region(name, bytes)` or `endpoint.register(address, bytes)`.

    A context manager; `close()` ends it. Views (`memoryview`, `numpy`, `torch`) share its memory without a copy and keep it mapped: close()
    is refused while one of them is alive.
    """

    def __init__(self, endpoint: Endpoint, number: int, name: str, *, shared: bool) -> None:
        self._endpoint = endpoint
        self._native = endpoint.native
        self._views: list[weakref.ref[Any]] = []
        self._closed = False
        self.number = number
        self.name = name
        self.shared = shared
        self.bytes = self._native.region_bytes(number)
        self.address = self._native.region_address(number)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.bytes} bytes at {self.address:#x}"
        return f"Region({self.name!r}, {state})"

    def __len__(self) -> int:
        return self.bytes

    def __enter__(self) -> Region:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it was deregistered."""
        return self._closed

    def fileno(self) -> int:
        """The memfd behind it, borrowed. Raises `StateError` for the caller's own memory."""
        self.require_open()
        number = self._native.region_fd(self.number)
        if number < 0:
            raise StateError(f"region {self.name!r} is the caller's memory and has no descriptor")
        return number

    def key(self) -> bytes:
        """What a peer needs in order to reach it (`Endpoint.announce()`), where it is not in a `blob()`; empty: no peer can."""
        self.require_open()
        return self._native.region_key(self.number)

    def memoryview(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """`nbytes` bytes from `offset`, writable, format 'B'. Raises `InvalidArgumentError` beyond the region."""
        self.require_open()
        count = self.bytes - offset if nbytes is None else nbytes
        if not (0 <= offset <= self.bytes and 0 <= count <= self.bytes - offset):
            raise InvalidArgumentError(f"{count} bytes at offset {offset} do not lie within region {self.name!r} of {self.bytes} bytes")
        array: Any = (ctypes.c_ubyte * count).from_address(self.address + offset)
        array.owner = (self._native, self._endpoint)  # whoever holds the view holds the mapping
        self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(array))
        return memoryview(array).cast("B")

    def numpy(self, dtype: Any = "uint8", shape: Sequence[int] | None = None, offset: int = 0) -> numpy.ndarray[Any, Any]:
        """An array of that dtype and shape (all whole items, one dimension, by default) from `offset` bytes."""
        import numpy

        kind = numpy.dtype(dtype)
        sizes = self._shape(kind.itemsize, shape, offset)
        view = self.memoryview(offset, math.prod(sizes) * kind.itemsize)
        return numpy.frombuffer(view, dtype=kind).reshape(sizes)

    def torch(self, dtype: torch.dtype, shape: Sequence[int] | None = None, offset: int = 0) -> torch.Tensor:
        """A CPU tensor of that dtype and shape (all whole items, one dimension, by default) from `offset` bytes."""
        import torch

        sizes = self._shape(dtype.itemsize, shape, offset)
        if math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        return torch.frombuffer(self.memoryview(offset, math.prod(sizes) * dtype.itemsize), dtype=dtype).reshape(sizes)

    def close(self, timeout_ms: int | None = None) -> None:
        """Deregister it. Idempotent. Raises `StateError` while a request uses it (after `timeout_ms`) or a view of it is alive."""
        if self._closed or self._native.closed:
            self._closed = True
            return
        if self.shared and any(view() is not None for view in self._views):
            raise StateError(f"region {self.name!r} cannot be closed while views of its memory are alive; drop them first")
        self._native.deregister_region(self.number, self._endpoint.timeout_ms if timeout_ms is None else timeout_ms)
        self._closed = True
        self._endpoint.let_go(self.number)

    def require_open(self) -> None:
        """Raises `StateError` once it is closed."""
        if self._closed:
            raise StateError(f"region {self.name!r} is closed")

    def _shape(self, item_bytes: int, shape: Sequence[int] | None, offset: int) -> tuple[int, ...]:
        if shape is None:
            return ((self.bytes - offset) // item_bytes,)
        sizes = tuple(shape)
        if any(size < 0 for size in sizes):
            raise InvalidArgumentError(f"shape is {sizes}; no size may be negative")
        needed = math.prod(sizes) * item_bytes
        if not 0 <= offset <= self.bytes or needed > self.bytes - offset:
            raise CapacityError(f"shape {sizes} needs {needed} bytes at offset {offset}; region {self.name!r} has {self.bytes} bytes")
        return sizes
