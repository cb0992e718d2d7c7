"""low_latency_pack: the second part of a dispatch's hook: rows from the sources' blocks to their experts, in the order of the sources.

What moves: N rows read and written, N those that this rank received, both in its own memory. Predicted for 8 ranks × 128 tokens × 7168,
top-8 of 256, on one H200 (4.27 TB/s): FP8 122 MB, 28 µs; BF16 235 MB, 55 µs; with one GPU a rank an eighth of it. One launch. The last
program tells everybody that the blocks are free.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.low_latency_words import (
    C_EPOCH,
    C_STATUS,
    CALL,
    S_ABORTED,
    consume,
    data_at,
    dispatch_block,
    owned,
    rows_limit,
    scales_at,
)
from expertwire.ep.kernels.words import ints_at, is_last, kernel, rank_of, typed, words_at


@triton.jit
def tiles_of(call, R: tl.constexpr, RP: tl.constexpr, GROUP: tl.constexpr):
    """GROUP rows make a tile. Of each rank [RP]: its rows, and the tiles of it and all before it."""
    lane = tl.arange(0, RP)
    rows = tl.load(words_at(call) + CALL + lane, mask=lane < R, other=0, cache_modifier=".cg")
    return rows, tl.cumsum((rows + GROUP - 1) // GROUP, axis=0)


@triton.jit
def find_tile(tile, rows, ends, RP: tl.constexpr, GROUP: tl.constexpr):
    """Rank, first row, and how many rows there are of that rank."""
    lane = tl.arange(0, RP)
    rank = tl.sum((ends <= tile).to(tl.int32))
    before = tl.max(tl.where(lane < rank, ends, 0))
    return rank.to(tl.int64), (tile - before) * GROUP, tl.sum(tl.where(lane == rank, rows, 0))


@triton.jit
def pack_rows(
    call,
    block,
    out,
    scales_out,
    src_info,
    origins,
    source,
    first,
    rows,
    limit,
    local,
    capacity,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
):
    """GROUP rows of one source."""
    row = first + tl.arange(0, GROUP)
    live = row < rows
    scales = block + scales_at(limit, ROW_BYTES)
    beside = tl.load(ints_at(scales + limit * (4 * WORDS)) + row, mask=live, other=0)
    token = beside & 0xFFFF
    expert = ((beside >> 16) & 0xFFFF).to(tl.int64)
    keep = live & (expert < local)
    place = row + tl.load(ints_at(call + (CALL + 2 * R) * 8) + source * local + expert, mask=keep, other=0)
    keep = keep & (place >= 0) & (place < capacity)
    to = expert * capacity + place
    column = tl.arange(0, COLS)
    for start in tl.static_range(0, ROW, COLS):
        inside = (start + column < ROW)[None, :]
        values = tl.load(typed(block, UNIT, ALIGN) + row[:, None] * ROW + (start + column)[None, :], mask=live[:, None] & inside)
        tl.store(typed(out, UNIT, ALIGN) + to[:, None] * ROW + (start + column)[None, :], values, mask=keep[:, None] & inside)
    if WORDS > 0:
        word = tl.arange(0, WP)
        wide = (word < WORDS)[None, :]
        values = tl.load(ints_at(scales) + row[:, None] * WORDS + word[None, :], mask=live[:, None] & wide)
        there = (expert[:, None] * WORDS + word[None, :]) * capacity + place[:, None]
        tl.store(ints_at(scales_out) + there, values, mask=keep[:, None] & wide)
    tl.store(ints_at(src_info) + to, token, mask=keep)
    tl.store(ints_at(origins) + source * limit + row, tl.where(keep, to, -1).to(tl.int32), mask=live)


@kernel
def low_latency_pack(
    state: tl.int64,
    call: tl.int64,
    out: tl.int64,
    scales_out: tl.int64,
    src_info: tl.int64,
    origins: tl.int64,
    tokens_max: tl.int64,
    experts: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    WP: tl.constexpr,
):
    """Addresses. out [E_l, R·M, ROW] of UNIT; scales_out 32-bit [E_l, WORDS, R·M]; src_info i32[E_l, R·M]; origins i32[R, limit]: where in
    `out` the rows of each source are, for the combine."""
    epoch = tl.load(words_at(call) + C_EPOCH)
    me = rank_of(state)
    local = owned(me, experts, R)
    limit = rows_limit(me, tokens_max, experts, R, TOPK)
    blocks = data_at(state, me, epoch % 3, R)
    rows, ends = tiles_of(call, R, RP, GROUP)
    for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
        source, first, count = find_tile(tile, rows, ends, RP, GROUP)
        block = blocks + source * dispatch_block(limit, ROW_BYTES, WORDS)
        capacity = R * tokens_max
        pack_rows(
            call,
            block,
            out,
            scales_out,
            src_info,
            origins,
            source,
            first,
            count,
            limit,
            local,
            capacity,
            R,
            GROUP,
            ROW,
            COLS,
            UNIT,
            ALIGN,
            ROW_BYTES,
            WORDS,
            WP,
        )
    if is_last(state):
        if tl.load(words_at(call) + C_STATUS) != S_ABORTED:
            consume(state, epoch, R, RP)
