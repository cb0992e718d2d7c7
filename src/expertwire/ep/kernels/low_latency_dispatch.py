"""low_latency_dispatch: rows to their experts' ranks, with their counts, in one pass and without a word from anybody.

What moves: T rows read once, each, quantised where that is asked for, stored once for each of its K experts into this source's block at
the receiver; beside it its scales, token and expert. A row's place in a block follows from topk_idx alone (rows of lower experts, then of
earlier tokens), which every program counts for its own tokens: K·T comparisons for each expert, 1 µs at 128 × 8. Nothing here waits but the
last program.

Predicted for 8 ranks × 128 tokens × 7168, top-8 of 256, on one H200 (4.27 TB/s): FP8 14.7 + 60.8 MB, 18 µs; BF16 14.7 + 117 MB, 31 µs;
one launch, 2 µs, and two crossings, 2 µs. With one GPU a rank over NVLink (450 GB/s, 7 of 8 rows cross): FP8 15 µs, BF16 29 µs.
Measured on that H200 (copy 4.24 TB/s), this kernel and low_latency_pack together, in a graph: FP8 151 µs, BF16 153, UE8M0 214: three times
and 1.8 times what was predicted, and the bytes do not explain it, since FP8 takes as long as BF16.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.low_latency_await import take_counts
from expertwire.ep.kernels.low_latency_words import (
    BAD_ID,
    C_EPOCH,
    CALL,
    DISPATCH,
    LL_HEADER,
    TOO_MANY,
    aborted,
    alive_lanes,
    announce,
    await_call,
    control_at,
    data_at,
    dispatch_block,
    first_expert,
    gate,
    masked_word,
    next_call,
    owner,
    record_word,
    rows_limit,
    scales_at,
    wrong_routing,
)
from expertwire.ep.kernels.quantise import pack_exponents, quantise
from expertwire.ep.kernels.words import control_of, ints_at, is_last, kernel, rank_of, typed, words_at

FORMAT_BF16, FORMAT_FP8, FORMAT_ROUND, FORMAT_UE8M0 = (tl.constexpr(n) for n in range(4))


@triton.jit
def load_ids(ids, at, count, experts, ID: tl.constexpr):
    """Elements of topk_idx as int32; −1 for what is no expert."""
    found = tl.load(typed(ids, ID) + at, mask=at < count, other=-1).to(tl.int64)
    return tl.where((found >= 0) & (found < experts), found, -1).to(tl.int32)


@triton.jit
def find_places(
    state,
    third,
    ids,
    places,
    targets,
    token,
    tokens,
    tokens_max,
    experts,
    R: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ID: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where each row of a token goes: expert and place in its rank's block into `places` i32[2, T, K], −1 for nowhere; addresses into
    `targets` i64[2, T, K], of row and scales; 0 for nowhere. Token and local expert are sent at once, 16 bits each."""
    count = tokens * TOPK
    k = tl.arange(0, KP)
    index = token * TOPK + k
    given = k < TOPK
    raw = tl.load(typed(ids, ID) + index, mask=given, other=-1).to(tl.int64)
    good = (raw >= 0) & (raw < experts)
    if tl.sum(((raw < -1) | (raw >= experts)).to(tl.int32)) > 0:
        wrong_routing(state, BAD_ID)
    expert = tl.where(good, raw, 0)
    rank = owner(expert, experts, R)
    first = first_expert(rank, experts, R)
    low, mine = first.to(tl.int32), tl.where(good, expert, -2).to(tl.int32)
    place = tl.zeros([KP], tl.int32)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        other = load_ids(ids, at, count, experts, ID)
        before = (other[None, :] >= low[:, None]) & (other[None, :] < mine[:, None])
        earlier = (other[None, :] == mine[:, None]) & (at[None, :] < index[:, None])
        place += tl.sum((before | earlier).to(tl.int32), axis=1)
    limit = rows_limit(rank, tokens_max, experts, R, TOPK)
    masked = tl.load(control_of(state) + masked_word(R) + rank, mask=given, other=1, cache_modifier=".cg") != 0
    goes = good & given & (place < limit) & (masked == 0)
    if tl.sum((good & (place >= limit)).to(tl.int32)) > 0:
        wrong_routing(state, TOO_MANY)
    tl.store(ints_at(places) + index, tl.where(good, expert, -1).to(tl.int32), mask=given)
    tl.store(ints_at(places) + count + index, tl.where(goes, place, -1), mask=given)
    me = rank_of(state)
    block = data_at(state, rank, third, R) + me * dispatch_block(limit, ROW_BYTES, WORDS)
    row = place.to(tl.int64)
    scales = block + scales_at(limit, ROW_BYTES)
    beside = ints_at(scales + limit * (4 * WORDS) + row * 4)
    tl.store(words_at(targets) + index, tl.where(goes, block + row * ROW_BYTES, 0), mask=given)
    tl.store(words_at(targets) + count + index, scales + row * (4 * WORDS), mask=given)
    tl.store(beside, (((expert - first) << 16) | token).to(tl.int32), mask=goes)


@triton.jit
def send_plain(x, targets, token, TOPK: tl.constexpr, ROW: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """A row as it is, read once."""
    column = tl.arange(0, COLS)
    here = typed(x + token * (ROW * (UNIT.primitive_bitwidth // 8)), UNIT, ALIGN)
    for start in tl.static_range(0, ROW, COLS):
        values = tl.load(here + start + column, mask=start + column < ROW)
        for k in tl.static_range(TOPK):
            to = tl.load(words_at(targets) + token * TOPK + k)
            if to != 0:
                tl.store(typed(to, UNIT, ALIGN) + start + column, values, mask=start + column < ROW)


@triton.jit
def send_quantised(
    x,
    targets,
    token,
    tokens,
    TOPK: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
):
    """A row as FP8 with its scales, quantised once. BLOCKS: a power of two that is at least as many as there are, and 4."""
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(typed(x + token * (2 * HIDDEN), tl.bfloat16, ALIGN) + at, mask=at < HIDDEN, other=0.0)
    quantised, scale = quantise(value.to(tl.float32), FORMAT != FORMAT_FP8)
    packed = quantised.to(tl.uint8)
    if FORMAT == FORMAT_UE8M0:
        scale = pack_exponents(tl.where(block < (HIDDEN + 127) // 128, scale, 0), BLOCKS // 4)
        word = tl.arange(0, BLOCKS // 4)
    else:
        word = tl.arange(0, BLOCKS)
    for k in tl.static_range(TOPK):
        to = tl.load(words_at(targets) + token * TOPK + k)
        scales_to = tl.load(words_at(targets) + (tokens + token) * TOPK + k)
        if to != 0:
            tl.store(typed(to, tl.uint8, ALIGN_OUT) + at, packed, mask=at < HIDDEN)
            tl.store(ints_at(scales_to) + word, scale, mask=word < WORDS)


@triton.jit
def send_counts(
    state,
    third,
    ids,
    counts,
    tile,
    tokens,
    tokens_max,
    experts,
    R: tl.constexpr,
    TOPK: tl.constexpr,
    ID: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows for each of STEP experts, told to their ranks, and into `counts` i32[E]."""
    count = tokens * TOPK
    expert = tile * STEP + tl.arange(0, STEP)
    inside = expert < experts
    mine = expert.to(tl.int32)
    hits = tl.zeros([STEP], tl.int32)
    for start in range(0, count, CHUNK):
        other = load_ids(ids, start + tl.arange(0, CHUNK), count, experts, ID)
        hits += tl.sum((other[None, :] == mine[:, None]).to(tl.int32), axis=1)
    if tl.sum((hits > tokens_max).to(tl.int32)) > 0:
        wrong_routing(state, TOO_MANY)
    rank = tl.where(inside, owner(expert, experts, R), 0)
    masked = tl.load(control_of(state) + masked_word(R) + rank, mask=inside, other=1, cache_modifier=".cg") != 0
    hits = tl.where(masked, 0, hits)
    tl.store(ints_at(counts) + expert, hits, mask=inside)
    record = control_at(state, rank) + (record_word(state, third, rank_of(state), R) + LL_HEADER) * 8
    tl.store(ints_at(record) + (expert - first_expert(rank, experts, R)), hits, mask=inside & (masked == 0))


@triton.jit
def sum_counts(state, counts, tokens_max, experts, R: tl.constexpr, RP: tl.constexpr, TOPK: tl.constexpr, STEP: tl.constexpr):
    """Rows for each rank [RP], as many as there was room for."""
    lane = tl.arange(0, RP)
    total = tl.zeros([RP], tl.int64)
    for start in range(0, experts, STEP):
        expert = start + tl.arange(0, STEP)
        hits = tl.load(ints_at(counts) + expert, mask=expert < experts, other=0, cache_modifier=".cg")
        rank = owner(expert, experts, R)
        total += tl.sum(tl.where(rank[None, :] == lane[:, None], hits[None, :], 0), axis=1)
    total = tl.minimum(total, rows_limit(lane, tokens_max, experts, R, TOPK))
    return tl.where(alive_lanes(state, R, RP) == 1, total, 0)


@kernel
def low_latency_dispatch(
    state: tl.int64,
    call: tl.int64,
    x: tl.int64,
    ids: tl.int64,
    places: tl.int64,
    targets: tl.int64,
    counts: tl.int64,
    tokens: tl.int64,
    tokens_max: tl.int64,
    experts: tl.int64,
    layout_range: tl.int64,
    received: tl.int64,
    statistics: tl.int64,
    waits: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ID: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    HIDDEN: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIGN_OUT: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """Addresses. x: bf16[T, HIDDEN], contiguous; ids [T, TOPK]; call, places, targets, counts: see above. With AWAIT the last program also
    does what `low_latency_await_dispatch` does, whose outputs follow."""
    epoch, going = next_call(state)
    third = epoch % 3
    if going:
        for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
            find_places(
                state, third, ids, places, targets, token, tokens, tokens_max, experts, R, TOPK, KP, ID, CHUNK // KP, ROW_BYTES, WORDS
            )
            tl.debug_barrier()
            if FORMAT == FORMAT_BF16:
                send_plain(x, targets, token, TOPK, ROW, COLS, UNIT, ALIGN)
            else:
                send_quantised(x, targets, token, tokens, TOPK, HIDDEN, BLOCKS, WORDS, FORMAT, ALIGN, ALIGN_OUT)
        for tile in range(tl.program_id(0), tl.cdiv(experts, STEP), tl.num_programs(0)):
            send_counts(state, third, ids, counts, tile, tokens, tokens_max, experts, R, TOPK, ID, CHUNK // STEP, STEP)
    if is_last(state):
        tl.store(words_at(call) + C_EPOCH, epoch)
        if aborted(state) == 0:
            rows = sum_counts(state, counts, tokens_max, experts, R, RP, TOPK, 128)
            lane = tl.arange(0, RP)
            tl.store(words_at(call) + CALL + R + lane, rows, mask=lane < R)
            announce(state, call, epoch, DISPATCH, rows, tokens_max, experts, 0, R, RP, HIDDEN, TOPK, FORMAT)
            gate(state, epoch, R, RP)
        if AWAIT:
            status = await_call(state, call, epoch, waits, R, RP)
            take_counts(state, call, epoch, status, layout_range, received, statistics, tokens_max, experts, R, RP, TOPK)
