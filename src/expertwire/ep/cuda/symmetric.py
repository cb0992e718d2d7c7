"""Memory that every rank of a node has mapped: a local allocation, and where each peer's is mapped here."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from expertwire.ep.bootstrap import Launch, together
from expertwire.ep.config import align_up
from expertwire.ep.cuda.driver import Allocation, Mapping

_GRANULARITY = 2 << 20  # what is smaller may share a page with other allocations of this process, and IPC shares pages


@dataclass(frozen=True)
class Symmetric:
    """`addresses[r]`: where the allocation of rank r lies in this process. `owner` keeps it mapped."""

    rank: int
    addresses: tuple[int, ...]
    length: int
    device: torch.device
    owner: object = field(repr=False)

    @property
    def address(self) -> int:
        """Of this rank's own."""
        return self.addresses[self.rank]

    def unmap(self) -> None:
        """Let go of the others' memory; this rank's own lives as long as tensors over it."""
        if isinstance(self.owner, _Owner):
            for one in self.owner.maps:
                if one is not None:
                    one.close()


@dataclass
class _Owner:
    mine: Allocation
    maps: list[Mapping | None]


def allocate(launch: Launch, length: int, device: torch.device) -> Symmetric:
    """Allocate `length` bytes here, zeroed, and map what the others allocate. Collective: lengths are the same on all ranks, and what
    fails on one fails on all."""
    made: list[Allocation] = []

    def mine() -> bytes:
        made.append(Allocation(align_up(length, _GRANULARITY), device))
        return made[0].handle()

    handles = together(launch, mine)
    maps: list[Mapping | None] = []

    def theirs() -> None:
        maps.extend(None if peer == launch.rank else Mapping(handle, device) for peer, handle in enumerate(handles))

    together(launch, theirs)
    addresses = tuple(made[0].address if one is None else one.address for one in maps)
    return Symmetric(launch.rank, addresses, length, device, _Owner(made[0], maps))


class DeviceBytes:
    """Device memory as others take it in, by its `__cuda_array_interface__`. Lives as long as the tensors over it."""

    def __init__(self, address: int, length: int, device: torch.device, owner: object) -> None:
        self.device, self.owner = device, owner
        self.address, self.length = address, length
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}

    def whole(self) -> torch.Tensor:
        """All of it as bytes."""
        if not self.length:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":  # memory of the host, in Triton's interpreter
            memory = (ctypes.c_char * self.length).from_address(self.address)
            memory.owner = self  # type: ignore[attr-defined]
            return torch.frombuffer(memory, dtype=torch.uint8)
        return torch.as_tensor(self, device=self.device)


def device_tensor(memory: DeviceBytes | torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A tensor over a part of device memory, which it keeps alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=memory.device)
    whole = memory if isinstance(memory, torch.Tensor) else memory.whole()
    return whole[offset : offset + count * dtype.itemsize].view(dtype).view(tuple(shape))
