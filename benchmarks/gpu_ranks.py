"""Processes, one a rank, for benchmarks that run on one GPU or several: started under an MPS daemon of their own, and ended with it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What such a benchmark takes beside its own arguments; `--rank` and `--store` are given to the ranks alone."""
    parser.add_argument("--out", default="")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)


def run(script: str, options: argparse.Namespace, over_s: float, after_failure_s: float) -> int:
    """Run `script` once for each rank, with this process's arguments, and end all of them `over_s` seconds after `options.seconds`, or
    `after_failure_s` after one has failed. The largest exit status."""
    with tempfile.TemporaryDirectory(prefix="expertwire-") as folder:
        environment = dict(os.environ)
        if not options.no_mps:
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
            os.makedirs(f"{folder}/pipe")
            os.makedirs(f"{folder}/log")
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
        command = [sys.executable, script, *sys.argv[1:], "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)]
        try:
            end = time.monotonic() + options.seconds + over_s
            while any(one.poll() is None for one in ranks) and time.monotonic() < end:
                if any(one.returncode not in (0, None) for one in ranks):
                    end = min(end, time.monotonic() + after_failure_s)
                time.sleep(0.2)
        finally:
            for one in ranks:
                if one.poll() is None:
                    one.kill()
                one.wait()
            if not options.no_mps:
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, check=False, timeout=20)
        return max(abs(one.returncode) for one in ranks)
