"""low_latency_combine: the second part of a combine: each home sums the rows that came back, weighted.

What moves: N rows read, T written, in this rank's memory; N those that all homes of the card sent out. All rows of a token are in flight at
once. Predicted for 8 ranks × 128 tokens × 7168, top-8 of 256, on one H200 (4.27 TB/s): 132 MB, 31 µs; with one GPU a rank 4 µs. One launch.
Measured there, with low_latency_return: 120 µs in a graph, eager the same; predicted 86 and launches.

acc = 0; for each slot ascending: the product of weight and row rounded to fp32, then added; rounded to bf16 to nearest even, NaN to 0x7FC0:
bit for bit as ep/low_latency_reference.py (the launch says enable_fp_fusion=False).
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.combine import round_bf16
from expertwire.ep.kernels.low_latency_return import WHERE
from expertwire.ep.kernels.low_latency_words import C_EPOCH, C_STATUS, CALL, S_ABORTED, consume, data_at
from expertwire.ep.kernels.words import is_last, kernel, rank_of, typed, words_at


@triton.jit
def sum_part(
    call, data, found, kept, out, token, start, TOPK: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):
    """BLOCK columns of one token's sum."""
    at = start + tl.arange(0, BLOCK)
    values = ()
    weights = ()
    for k in tl.static_range(TOPK):
        place = tl.load(words_at(found) + token * TOPK + k)
        rank = tl.maximum(place, 0) // WHERE
        usable = (place >= 0) & (tl.load(words_at(call) + CALL + rank) != 0)
        width = tl.where(usable, HIDDEN, 0)
        row = data + tl.where(usable, place - rank * WHERE, 0)
        values = values + (tl.load(typed(row, tl.bfloat16, ALIGN) + at, mask=at < width, other=0.0),)  # noqa: RUF005  (Triton's own way)
        weight = tl.load(typed(kept, tl.float32) + token * TOPK + k)
        weights = weights + (tl.where(usable, weight, 0.0),)  # noqa: RUF005
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        acc += weights[k] * values[k].to(tl.float32)
    tl.store(typed(out + token * (2 * HIDDEN), tl.int16, ALIGN) + at, round_bf16(acc), mask=at < HIDDEN)


@kernel
def low_latency_combine(
    state: tl.int64,
    call: tl.int64,
    found: tl.int64,
    kept: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Addresses. found, kept: of `low_latency_return`; out: bf16[T, HIDDEN]."""
    epoch = tl.load(words_at(call) + C_EPOCH)
    data = data_at(state, rank_of(state), epoch % 3, R)
    if tl.load(words_at(call) + C_STATUS) != S_ABORTED:
        parts: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
        for part in range(tl.program_id(0), tokens * parts, tl.num_programs(0)):
            sum_part(call, data, found, kept, out, part // parts, part % parts * BLOCK, TOPK, HIDDEN, BLOCK, ALIGN)
    if is_last(state):
        if tl.load(words_at(call) + C_STATUS) != S_ABORTED:
            consume(state, epoch, R, RP)
