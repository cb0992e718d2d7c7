"""low_latency_return: the first part of a combine: rows from the experts back to the ranks that sent them.

What moves: N rows read here and written at their homes, each to the place that it had when it came, so that nothing but rows travels; and a
home's weights and places are put aside for the sum (12 bytes each). Predicted for 8 ranks × 128 tokens × 7168, top-8 of 256, on one H200
(4.27 TB/s): 235 MB, 55 µs; with one GPU a rank over NVLink (450 GB/s) 29 µs. One launch; the last program tells and waits.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.low_latency_await import take_rows
from expertwire.ep.kernels.low_latency_pack import find_tile
from expertwire.ep.kernels.low_latency_words import (
    C_CAME,
    C_EPOCH,
    CALL,
    COMBINE,
    NOT_SENT,
    S_CHANGED,
    aborted,
    alive_lanes,
    announce,
    await_call,
    combine_block,
    data_at,
    gate,
    next_call,
    owner,
    rows_limit,
    say_status,
    wrong_routing,
)
from expertwire.ep.kernels.words import ints_at, is_last, kernel, rank_of, typed, words_at

WHERE = tl.constexpr(1 << 44)  # a row's place, in bytes of a third, is below; its rank above


@triton.jit
def note_slots(
    state,
    ids,
    weights,
    places,
    found,
    kept,
    first,
    tokens,
    tokens_max,
    experts,
    R: tl.constexpr,
    TOPK: tl.constexpr,
    ID: tl.constexpr,
    LINES: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """LINES elements of topk_idx and topk_weights as they are now: rank and place of the row that comes back into `found` i64[T, K], −1 for
    none, and the weight into `kept`."""
    at = first + tl.arange(0, LINES)
    count = tokens * TOPK
    inside = at < count
    expert = tl.load(typed(ids, ID) + at, mask=inside, other=-1).to(tl.int64)
    sent = tl.load(ints_at(places) + at, mask=inside, other=-1).to(tl.int64)
    place = tl.load(ints_at(places) + count + at, mask=inside, other=-1).to(tl.int64)
    if tl.sum(((expert != -1) & (expert != sent)).to(tl.int32)) > 0:
        wrong_routing(state, NOT_SENT)
    comes = (expert == sent) & (place >= 0)
    rank = owner(tl.where(comes, expert, 0), experts, R)
    row = combine_block(rank, tokens_max, experts, R, TOPK, HIDDEN) + place * (2 * HIDDEN)
    tl.store(words_at(found) + at, tl.where(comes, rank * WHERE + row, -1), mask=inside)
    weight = tl.load(typed(weights, tl.float32) + at, mask=inside, other=0.0)
    tl.store(typed(kept, tl.float32) + at, weight, mask=inside)


@triton.jit
def return_rows(
    x, block, origins, first, rows, GROUP: tl.constexpr, ROW: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr
):
    """GROUP rows to one home."""
    row = first + tl.arange(0, GROUP)
    live = row < rows
    origin = tl.load(ints_at(origins) + row, mask=live, other=-1).to(tl.int64)
    live = live & (origin >= 0)
    column = tl.arange(0, COLS)
    for start in tl.static_range(0, ROW, COLS):
        inside = live[:, None] & (start + column < ROW)[None, :]
        values = tl.load(typed(x, UNIT, ALIGN) + origin[:, None] * ROW + (start + column)[None, :], mask=inside)
        tl.store(typed(block, UNIT, ALIGN) + row[:, None] * ROW + (start + column)[None, :], values, mask=inside)


@kernel
def low_latency_return(
    state: tl.int64,
    call: tl.int64,
    routed: tl.int64,
    x: tl.int64,
    origins: tl.int64,
    ids: tl.int64,
    weights: tl.int64,
    places: tl.int64,
    found: tl.int64,
    kept: tl.int64,
    tokens: tl.int64,
    tokens_max: tl.int64,
    experts: tl.int64,
    waits: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
    ID: tl.constexpr,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    LINES: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """Addresses. routed, origins, places: what the dispatch left (its call, `low_latency_pack`, `low_latency_dispatch`); x bf16[E_l, R·M,
    HIDDEN]; found i64[T, K] and kept f32[T, K]: for the sum. With AWAIT the last program also waits for the others' rows."""
    epoch, going = next_call(state)
    me = rank_of(state)
    lane = tl.arange(0, RP)
    came = tl.load(words_at(routed) + CALL + lane, mask=lane < R, other=0, cache_modifier=".cg")
    rows = tl.where(alive_lanes(state, R, RP) == 1, came, 0)
    if going:
        limit = rows_limit(me, tokens_max, experts, R, TOPK)
        ends = tl.cumsum((rows + GROUP - 1) // GROUP, axis=0)
        for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
            home, first, count = find_tile(tile, rows, ends, RP, GROUP)
            block = data_at(state, home, epoch % 3, R) + combine_block(me, tokens_max, experts, R, TOPK, HIDDEN)
            return_rows(x, block, origins + home * limit * 4, first, count, GROUP, ROW, COLS, UNIT, ALIGN)
        for first in range(tl.program_id(0) * LINES, tokens * TOPK, tl.num_programs(0) * LINES):
            note_slots(state, ids, weights, places, found, kept, first, tokens, tokens_max, experts, R, TOPK, ID, LINES, HIDDEN)
    if is_last(state):
        tl.store(words_at(call) + C_EPOCH, epoch)
        if aborted(state) == 0:
            handle = tl.load(words_at(routed) + C_EPOCH, cache_modifier=".cg")
            total = tl.load(words_at(routed) + C_CAME, cache_modifier=".cg")
            if total != tl.sum(came):  # the handle is not as its dispatch left it
                say_status(state, call, S_CHANGED, me, total, tl.sum(came))
            announce(state, call, epoch, COMBINE, rows, tokens_max, experts, handle, R, RP, HIDDEN, TOPK, 0)
            gate(state, epoch, R, RP)
        if AWAIT:
            status = await_call(state, call, epoch, waits, R, RP)
            take_rows(state, call, epoch, status, routed, R, RP)
