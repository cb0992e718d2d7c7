"""combine: each home reads its rows back from the ranks that had them, and sums.

What moves: N rows read, T rows written, N those of all ranks; the same bytes as a dispatch. All ranks' pieces of a row are in flight at
once, 16 bytes a thread and rank; absent ranks cost a masked load. The floor on one card: (N + T) rows over its copy rate. Measured on two
H200s, one rank each, 4,096 tokens, in a graph with its notify: 194 µs (floor of the link 181 at 324 GB/s each way).

acc = fp32(bias 0) + bias 1; p = sum over ranks ascending; acc + p, rounded to bf16 to nearest even, NaN to 0x7FC0: bit for bit as
ep/reference.py, where all ranks are of the home's node.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.words import ABORT, M_STATUS, META, T_WEIGHTS, T_X, control_of, finish, ints_at, kernel, look, meta_of, typed

QUIET_NAN = tl.constexpr(0x7FC0)


@triton.jit
def round_bf16(value):
    """fp32 to the 16 bits of a bf16: to nearest even, every NaN to 0x7FC0."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, rounded, QUIET_NAN).to(tl.int16)


@triton.jit
def sources(state, positions, token, R: tl.constexpr, HIDDEN: tl.constexpr):
    """Where the token's row lies at each rank; 0 where it did not go."""
    found = ()
    for r in tl.static_range(R):
        row = tl.load(ints_at(positions) + token * R + r).to(tl.int64)
        at = tl.load(meta_of(state) + META + T_X * R + r) + row * (HIDDEN * 2)
        found = found + (tl.where(row < 0, 0, at),)  # noqa: RUF005  (Triton knows no unpacking)
    return found


@triton.jit
def sum_weights(state, positions, weights_out, first, tokens, R: tl.constexpr, GROUP: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr):
    """Weights of a group of tokens, ranks ascending, never rounded."""
    k = tl.arange(0, KP)
    token = first + tl.arange(0, GROUP)
    inside = (token < tokens)[:, None] & (k < TOPK)[None, :]
    total = tl.zeros([GROUP, KP], tl.float32)
    for r in tl.static_range(R):
        row = tl.load(ints_at(positions) + token * R + r, mask=token < tokens, other=-1).to(tl.int64)
        theirs = tl.load(meta_of(state) + META + T_WEIGHTS * R + r).to(tl.pointer_type(tl.float32))
        total += tl.load(theirs + row[:, None] * TOPK + k[None, :], mask=(row >= 0)[:, None] & (k < TOPK)[None, :], other=0.0)
    tl.store(typed(weights_out, tl.float32) + token[:, None] * TOPK + k[None, :], total, mask=inside)


@triton.jit
def sum_row(
    state,
    positions,
    out,
    bias0,
    bias1,
    token,
    R: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    BIASES: tl.constexpr,
):
    """One token's row."""
    row = sources(state, positions, token, R, HIDDEN)
    column = tl.arange(0, BLOCK)
    here = token * (HIDDEN * 2)
    for start in tl.static_range(0, HIDDEN, BLOCK):
        at = start + column
        values = ()
        for r in tl.static_range(R):
            width = tl.where(row[r] == 0, 0, HIDDEN)
            piece = tl.load(typed(row[r], tl.bfloat16, ALIGN) + at, mask=at < width, other=0.0)
            values = values + (piece,)  # noqa: RUF005
        acc = tl.zeros([BLOCK], tl.float32)
        if BIASES > 0:
            acc += tl.load(typed(bias0 + here, tl.bfloat16, ALIGN) + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        if BIASES > 1:
            acc += tl.load(typed(bias1 + here, tl.bfloat16, ALIGN) + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        part = tl.zeros([BLOCK], tl.float32)
        for r in tl.static_range(R):
            part += values[r].to(tl.float32)
        result = round_bf16(acc + part)
        tl.store(typed(out + here, tl.int16, ALIGN) + at, result, mask=at < HIDDEN)


@kernel
def combine(
    state: tl.int64,
    positions: tl.int64,
    out: tl.int64,
    weights_out: tl.int64,
    bias0: tl.int64,
    bias1: tl.int64,
    tokens: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    GROUP: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    BIASES: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
):
    """Addresses. positions: i32[T, R] of the dispatch; out: bf16[T, HIDDEN]; weights_out: f32[T, TOPK], 0: none; biases [T, HIDDEN]."""
    gone = look(control_of(state) + ABORT) | tl.load(meta_of(state) + M_STATUS)
    # No group then; no branch around the loop, behind which ptxas leaves half of a row's loads until the others have come.
    begin = tl.program_id(0) + tl.where(gone == 0, 0, tl.cdiv(tokens, GROUP))
    for group in range(begin, tl.cdiv(tokens, GROUP), tl.num_programs(0)):
        first = group * GROUP
        if TOPK > 0:
            sum_weights(state, positions, weights_out, first, tokens, R, GROUP, TOPK, KP)
        for one in range(first, tl.minimum(first + GROUP, tokens)):
            sum_row(state, positions, out, bias0, bias1, one, R, HIDDEN, BLOCK, ALIGN, BIASES)
    finish(state, R, RP)
