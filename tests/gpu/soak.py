"""Random cases of both modes and replays of graphs on GPUs for a while, each checked by the oracle: `scripts/gpu_check` calls this.

python tests/gpu/soak.py --ranks 4 --seconds 60 [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from ep.cases import Case
from ep.low_latency_work import Case as LowCase
from ep.test_exchange_matrix import expected
from gpu import graphs, low_latency, work
from harness import World

HIDDENS = (8, 64, 1040, 2048, 7168)  # few: each shape compiles kernels of its own
TOPKS = (1, 4, 8)


def drawn(seed: int, ranks: int) -> Case:
    """A case of the high-throughput mode."""
    draw = random.Random(seed)
    tokens = tuple(draw.choice((0, 1, 7, 30, 64)) for _ in range(ranks))
    return Case(
        (0,) * ranks,
        tokens,
        hidden=draw.choice(HIDDENS),
        experts=draw.choice((ranks, 32, 37)) if draw.random() < 0.8 else 256,
        topk=draw.choice(TOPKS),
        ids=draw.choice(("random", "random", "sparse", "none", "same", "skewed")),
        biases=draw.choice((0, 0, 1, 2)),
        scales=draw.choice(("", "", "float32")),
        seed=seed,
    )


def low(seed: int) -> LowCase:
    """A case of the low-latency mode."""
    draw = random.Random(seed)
    return LowCase(
        tokens_max=draw.choice((8, 32)),
        hidden=draw.choice((64, 1040, 2048)),
        experts=32,
        topk=4,
        ids=draw.choice(("random", "sparse", "none", "skewed")),
        tokens=draw.choice(("full", "some", "none")),
        fp8=draw.choice(("", "exact", "ue8m0")),
        hook=draw.random() < 0.5,
        zero_copy=draw.random() < 0.3,
        seed=seed,
    )


def compare(want: dict[str, Any], got: dict[str, Any]) -> None:
    """What the oracle has of it, bit for bit."""
    for name in got.keys() & want.keys():
        if isinstance(want[name], np.ndarray):
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        else:
            assert got[name] == want[name], name


def main() -> int:
    """0 where every call was right; the seed of one that was not is said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    world = World(options.ranks)
    counts = {"high throughput": 0, "fixed size": 0, "low latency": 0, "graphs": 0}
    seed = options.seed
    end = time.monotonic() + options.seconds
    try:
        while time.monotonic() < end:
            if seed % 10 == 0:
                world.run(options.ranks, graphs.two_shapes)
                counts["graphs"] += 1
            elif seed % 3 == 0:
                world.run(options.ranks, low_latency.run_cases, [LowCase(tokens_max=64, hidden=2048, experts=32), low(seed)])
                counts["low latency"] += 1
            else:
                case = drawn(seed, options.ranks)
                worst = (sum(case.tokens) + 3) * (seed % 2)
                for want, got in zip(expected(case), world.run(options.ranks, work.run_case, case, worst), strict=True):
                    compare(want, got)
                counts["fixed size" if worst else "high throughput"] += 1
            seed += 1
    except Exception as error:
        print(f"seed {seed} of {options.ranks} ranks failed: {error}", flush=True)
        return 1
    finally:
        world.close()
        print(f"seeds {options.seed} to {seed - 1}: {counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
