"""low_latency_await: the wait for what everybody sends in a call. One program.

What moves: a header, and of a dispatch a count for each of this rank's experts, from each source (some kilobytes). From the counts every
row's place in the output follows: by source, then as the source sent it. The floor is the wait. Where no hook is asked for the sending
kernel's last program does this, and there is no such launch.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.low_latency_words import (
    C_CAME,
    C_EPOCH,
    CALL,
    L_ROWS,
    LL_HEADER,
    S_MISSING,
    STATE_SHRINK,
    alive_lanes,
    await_call,
    owned,
    record_word,
    rows_limit,
    say_status,
)
from expertwire.ep.kernels.words import control_of, ints_at, kernel, rank_of, words_at


@triton.jit
def take_counts(
    state,
    call,
    epoch,
    status,
    layout_range,
    received,
    statistics,
    tokens_max,
    experts,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Rows of each source and expert: `layout_range` i64[E_l, R], `received` i32[E_l], `statistics` i32[E_l] (0: none); the call's shift,
    which makes a row's place in a block its place in the output, and what came from each."""
    step: tl.constexpr = 32
    me = rank_of(state)
    local = owned(me, experts, R)
    source = tl.arange(0, RP)
    live = tl.where(status == 0, alive_lanes(state, R, RP), 0) == 1
    told = ints_at((control_of(state) + record_word(state, epoch % 3, source, R) + LL_HEADER).to(tl.int64))
    shift = ints_at(call + (CALL + 2 * R) * 8)
    before = tl.zeros([RP], tl.int32)
    for start in range(0, local, step):
        expert = start + tl.arange(0, step)
        inside = (expert < local)[None, :] & (source < R)[:, None]
        count = tl.load(told[:, None] + expert[None, :], mask=inside & live[:, None], other=0, cache_modifier=".cg")
        place = before[:, None] + tl.cumsum(count, axis=1) - count
        before += tl.sum(count, axis=1)
        kept = tl.minimum(count, tokens_max).to(tl.int32)
        begin = tl.cumsum(kept, axis=0) - kept
        entry = (begin.to(tl.int64) << 32) | kept.to(tl.int64)
        tl.store(words_at(layout_range) + expert[None, :] * R + source[:, None], entry, mask=inside)
        tl.store(shift + source[:, None] * local + expert[None, :], begin - place, mask=inside)
        total = tl.sum(kept, axis=0)
        tl.store(ints_at(received) + expert, total, mask=expert < local)
        if statistics != 0:
            sums = ints_at(statistics) + expert
            tl.store(sums, tl.load(sums, mask=expert < local, other=0) + total, mask=expert < local)
    came = tl.minimum(before.to(tl.int64), rows_limit(me, tokens_max, experts, R, TOPK))
    tl.store(words_at(call) + CALL + source, came, mask=source < R)
    tl.store(words_at(call) + C_CAME, tl.sum(tl.where(source < R, came, 0)))


@triton.jit
def take_rows(state, call, epoch, status, routed, R: tl.constexpr, RP: tl.constexpr):
    """Whose rows there are of a combine: all that went there came back. Where ranks are masked, one that left this one out in the dispatch
    has nothing of it; else nothing where something was sent is a fault like any other number."""
    source = tl.arange(0, RP)
    live = tl.where(status == 0, alive_lanes(state, R, RP), 0) == 1
    record = control_of(state) + record_word(state, epoch % 3, source, R)
    rows = tl.load(record + L_ROWS, mask=live, other=0, cache_modifier=".cg")
    sent = tl.load(words_at(routed) + CALL + R + source, mask=live, other=0, cache_modifier=".cg")
    usable = live & (rows == sent) & (rows > 0)
    tl.store(words_at(call) + CALL + source, usable.to(tl.int64), mask=source < R)
    masking = tl.load(words_at(state) + STATE_SHRINK) != 0
    peer = tl.min(tl.where(live & (rows != sent) & (((rows > 0) & (sent > 0)) | (masking == 0)), source, R))
    if peer < R:
        lost = source == peer
        say_status(state, call, S_MISSING, peer, tl.sum(tl.where(lost, sent, 0)), tl.sum(tl.where(lost, rows, 0)))


@kernel
def low_latency_await_dispatch(
    state: tl.int64,
    call: tl.int64,
    layout_range: tl.int64,
    received: tl.int64,
    statistics: tl.int64,
    waits: tl.int64,
    tokens_max: tl.int64,
    experts: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
):
    """The first part of a dispatch's hook. Addresses; statistics and waits (i64[R], nanoseconds) may be 0."""
    epoch = tl.load(words_at(call) + C_EPOCH)
    status = await_call(state, call, epoch, waits, R, RP)
    take_counts(state, call, epoch, status, layout_range, received, statistics, tokens_max, experts, R, RP, TOPK)


@kernel
def low_latency_await_combine(state: tl.int64, call: tl.int64, routed: tl.int64, waits: tl.int64, R: tl.constexpr, RP: tl.constexpr):
    """The first part of a combine's hook. routed: the call of the dispatch."""
    epoch = tl.load(words_at(call) + C_EPOCH)
    status = await_call(state, call, epoch, waits, R, RP)
    take_rows(state, call, epoch, status, routed, R, RP)
