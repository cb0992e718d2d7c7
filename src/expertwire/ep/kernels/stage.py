"""stage: a combine's rows, and their weights, into the data region, where peers read them.

Needed only where the caller's rows lie elsewhere. What moves: each row that counts read and written once; how many count is a word on the
device, so that rows padded up to num_worst_tokens stay behind.
"""

import triton.language as tl

from expertwire.ep.kernels.words import R_TOTAL, kernel, typed, words_at


@kernel
def stage(
    routing: tl.int64,
    x: tl.int64,
    to: tl.int64,
    weights: tl.int64,
    weights_to: tl.int64,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
):
    """Addresses. x: rows of ROW units, contiguous; weights: f32[rows, TOPK], TOPK 0 for none. routing: the handle's."""
    total = tl.load(words_at(routing) + R_TOTAL)
    column = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        here = typed(x + row * (ROW * (UNIT.primitive_bitwidth // 8)), UNIT, ALIGN)
        there = typed(to + row * (ROW * (UNIT.primitive_bitwidth // 8)), UNIT, ALIGN)
        for start in tl.static_range(0, ROW, BLOCK):
            tl.store(there + start + column, tl.load(here + start + column, mask=start + column < ROW), mask=start + column < ROW)
        if TOPK > 0:
            k = tl.arange(0, KP)
            values = tl.load(typed(weights, tl.float32) + row * TOPK + k, mask=k < TOPK)
            tl.store(typed(weights_to, tl.float32) + row * TOPK + k, values, mask=k < TOPK)
