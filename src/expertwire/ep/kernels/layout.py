"""layout: who gets what, from the experts of each token.

What moves: T·K ids read, T·R flags written; counts by one atomic for each tile of tokens and expert, into zeroed memory. Integers, so the
order of the atomics changes nothing.
"""

import triton.language as tl

from expertwire.ep.kernels.words import F_BAD_ID, ints_at, kernel, record_of, typed


@kernel
def count_layout(
    state: tl.int64,
    ids: tl.int64,
    per_rank: tl.int64,
    per_expert: tl.int64,
    in_rank: tl.int64,
    tokens: tl.int64,
    experts: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    ID: tl.constexpr,
    LINES: tl.constexpr,
    EP: tl.constexpr,
):
    """Addresses. ids [T, K] of type ID; per_rank i32[R] and per_expert i32[E], zeroed; in_rank bool[T, R]. EP: bins, more than E. An id
    that is neither −1 nor an expert counts as −1, and the record says so."""
    token = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    k = tl.arange(0, KP)
    lane = tl.arange(0, RP)
    given = (token < tokens)[:, None] & (k < TOPK)[None, :]
    expert = tl.load(typed(ids, ID) + token[:, None] * TOPK + k[None, :], mask=given, other=-1).to(tl.int64)
    real = (expert >= 0) & (expert < experts)
    if tl.sum(tl.sum(((expert < -1) | (expert >= experts)).to(tl.int32), axis=1), axis=0) > 0:
        tl.store(record_of(state) + F_BAD_ID, 1)
    share = experts // R
    extra = experts % R
    first = lane * share + tl.minimum(lane, extra)
    last = first + share + tl.where(lane < extra, 1, 0)
    inside = (expert[:, :, None] >= first[None, None, :]) & (expert[:, :, None] < last[None, None, :])
    there = tl.max(inside.to(tl.int32), axis=1)
    out = typed(in_rank, tl.int8) + token[:, None] * R + lane[None, :]
    tl.store(out, there.to(tl.int8), mask=(token < tokens)[:, None] & (lane < R)[None, :])
    tl.atomic_add(ints_at(per_rank) + lane, tl.sum(there, axis=0), mask=lane < R, sem="relaxed")
    bins = tl.histogram(tl.reshape(tl.where(real, expert, experts).to(tl.int32), [LINES * KP]), EP)
    bin_number = tl.arange(0, EP)
    tl.atomic_add(ints_at(per_expert) + bin_number, bins, mask=(bin_number < experts) & (bins > 0), sem="relaxed")
