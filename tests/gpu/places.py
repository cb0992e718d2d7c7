"""What a rank does in tests of where things are: it is the first thing that its process does with GPUs."""

from __future__ import annotations

import os
import subprocess

import torch

from ep.cases import Case
from expertwire.ep import Buffer
from gpu import work
from harness import Rank


def contexts() -> dict[str, list[int]]:
    """Process ids by GPU, as the driver has them."""
    words = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    found: dict[str, list[int]] = {}
    for line in said.splitlines():
        uuid, pid = line.split(", ")
        found.setdefault(uuid, []).append(int(pid))
    return found


def on_its_own(rank: Rank, devices: tuple[int, ...]) -> tuple[list[str], str]:
    """A Buffer on the current device, in a process that was told another by its launcher: the GPUs that this process is on, and the one
    that it should be on."""
    os.environ["LOCAL_RANK"] = "0"  # of this process alone, as a launcher sets it that gives every worker the same
    torch.cuda.set_device(devices[rank.rank])
    buffer = Buffer(rank.group, num_nvl_bytes=8 << 20, device="cuda", timeout_ms=30_000)
    case = Case((0,) * rank.size, (9,) * rank.size, hidden=1024, seed=5)
    work.run_case(rank, case, buffer=buffer)
    uuid = f"GPU-{torch.cuda.get_device_properties(devices[rank.rank]).uuid}"
    found = [one for one, pids in contexts().items() if os.getpid() in pids]
    buffer.destroy()
    return found, uuid
