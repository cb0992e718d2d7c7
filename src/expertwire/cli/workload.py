"""Real text as the input of a mixture-of-experts layer: words, a seeded embedding, a seeded router, and the experts themselves.

Routing follows the words, so it has the skew of language. Each row gets noise seeded by its position, so no two rows are equal and a row
in the wrong place is seen.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from expertwire.errors import InvalidArgumentError, UnavailableError

NOISE = 0.25  # of a row's standard deviation
WEIGHT_SCALE = 2.5  # DeepSeek-V3's routed scaling factor
BLOCK_ROWS = 256  # of an expert's rows at a time, in memory that is kept: fresh pages cost more than the sums
EXPERT_SEED = 1 << 40
ROUTER_SEED = 1 << 41
POSITION_SEED = 1 << 42


@dataclass(frozen=True)
class Shape:
    """The layer: `experts` experts of width `width` on rows of `hidden` elements, `topk` of them for each token."""

    hidden: int = 7168
    experts: int = 256
    width: int = 32
    topk: int = 8


def read_text(path: Path | None) -> str:
    """The file's text, or the package's own README where none is given."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InvalidArgumentError(f"--text {path} cannot be read: {error.strerror}") from None
    source = Path(__file__).resolve().parents[3] / "README.md"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    try:
        text = importlib.metadata.metadata("expertwire")["Description"]
    except (importlib.metadata.PackageNotFoundError, KeyError):
        text = ""
    if not text:
        raise UnavailableError("the package's README is not installed with it: give a text with --text FILE")
    return text


def words(text: str, count: int) -> list[str]:
    """The first `count` tokens (words and marks with the space before them, as a byte-pair vocabulary has them), text repeated."""
    found = re.findall(r"\s?\w+|\s?[^\w\s]|\s+", text)
    if not found:
        raise InvalidArgumentError("the text has no words")
    return (found * (count // len(found) + 1))[:count]


def embed(tokens: list[str], hidden: int) -> torch.Tensor:
    """Rows bf16 [len(tokens), hidden]: the word's seeded embedding plus noise seeded by the position."""
    generator = torch.Generator()
    table: dict[str, torch.Tensor] = {}
    rows = torch.empty(len(tokens), hidden, dtype=torch.bfloat16)
    noise = torch.empty(hidden)
    for position, token in enumerate(tokens):
        if token not in table:
            generator.manual_seed(zlib.crc32(token.encode()))
            table[token] = torch.randn(hidden, generator=generator)
        generator.manual_seed(POSITION_SEED + position)
        torch.randn(hidden, generator=generator, out=noise)
        rows[position] = torch.add(table[token], noise, alpha=NOISE)
    return rows


def route(rows: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's way: sigmoid scores, the top-k, their share of the sum. i64 [T, K] and f32 [T, K]."""
    generator = torch.Generator().manual_seed(ROUTER_SEED)
    router = torch.randn(shape.experts, shape.hidden, generator=generator) * (2 / shape.hidden**0.5)
    scores = torch.cat([torch.sigmoid(block.float() @ router.t()) for block in torch.split(rows, 1024)])
    values, ids = scores.topk(shape.topk, dim=1)
    return ids, values / values.sum(1, keepdim=True) * WEIGHT_SCALE


def read_routing(path: Path, count: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_idx` [N, K] (and `topk_weights` [N, K], else 1/K each) of a recorded trace, its first `count` tokens, repeated if shorter."""
    try:
        with np.load(path, allow_pickle=False) as trace:
            arrays = {name: np.asarray(trace[name]) for name in trace.files}
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--routing {path} cannot be read as an .npz file: {error}") from None
    if "topk_idx" not in arrays:
        raise InvalidArgumentError(f"--routing {path} has no array topk_idx; it has {', '.join(arrays) or 'none'}")
    ids = arrays["topk_idx"]
    ids = ids.reshape(-1, ids.shape[-1]) if ids.ndim >= 2 else ids
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidArgumentError(f"--routing {path}: topk_idx is {ids.dtype} {list(ids.shape)}; whole numbers [tokens, top-k] are needed")
    if ids.min() < -1 or ids.max() >= experts:
        raise InvalidArgumentError(f"--routing {path}: topk_idx runs from {ids.min()} to {ids.max()}; -1 to {experts - 1} can be meant")
    weights = arrays.get("topk_weights", np.full(ids.shape, 1 / ids.shape[1], dtype=np.float32)).reshape(ids.shape[0], -1)
    if weights.shape != ids.shape:
        raise InvalidArgumentError(f"--routing {path}: topk_weights is {list(weights.shape)}, topk_idx {list(ids.shape)}")
    places = np.arange(count) % ids.shape[0]
    return torch.from_numpy(ids[places].astype(np.int64)), torch.from_numpy(weights[places].astype(np.float32))


def expert_weights(expert: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate-and-up [2·width, hidden] and down [hidden, width] matrices of one expert, seeded by its number. f32."""
    generator = torch.Generator().manual_seed(EXPERT_SEED + expert)
    gate_up = torch.randn(2 * shape.width, shape.hidden, generator=generator).mul_(shape.hidden**-0.5)
    down = torch.randn(shape.hidden, shape.width, generator=generator).mul_(shape.width**-0.5)
    return gate_up, down


def run_experts(
    rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Iterable[int], first: int, shape: Shape
) -> torch.Tensor:
    """Σ over the given experts of weight · expert(row), in fp32: f32 [N, H]. `ids` count from `first`; −1 is none."""
    out = torch.zeros(rows.shape[0], shape.hidden)
    taken, wide, back = (torch.empty(BLOCK_ROWS, shape.hidden, dtype=dtype) for dtype in (rows.dtype, torch.float32, torch.float32))
    for expert in experts:
        places, choice = (ids == expert - first).nonzero(as_tuple=True)
        if not places.numel():
            continue
        gate_up, down = expert_weights(expert, shape)
        for part in torch.split(torch.arange(places.numel()), BLOCK_ROWS):
            at, count = places[part], part.numel()
            torch.index_select(rows, 0, at, out=taken[:count])
            gate, up = (wide[:count].copy_(taken[:count]) @ gate_up.t()).chunk(2, dim=1)
            hidden = torch.nn.functional.silu(gate) * up * weights[at, choice[part], None]
            out.index_add_(0, at, torch.mm(hidden, down.t(), out=back[:count]))
    return out


def run_layer(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shape: Shape, threads: int) -> torch.Tensor:
    """The whole layer in this one process, without any exchange: f32 [N, H]. Each thread adds up its part of the experts."""
    stop = threading.Event()

    def part(number: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return run_experts(
            rows, ids, weights, itertools.takewhile(lambda _: not stop.is_set(), range(number, shape.experts, threads)), 0, shape
        )

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(part, number) for number in range(threads)]
        try:
            total = futures[0].result()
            for future in futures[1:]:
                total += future.result()
        finally:
            stop.set()  # whatever ends this, the threads end after the expert at hand
    return total
