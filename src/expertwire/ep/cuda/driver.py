"""NVIDIA's driver by ctypes: allocations of their own, shared between processes by CUDA IPC.

torch's allocator shares whole segments and may remap them, so what peers map is allocated here. All calls work in the current context,
which torch has made for the current device.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref

import torch

from expertwire.errors import CapacityError, ExpertwireError, UnavailableError

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag there is
HANDLE_BYTES = 64


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"NVIDIA's driver library cannot be loaded ({error}): CUDA tensors need it") from error
    library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
    library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
    library.cuMemsetD8_v2.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t)
    library.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_IpcHandle), ctypes.c_uint64)
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint)
    library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
    library.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    return library


def _check(what: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        kind = CapacityError if status == _OUT_OF_MEMORY else ExpertwireError
        raise kind(f"{what} failed: CUDA driver error {status}, {(text.value or b'unknown').decode()}")


class Allocation:
    """Zeroed device memory of its own, freed when this object dies or is closed."""

    def __init__(self, length: int, device: torch.device) -> None:
        torch.cuda.current_stream(device)  # torch makes its context first
        found = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.empty(1, device=device)
            _check(f"allocating {length} bytes on {device}", _driver().cuMemAlloc_v2(ctypes.byref(found), length))
            self.address, self.length = int(found.value), length
            self.close = weakref.finalize(self, _free, self.address, os.getpid(), device)
            _check("zeroing memory", _driver().cuMemsetD8_v2(self.address, 0, length))
            torch.cuda.synchronize(device)

    def handle(self) -> bytes:
        """What another process opens it by."""
        made = _IpcHandle()
        _check("sharing memory by CUDA IPC", _driver().cuIpcGetMemHandle(ctypes.byref(made), self.address))
        return ctypes.string_at(ctypes.addressof(made), HANDLE_BYTES)


class Mapping:
    """Another process's allocation, mapped here until this object dies or is closed."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        given = _IpcHandle()
        ctypes.memmove(ctypes.addressof(given), handle, HANDLE_BYTES)
        found = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.empty(1, device=device)
            status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(found), given, _LAZY_PEER_ACCESS)
        _check(f"mapping a peer's memory on {device} by CUDA IPC (has it peer access to the other GPU?)", status)
        self.address = int(found.value)
        self.close = weakref.finalize(self, _unmap, self.address, os.getpid(), device)


def _free(address: int, pid: int, device: torch.device) -> None:
    if os.getpid() == pid:  # a forked child has no context
        with torch.cuda.device(device):
            _driver().cuMemFree_v2(address)


def _unmap(address: int, pid: int, device: torch.device) -> None:
    if os.getpid() == pid:
        with torch.cuda.device(device):
            _driver().cuIpcCloseMemHandle(address)
