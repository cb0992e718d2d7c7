"""dispatch: rows from where they are to their final place at every receiver.

What moves: T rows read once, N rows written, N the rows that all ranks receive; beside each row its ids, weights, scales and source. A row
is loaded once, into registers, and stored to each of its receivers from there, 16 bytes a thread. On one card whose memory stands in for
every link the floor is (T + N) rows over its copy rate: 8 × 4,096 tokens, top-8 of 256, 7168 bf16: 2.9 GB, 0.7 ms at 4.27 TB/s.

Measured on two H200s, one rank each, 4,096 tokens, in a graph with its notify: 195 µs (floor of the link 181 at 324 GB/s each way).

Nothing here waits but the program that finishes last. Positions come from the prefix that the notify left for each group of tokens, so no
row needs an atomic.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.words import (
    ABORT,
    M_OVER,
    M_STATUS,
    M_TOTAL,
    META,
    T_BASE,
    T_IDS,
    T_SCALES,
    T_SOURCE,
    T_WEIGHTS,
    T_X,
    control_of,
    finish,
    ints_at,
    kernel,
    look,
    meta_of,
    rank_of,
    typed,
)


@triton.jit
def place(state, in_rank, prefix, positions, token, group, tokens, worst, R: tl.constexpr, RP: tl.constexpr):
    """Row at each receiver of each token of a group, −1 where it does not go; into `positions` [T, R]."""
    lane = tl.arange(0, RP)
    live = lane < R
    inside = (token < tokens)[:, None] & live[None, :]
    at = token[:, None] * R + lane[None, :]
    there = (tl.load(typed(in_rank, tl.int8) + at, mask=inside, other=0) != 0).to(tl.int32)
    first = tl.load(ints_at(prefix) + group * R + lane, mask=live, other=0)
    first += tl.load(meta_of(state) + META + T_BASE * R + lane, mask=live, other=0).to(tl.int32)
    row = first[None, :] + tl.cumsum(there, axis=0) - there
    keep = tl.where(worst > 0, (row < worst).to(tl.int32), 1) * there
    tl.store(ints_at(positions) + at, tl.where(keep == 1, row, -1), mask=inside)


@triton.jit
def send_beside(
    state,
    positions,
    ids,
    weights,
    token,
    tokens,
    experts,
    R: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ID: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Source, ids and weights of a group's rows."""
    table = meta_of(state) + META
    k = tl.arange(0, KP)
    given = (token < tokens)[:, None] & (k < TOPK)[None, :]
    at = token[:, None] * TOPK + k[None, :]
    if TOPK > 0:
        expert = tl.load(typed(ids, ID) + at, mask=given, other=-1)
    if WEIGHTS:
        weight = tl.load(typed(weights, tl.float32) + at, mask=given, other=0.0)
    share = experts // R
    extra = experts % R
    for r in tl.static_range(R):
        row = tl.load(ints_at(positions) + token * R + r, mask=token < tokens, other=-1).to(tl.int64)
        goes = row >= 0
        tl.store(ints_at(tl.load(table + T_SOURCE * R + r)) + row, token.to(tl.int32), mask=goes)
        if TOPK > 0:
            first = (r * share + tl.minimum(r, extra)).to(ID)
            last = first + (share + tl.where(r < extra, 1, 0)).to(ID)
            mine = (expert >= first) & (expert < last)
            out = row[:, None] * TOPK + k[None, :]
            both = goes[:, None] & (k < TOPK)[None, :]
            tl.store(tl.load(table + T_IDS * R + r).to(tl.pointer_type(ID)) + out, tl.where(mine, expert - first, -1), mask=both)
            if WEIGHTS:
                there = tl.load(table + T_WEIGHTS * R + r).to(tl.pointer_type(tl.float32))
                tl.store(there + out, tl.where(mine, weight, 0.0), mask=both)


@triton.jit
def send_scales(state, positions, scales, down, across, token, tokens, R: tl.constexpr, SCALES: tl.constexpr, SP: tl.constexpr):
    """Scales of a group's rows, four bytes each, from any strides to rows."""
    table = meta_of(state) + META
    column = tl.arange(0, SP)
    inside = (token < tokens)[:, None] & (column < SCALES)[None, :]
    scale = tl.load(ints_at(scales) + token[:, None] * down + column[None, :] * across, mask=inside, other=0)
    for r in tl.static_range(R):
        row = tl.load(ints_at(positions) + token * R + r, mask=token < tokens, other=-1).to(tl.int64)
        there = ints_at(tl.load(table + T_SCALES * R + r))
        tl.store(there + row[:, None] * SCALES + column[None, :], scale, mask=(row >= 0)[:, None] & (column < SCALES)[None, :])


@triton.jit
def send_row(state, positions, x, token, R: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """One row, read once, to everyone who gets it. ROW units; ALIGN bytes divide every row's address."""
    table = meta_of(state) + META
    column = tl.arange(0, BLOCK)
    here = typed(x + token * (ROW * (UNIT.primitive_bitwidth // 8)), UNIT, ALIGN)
    for start in tl.static_range(0, ROW, BLOCK):
        values = tl.load(here + start + column, mask=start + column < ROW)
        for r in tl.static_range(R):
            row = tl.load(ints_at(positions) + token * R + r).to(tl.int64)
            if row >= 0:
                to = tl.load(table + T_X * R + r) + row * (ROW * (UNIT.primitive_bitwidth // 8))
                tl.store(typed(to, UNIT, ALIGN) + start + column, values, mask=start + column < ROW)


@triton.jit
def blank_ids(mine, first, step, worst, TOPK: tl.constexpr, KP: tl.constexpr, ID: tl.constexpr, LINES: tl.constexpr):
    """Ids −1 from row `first` to row `worst`, LINES of every `step` rows."""
    k = tl.arange(0, KP)
    nothing = tl.full([LINES, KP], -1, ID)
    for start in range(first, worst, step):
        row = start + tl.arange(0, LINES)
        tl.store(typed(mine, ID) + row[:, None] * TOPK + k[None, :], nothing, mask=(row < worst)[:, None] & (k < TOPK)[None, :])


@triton.jit
def receive_nothing(state, blank, counts, worst, experts, R: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, ID: tl.constexpr):
    """Somebody gave up, or no row was moved: experts that run before the host hears of it find no id and no row. `blank`: this rank's own
    ids, 0 where there was no room for them."""
    local = experts // R + tl.where(rank_of(state) < experts % R, 1, 0)
    for start in range(0, 2 * local, 128):
        place = start + tl.arange(0, 128)
        tl.store(ints_at(counts) + place, tl.zeros([128], tl.int32), mask=place < 2 * local)
    if blank != 0:
        blank_ids(blank, worst * 0, 64, worst, TOPK, KP, ID, 64)


@triton.jit
def recount(state, counts, alignment, worst, experts, R: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, ID: tl.constexpr):
    """Rows per expert among those that were kept, where some were left out: rare, so by one program."""
    rank = rank_of(state)
    mine = typed(tl.load(meta_of(state) + META + T_IDS * R + rank), ID)
    local = experts // R + tl.where(rank < experts % R, 1, 0)
    k = tl.arange(0, KP)
    for expert in range(local):
        raw = tl.zeros([64], tl.int32)
        for first in range(0, worst, 64):
            row = first + tl.arange(0, 64)
            ids = tl.load(mine + row[:, None] * TOPK + k[None, :], mask=(row < worst)[:, None] & (k < TOPK)[None, :], other=-1)
            raw += tl.sum((ids == expert).to(tl.int32), axis=1)
        rows = tl.sum(raw)
        tl.store(ints_at(counts) + expert, (rows + alignment - 1) // alignment * alignment)
        tl.store(ints_at(counts) + local + expert, rows)


@kernel
def dispatch(
    state: tl.int64,
    x: tl.int64,
    scales: tl.int64,
    down: tl.int64,
    across: tl.int64,
    in_rank: tl.int64,
    ids: tl.int64,
    weights: tl.int64,
    prefix: tl.int64,
    positions: tl.int64,
    tokens: tl.int64,
    experts: tl.int64,
    worst: tl.int64,
    counts: tl.int64,
    alignment: tl.int64,
    blank: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    GROUP: tl.constexpr,
    FRESH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ID: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SCALES: tl.constexpr,
    SP: tl.constexpr,
):
    """Addresses. x: rows [T, ROW] of UNIT; scales: [T, SCALES] of four bytes, strides `down` and `across`; positions i32[T, R]: out where
    FRESH, else of the dispatch that is repeated, and then rows and scales alone are sent; blank: see `receive_nothing`."""
    good = (look(control_of(state) + ABORT) == 0) & (tl.load(meta_of(state) + M_STATUS) == 0)
    if good:
        for group in range(tl.program_id(0), tl.cdiv(tokens, GROUP), tl.num_programs(0)):
            first = group * GROUP
            token = first + tl.arange(0, GROUP)
            if FRESH:
                place(state, in_rank, prefix, positions, token, group, tokens, worst, R, RP)
                tl.debug_barrier()
                send_beside(state, positions, ids, weights, token, tokens, experts, R, TOPK, KP, ID, WEIGHTS)
            if SCALES > 0:
                send_scales(state, positions, scales, down, across, token, tokens, R, SCALES, SP)
            for one in range(first, tl.minimum(first + GROUP, tokens)):
                send_row(state, positions, x, one, R, ROW, BLOCK, UNIT, ALIGN)
        if FRESH:
            if TOPK > 0:
                if worst > 0:
                    mine = tl.load(meta_of(state) + META + T_IDS * R + rank_of(state))
                    first = tl.load(meta_of(state) + M_TOTAL) + tl.program_id(0) * 64
                    blank_ids(mine, first, tl.num_programs(0) * 64, worst, TOPK, KP, ID, 64)
    last = finish(state, R, RP)
    if FRESH:
        if TOPK > 0:
            if worst > 0:
                if last > 0:
                    if (last == 2) | (good == 0):
                        receive_nothing(state, blank, counts, worst, experts, R, TOPK, KP, ID)
                    elif tl.load(meta_of(state) + M_OVER) > 0:
                        recount(state, counts, alignment, worst, experts, R, TOPK, KP, ID)
