"""Runs small shapes of both modes under compute-sanitizer, a rank a process and each under its own: `scripts/gpu_check` calls this.

python tests/gpu/sanitized.py --tool memcheck --ranks 2 --log FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

FOUND = 9  # exit status where the tool found something
LIMIT_S = 140
TIMEOUT_MS = 100_000  # of a call: checked kernels are slow


def rank_main(options: argparse.Namespace) -> None:
    """Every kind of kernel once: layout, notify, dispatch of both types, again, combine, stage, worst tokens, and the low-latency ones."""
    import torch
    import torch.distributed as dist

    from ep.cases import Case
    from ep.low_latency_work import Case as LowCase
    from gpu import low_latency, work
    from harness import Rank

    store = dist.FileStore(options.store, options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks, timeout=timedelta(seconds=LIMIT_S))
    rank = Rank(options.rank, options.ranks, dist.group.WORLD)
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
    print(f"rank {options.rank}: done", flush=True)


def main() -> int:
    """Start the ranks; 1 where a tool found something or a rank did not end well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank >= 0:
        rank_main(options)
        return 0
    options.log.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        words = ["compute-sanitizer", f"--tool={options.tool}", f"--error-exitcode={FOUND}", "--print-limit=30"]
        own = [sys.executable, __file__, "--ranks", str(options.ranks), "--store", f"{folder}/store", "--log", str(options.log)]
        ranks = [
            subprocess.Popen([*words, f"--log-file={options.log}/rank{rank}.txt", *own, "--rank", str(rank)])
            for rank in range(options.ranks)
        ]
        try:
            statuses = [one.wait(LIMIT_S) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
    for rank, status in enumerate(statuses):
        log = options.log / f"rank{rank}.txt"
        said = log.read_text(errors="replace").splitlines() if log.exists() else ["no log"]
        print(f"rank {rank}: status {status}; {said[-1] if said else 'the log is empty'}")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
