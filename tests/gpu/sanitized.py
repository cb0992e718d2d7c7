"""Runs small shapes of both modes under compute-sanitizer, a rank a process and each under its own: `scripts/gpu_check` calls this.

python tests/gpu/sanitized.py --tool memcheck --ranks 2 --log FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

FOUND = 9  # exit status where the tool found something
LIMIT_S = 190
TIMEOUT_MS = 100_000  # of a call: checked kernels are slow


def rank_main(number: int, ranks: int, path: str) -> None:
    """Every kind of kernel once: layout, notify, dispatch of both types, again, combine, stage, worst tokens, and the low-latency ones."""
    import torch
    import torch.distributed as dist

    from ep.cases import Case
    from ep.low_latency_work import Case as LowCase
    from gpu import low_latency, work
    from harness import Rank

    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=timedelta(seconds=LIMIT_S))
    rank = Rank(number, ranks, dist.group.WORLD)
    buffer = work.buffer_of(rank, num_nvl_bytes=8 << 20, timeout_ms=TIMEOUT_MS)
    plain = Case((0,) * rank.size, (9,) * rank.size, hidden=264, experts=8 * rank.size + 1)
    for case in (plain, replace(plain, biases=2, ids="sparse", seed=1), replace(plain, scales="float32", index="int32", seed=2)):
        for worst in (0, sum(case.tokens) + 5):
            work.run_case(rank, case, worst, buffer=buffer)
    low = LowCase(tokens_max=8, hidden=264, experts=8 * rank.size + 1)
    low_latency.buffer_of(rank, low, TIMEOUT_MS)
    low_latency.run_cases(rank, [low, replace(low, fp8="exact", hook=False, seed=1), replace(low, fp8="ue8m0", zero_copy=True, seed=2)])
    torch.cuda.synchronize()
    for one in rank.kept.values():
        one.destroy()
    print(f"rank {number} of {ranks}: done", flush=True)


def main() -> int:
    """Start the ranks; 1 where a tool found something or a rank did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, with commas")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        rank_main(options.rank, int(options.ranks), options.store)
        return 0
    options.log.mkdir(parents=True, exist_ok=True)
    begun: dict[str, subprocess.Popen[bytes]] = {}
    statuses: dict[str, int | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, options.ranks.split(",")):
            own = [sys.executable, __file__, "--ranks", str(ranks), "--store", f"{folder}/store{ranks}", "--log", str(options.log)]
            for rank in range(ranks):
                name = f"{rank}_of_{ranks}"
                words = ["compute-sanitizer", f"--tool={options.tool}", f"--error-exitcode={FOUND}", "--print-limit=30"]
                if options.tool == "initcheck":
                    words.append("--check-api-memory-access=no")  # tests copy whole results, of which rows that nobody sent have no value
                begun[name] = subprocess.Popen([*words, f"--log-file={options.log}/{name}.txt", *own, "--rank", str(rank)])
        end = time.monotonic() + LIMIT_S
        try:
            for name, one in begun.items():
                try:
                    statuses[name] = one.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    statuses[name] = None
        finally:
            for one in begun.values():
                one.kill()
    for name, status in statuses.items():
        log = options.log / f"{name}.txt"
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
        print(f"rank {name}: {'not done in time' if status is None else f'status {status}'}; {said[-1] if said else 'no log'}")
    return int(any(status != 0 for status in statuses.values()))


if __name__ == "__main__":
    sys.exit(main())
