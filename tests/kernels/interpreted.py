"""Ranks that run the GPU kernels in Triton's interpreter, over memory that they share."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; this module is imported in ranks of these tests alone

import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime import interpreter

from expertwire.ep import Buffer, backends
from expertwire.ep.bootstrap import Launch
from expertwire.ep.cuda import backend
from expertwire.ep.cuda.exchange import Exchange, Tuning, control_bytes
from expertwire.ep.cuda.low_latency_exchange import LowLatencyExchange, LowLatencyTuning
from expertwire.ep.cuda.symmetric import Symmetric
from expertwire.ep.event import in_calling_thread
from harness import Rank

DATA_BYTES = 4 << 20
EXPERTS_MAX = 64


class _Patched:
    """Triton's language as its interpreter has it, patched once for a kernel.

    The interpreter (triton 3.9) patches it again at each call of a function within a kernel, where that changes nothing any more: more than
    half of the time that a kernel took.
    """

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._done: list[Any] = []  # modules, of the kernel that runs
        self._scope: Any = None

    def __call__(self, function: Any) -> _Patched:
        needed = [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]
        if not needed or any(module not in self._done for module in needed):
            scope = self._patch(function)
            self._scope = self._scope or scope  # the kernel's own; those of functions within it are never restored
            self._done += needed
        return self

    def restore(self) -> None:
        """The kernel has ended."""
        self._scope.restore()
        self._scope, self._done = None, []


interpreter._patch_lang = _Patched()


def shared(rank: Rank, name: str, length: int) -> Symmetric:
    """Memory of every rank, mapped here by files that nobody can see any more when this returns."""

    def gather(mine: Any) -> list[Any]:
        answers: list[Any] = [None] * rank.size
        dist.all_gather_object(answers, mine, group=rank.group)
        return answers

    return mapped(Launch(rank.rank, rank.size, gather), length, name=name)


def mapped(launch: Launch, length: int, _device: object = None, name: str = "memory") -> Symmetric:
    """The same in place of `symmetric.allocate`."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, length)
    paths = launch.all_gather(f"/proc/{os.getpid()}/fd/{descriptor}")
    maps = []
    for path in paths:
        with Path(path).open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), length))
    launch.all_gather(None)
    os.close(descriptor)
    addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps)
    return Symmetric(launch.rank, addresses, length, torch.device("cpu"), maps)


def exchange_of(rank: Rank, timeout_ms: int = 20_000, **tuning: Any) -> tuple[Exchange, Symmetric]:
    """An exchange of these ranks, made once, and its data region."""
    key = ("exchange", rank.size, timeout_ms)
    if key not in rank.kept:
        control = shared(rank, "control", control_bytes(rank.size, EXPERTS_MAX))
        data = shared(rank, "data", DATA_BYTES)
        chosen = Tuning(**{"programs": 2, "combine_programs": 2, **tuning})
        rank.kept[key] = Exchange(control, data, EXPERTS_MAX, timeout_ms, chosen), data
    return rank.kept[key]


def over(data: Symmetric, offset: int, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """A copy of what lies in this rank's data region."""
    count = shape[0] * shape[1]
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(data.address + offset)
    return torch.frombuffer(bytearray(raw), dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


class Point:
    """A point in the work of the interpreter, which has ended when a launch returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoStreams:
    """In place of `CommStream`."""

    stream = None
    caller = None
    ordered = staticmethod(in_calling_thread)
    point = mark = staticmethod(lambda _stream=None: Point())

    def __init__(self, _device: torch.device) -> None: ...

    def capturing(self) -> bool:
        return False

    def wait_for(self, _mark: object) -> None: ...

    def synchronize(self) -> None: ...


def buffer_of(rank: Rank, **options: Any) -> Buffer:
    """A Buffer on CUDA tensors, but for the GPU: its kernels run in the interpreter, on CPU tensors. Made once for each set of options."""
    key = ("interpreted", rank.size, *sorted(options.items()))
    if key not in rank.kept:
        backends.device_type = lambda _device: "cuda"
        backend.local_device = lambda: (torch.device("cpu"), f"GPU of rank {rank.rank}")
        backend.allocate = mapped
        backend.CommStream = NoStreams  # type: ignore[assignment,misc]
        backend.tuning_of = lambda _sms, _sharing: Tuning(programs=2, combine_programs=2)
        few = LowLatencyTuning(send_programs=2, pack_programs=2, sum_programs=2, sum_block=512)
        backend.LowLatencyExchange = lambda *given: LowLatencyExchange(*given, few)  # type: ignore[assignment,misc]
        rank.kept[key] = Buffer(
            rank.group, **{"num_nvl_bytes": DATA_BYTES, "timeout_ms": 20_000, "max_local_experts": EXPERTS_MAX, **options}
        )
    return rank.kept[key]
