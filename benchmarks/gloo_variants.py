"""Ways to write the reduction of the gloo baseline, so that what we compare with is the best of them.

    python benchmarks/gloo_variants.py [--tokens 1024] [--ranks 8]

One process, one thread, the shapes of one rank of the demo. Prints milliseconds (median of 5) for each way to sum the returned rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch


def index_add_blocks(segments: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, hidden: int, block: int) -> torch.Tensor:
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    cuts = torch.arange(0, tokens + block, block)
    bounds = [torch.searchsorted(rows, cuts).tolist() for _, rows in segments]
    accumulator = torch.empty(block, hidden)
    for number, start in enumerate(range(0, tokens, block)):
        accumulator.zero_()
        for (data, rows), bound in zip(segments, bounds, strict=True):
            low, high = bound[number], bound[number + 1]
            if low < high:
                accumulator.index_add_(0, rows[low:high] - start, data[low:high].float())
        stop = min(start + block, tokens)
        out[start:stop] = accumulator[: stop - start]
    return out


def advanced_index_blocks(segments: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, hidden: int, block: int) -> torch.Tensor:
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    cuts = torch.arange(0, tokens + block, block)
    bounds = [torch.searchsorted(rows, cuts).tolist() for _, rows in segments]
    accumulator = torch.empty(block, hidden)
    for number, start in enumerate(range(0, tokens, block)):
        accumulator.zero_()
        for (data, rows), bound in zip(segments, bounds, strict=True):
            low, high = bound[number], bound[number + 1]
            accumulator[rows[low:high] - start] += data[low:high]
        stop = min(start + block, tokens)
        out[start:stop] = accumulator[: stop - start]
    return out


def row_loop(segments: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, hidden: int, block: int) -> torch.Tensor:
    """Row by row: add_ of a bf16 row to an fp32 row needs no conversion of its own."""
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    places: list[list[torch.Tensor]] = [[] for _ in range(tokens)]
    for data, rows in segments:
        for row, token in zip(data.unbind(0), rows.tolist(), strict=True):
            places[token].append(row)
    accumulator = torch.empty(hidden)
    for token, rows_of_token in enumerate(places):
        accumulator.zero_()
        for row in rows_of_token:
            accumulator.add_(row)
        out[token] = accumulator
    return out


def whole(segments: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, hidden: int, block: int) -> torch.Tensor:
    accumulator = torch.zeros(tokens, hidden)
    for data, rows in segments:
        accumulator.index_add_(0, rows, data.float())
    return accumulator.bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    present = torch.rand(arguments.ranks, arguments.tokens, generator=generator) < 0.656  # top-8 of 256 over 8 ranks
    segments = [(torch.randn(int(row.sum()), arguments.hidden, generator=generator).bfloat16(), row.nonzero()[:, 0]) for row in present]
    ways: list[tuple[str, Callable[..., torch.Tensor], int]] = [
        *((f"index_add, blocks of {block}", index_add_blocks, block) for block in (8, 16, 32, 64, 128, 256)),
        *((f"advanced indexing, blocks of {block}", advanced_index_blocks, block) for block in (16, 32, 64)),
        ("row by row", row_loop, 1),
        ("whole", whole, 1),
    ]
    expected = whole(segments, arguments.tokens, arguments.hidden, 1)
    for name, way, block in ways:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            result = way(segments, arguments.tokens, arguments.hidden, block)
            times.append(time.perf_counter() - begin)
        if not torch.equal(result, expected):
            raise SystemExit(f"{name}: wrong sum")
        print(f"{name:36s} {statistics.median(times) * 1e3:7.1f} ms")


if __name__ == "__main__":
    main()
