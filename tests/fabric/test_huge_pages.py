"""Regions in huge pages, where the kernel has them: what is asked, what is seen in this process, and that the rest is as it was."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from expertwire.fabric import Endpoint
from fabric.ranks import LOCAL

HUGE_BYTES = 2 << 20
REST_BYTES = 12_345  # behind the last whole huge page
MADV_COLLAPSE = 25
libc = ctypes.CDLL(None, use_errno=True)


def mapped_whole(address: int) -> int:
    """Bytes of the mapping at `address` that one entry of a page table maps 2 MiB of (proc(5), smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = int(line.split("-", 1)[0], 16) == address
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.parametrize("whole", [1, 33])  # 33: more than are asked for at once
def test_a_large_region_lies_in_huge_pages_where_the_kernel_has_them(whole: int) -> None:
    count = whole * HUGE_BYTES + REST_BYTES
    endpoint = Endpoint(0, 1, LOCAL)
    try:
        region = endpoint.region("data", count)
        address = endpoint.native.region_address(endpoint.native.region("data"))
        assert address % HUGE_BYTES == 0
        assert endpoint.native.region_bytes(endpoint.native.region("data")) == count
        memory = (ctypes.c_char * count).from_address(address)
        assert not any(memory.raw[at] for at in (0, HUGE_BYTES - 1, HUGE_BYTES, count - 1))
        ctypes.memset(address, 7, count)
        assert memory.raw.count(7) == count
        found = mapped_whole(address)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole * HUGE_BYTES), MADV_COLLAPSE) != 0:
            pytest.skip(f"this kernel gives a memfd no huge pages now: {os.strerror(ctypes.get_errno())}")
        assert found == whole * HUGE_BYTES, "the kernel has huge pages for it, and they were not taken when it was made"
        del region
    finally:
        endpoint.close()
