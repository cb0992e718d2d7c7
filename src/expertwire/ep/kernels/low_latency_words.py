"""The low-latency mode's words: what its kernels share of memory, signals and waits.

A control region of its own (see words.py for what words are), int64: a few words of this rank; arrived[3][R], consumed[3][R]: one writer
each, the number of a call (epoch), which only grows; packed[3]: this rank's own calls; masked[R]; then records [3][R sources] of
{16 int64 header, i32 rows for each of the receiver's experts}. Its data region has three thirds, which serve the calls in turn: call k has
third k % 3 of every rank from the moment that the rank has consumed call k − 3.

Three, where the CPU's exchange has two halves: a call's last program waits, at its end, until everybody has consumed call k − 2, whose
third call k + 1 takes. At most two calls live between their parts, so whoever is in call k has consumed call k − 2 already or will without
anybody's help; and a send never waits before it writes. With two halves every program of a send would have to.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.clock import now, pause
from expertwire.ep.kernels.words import (
    ABORT,
    CLOCK,
    EPOCH,
    F_STATUS,
    FIRST,
    PHASE_TWO,
    STATE,
    STATE_DEADLINE,
    control_of,
    give_up,
    look,
    look_at_all,
    look_at_own,
    note_status,
    note_told,
    rank_of,
    record_of,
    waited,
    words_at,
)

STATE_THIRD, STATE_SHRINK = tl.constexpr(5), tl.constexpr(6)  # bytes of a third; 1: who is late is masked
STATE_SLOT = tl.constexpr(7)  # words of a record

# Words of a header. The first eight must be the same on all ranks.
L_EPOCH, L_OPERATION, L_TOKENS, L_HIDDEN, L_EXPERTS = (tl.constexpr(n) for n in range(5))
L_TOPK, L_FORMAT, L_HANDLE, L_ROWS = (tl.constexpr(n) for n in range(5, 9))
AGREED = tl.constexpr(8)
LL_HEADER = tl.constexpr(16)
DISPATCH, COMBINE = tl.constexpr(1), tl.constexpr(2)

# Words of a call, device memory that its kernels pass on: then tables [R]. A dispatch's is part of its handle.
C_EPOCH, C_STATUS, C_CAME = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # C_CAME: rows of all that came, to be found again
CALL = tl.constexpr(8)  # came[R], rows that came from each; sent[R], rows that went to each; then i32 shift[R][local experts]

# Words of the record of failures, beside those of words.py.
F_ROUTING = tl.constexpr(20)  # what was wrong with topk_idx: a sum of the following, of all calls since the host looked
BAD_ID, TOO_MANY, NOT_SENT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
PHASE_ARRIVED, PHASE_CONSUMED = tl.constexpr(11), tl.constexpr(12)
S_DISAGREE, S_MISSING, S_ABORTED, S_CHANGED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def arrived_word(third, R: tl.constexpr):
    """Of rank 0; the others' follow."""
    return FIRST + third * R


@triton.jit
def consumed_word(third, R: tl.constexpr):
    """Of rank 0; the others' follow."""
    return FIRST + 3 * R + third * R


@triton.jit
def packed_word(third, R: tl.constexpr):
    """This rank's own last call in a third."""
    return FIRST + 6 * R + third


@triton.jit
def masked_word(R: tl.constexpr):
    """Of rank 0; the others' follow."""
    return FIRST + 6 * R + 3


@triton.jit
def record_word(state, third, source, R: tl.constexpr):
    """Where the record of a source begins."""
    first = (FIRST + 7 * R + 3 + 15) // 16 * 16
    return first + (third * R + source) * tl.load(words_at(state) + STATE_SLOT)


@triton.jit
def control_at(state, rank):
    """Address of the control words of a rank, or of several."""
    return tl.load(words_at(state) + STATE + rank)


@triton.jit
def data_at(state, rank, third, R: tl.constexpr):
    """Address of a third of the data of a rank, or of several."""
    return tl.load(words_at(state) + STATE + R + rank) + third * tl.load(words_at(state) + STATE_THIRD)


@triton.jit
def alive_lanes(state, R: tl.constexpr, RP: tl.constexpr):
    """1 for each rank that this one does not leave out [RP]."""
    lane = tl.arange(0, RP)
    masked = tl.load(control_of(state) + masked_word(R) + lane, mask=lane < R, other=1, cache_modifier=".cg")
    return (masked == 0).to(tl.int32)


# ---- who has which expert, and where rows go


@triton.jit
def owned(rank, experts, R: tl.constexpr):
    """Experts of a rank."""
    return experts // R + (rank < experts % R).to(tl.int64)


@triton.jit
def first_expert(rank, experts, R: tl.constexpr):
    """The first of a rank's."""
    return rank * (experts // R) + tl.minimum(rank, experts % R)


@triton.jit
def owner(expert, experts, R: tl.constexpr):
    """The rank of an expert."""
    share = experts // R
    wide = experts % R * (share + 1)
    return tl.where(expert < wide, expert // (share + 1), experts % R + (expert - wide) // tl.maximum(share, 1))


@triton.jit
def rows_limit(rank, tokens_max, experts, R: tl.constexpr, TOPK: tl.constexpr):
    """Most rows between a rank and the experts of `rank`."""
    return tokens_max * tl.minimum(owned(rank, experts, R), TOPK)


@triton.jit
def scales_at(limit, ROW_BYTES: tl.constexpr):
    """Where scales begin in a block of a dispatch: behind its rows. Behind them, in an i32 each, come token and
    local expert of the rows."""
    return (limit * ROW_BYTES + 3) // 4 * 4


@triton.jit
def dispatch_block(limit, ROW_BYTES: tl.constexpr, WORDS: tl.constexpr):
    """Bytes of the block that each source has at a receiver."""
    return (scales_at(limit, ROW_BYTES) + limit * (4 * WORDS + 4) + 15) // 16 * 16


@triton.jit
def combine_block(rank, tokens_max, experts, R: tl.constexpr, TOPK: tl.constexpr, HIDDEN: tl.constexpr):
    """Where the block of a rank begins at every home: blocks have room for what went to that rank, in the order in which it went."""
    share = experts // R
    wide = experts % R
    large = (tokens_max * tl.minimum(share + 1, TOPK) * (2 * HIDDEN) + 15) // 16 * 16
    small = (tokens_max * tl.minimum(share, TOPK) * (2 * HIDDEN) + 15) // 16 * 16
    return tl.minimum(rank, wide) * large + tl.maximum(rank - wide, 0) * small


# ---- signals and waits


@triton.jit
def next_call(state):
    """Number of the call that is being sent, which the last program makes so, and whether nobody has given up."""
    epoch, _, gone = look_at_own(state, 0)
    return epoch + 1, gone == 0


@triton.jit
def aborted(state):
    """Whether somebody gave up."""
    return look(control_of(state) + ABORT) != 0


@triton.jit
def say_status(state, call, status, peer, want, got):
    """A call that moves no rows says why: to its own kernels, and, unless something else is said there already, to the host."""
    tl.store(words_at(call) + C_STATUS, status)
    note_status(record_of(state) + F_STATUS, status, peer, want, got)


@triton.jit
def wrong_routing(state, what):
    """topk_idx was not what it must be: the host hears of it at its next call."""
    tl.atomic_or(record_of(state) + F_ROUTING, what, sem="relaxed", scope="sys")


@triton.jit
def announce(
    state,
    call,
    epoch,
    operation,
    rows,
    tokens_max,
    experts,
    handle,
    R: tl.constexpr,
    RP: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Everything is sent: headers and the news to every rank, and this call is begun. rows [RP]: how many went to each."""
    words = control_of(state)
    begun = look(words + EPOCH)
    if begun + 1 != epoch:
        give_up(state, PHASE_TWO, rank_of(state), epoch, begun, epoch, R, RP)
    tl.store(words + EPOCH, epoch)
    me = rank_of(state)
    third = epoch % 3
    lane = tl.arange(0, RP)
    live = alive_lanes(state, R, RP) == 1
    bases = tl.load(words_at(state) + STATE + lane, mask=live, other=0)
    record = words_at(bases + record_word(state, third, me, R) * 8)
    zero = lane.to(tl.int64) * 0
    tl.store(record + L_EPOCH, zero + epoch, mask=live)
    tl.store(record + L_OPERATION, zero + operation, mask=live)
    tl.store(record + L_TOKENS, zero + tokens_max, mask=live)
    tl.store(record + L_HIDDEN, zero + HIDDEN, mask=live)
    tl.store(record + L_EXPERTS, zero + experts, mask=live)
    tl.store(record + L_TOPK, zero + TOPK, mask=live)
    tl.store(record + L_FORMAT, zero + FORMAT, mask=live)
    tl.store(record + L_HANDLE, zero + handle, mask=live)
    tl.store(record + L_ROWS, zero + rows, mask=live)
    tl.debug_barrier()
    arrived = words_at(bases + (arrived_word(third, R) + me) * 8)
    tl.atomic_xchg(arrived, zero + epoch, mask=live, sem="release", scope="sys")


@triton.jit
def consume(state, epoch, R: tl.constexpr, RP: tl.constexpr):
    """Everything that came with a call is packed: its third of this rank's data is free."""
    third = epoch % 3
    tl.store(control_of(state) + packed_word(third, R), epoch)
    lane = tl.arange(0, RP)
    live = alive_lanes(state, R, RP) == 1
    bases = tl.load(words_at(state) + STATE + lane, mask=live, other=0)
    word = words_at(bases + (consumed_word(third, R) + rank_of(state)) * 8)
    tl.atomic_xchg(word, lane.to(tl.int64) * 0 + epoch, mask=live, sem="release", scope="sys")


@triton.jit
def await_words(state, phase, first, want, waits, R: tl.constexpr, RP: tl.constexpr):
    """Wait until word `first` + r of every rank r that is not masked has reached `want`: 1. Whoever is late at the deadline is masked,
    where that is wished; else this rank gives up: 0, as where another has. waits i64[R]: nanoseconds are added; 0: nobody asked."""
    lane = tl.arange(0, 4 * RP)
    words = control_of(state)
    masked = tl.load(words + masked_word(R) + lane, mask=lane < R, other=1, cache_modifier=".cg")
    needed = (masked == 0) & (lane < R)
    place = words + tl.where(lane < R, first + lane, tl.where(lane == R, ABORT, CLOCK))
    deadline_ns = tl.load(words_at(state) + STATE_DEADLINE)
    entered = now()
    begin = want * 0
    time = want * 0
    looks = 0
    cost = lane.to(tl.int64) * 0 - 1
    going = 1
    good = 0
    while going == 1:
        seen = look_at_all(place, lane, needed | (lane == R), time, R)
        late = needed & (seen < want)
        cost = tl.where(needed & (seen >= want) & (cost < 0), now() - entered, cost)
        gone = tl.sum(tl.where(lane == R, seen, 0))
        if gone != 0:
            going = 0
            note_told(state, gone)
        elif tl.sum(late.to(tl.int32)) == 0:
            good = 1
            going = 0
        else:
            clock = tl.sum(tl.where(lane == R + 1, seen, 0))
            begin = waited(clock, looks, begin)
            time = now()
            looks += 1
            if clock - begin <= deadline_ns:
                pause()
            else:
                going = 0
                if tl.load(words_at(state) + STATE_SHRINK) != 0:
                    tl.store(words + masked_word(R) + lane, lane.to(tl.int64) * 0 + 1, mask=late)
                    good = 1
                else:
                    peer = tl.min(tl.where(late, lane, R))
                    give_up(state, phase, peer, want, tl.sum(tl.where(lane == peer, seen, 0)), want, R, RP)
    if waits != 0:
        told = needed & (cost >= 0)
        total = words_at(waits) + lane
        tl.store(total, tl.load(total, mask=told, other=0) + cost, mask=told)
    tl.debug_barrier()
    return good


@triton.jit
def gate(state, epoch, R: tl.constexpr, RP: tl.constexpr):
    """Wait until the third that the next call takes is free everywhere."""
    return await_words(state, PHASE_CONSUMED, consumed_word((epoch + 1) % 3, R), epoch - 2, 0, R, RP)


@triton.jit
def agree(state, call, epoch, R: tl.constexpr, RP: tl.constexpr):
    """What all ranks must have the same of is the same in all headers: 0. Else a status, which every rank finds alike."""
    lane = tl.arange(0, RP)
    alive = alive_lanes(state, R, RP)
    record = control_of(state) + record_word(state, epoch % 3, lane, R)
    base = tl.min(tl.where(alive == 1, lane, R))
    status = base * 0
    for word in tl.static_range(0, AGREED):
        theirs = tl.load(record + word, mask=alive == 1, other=0, cache_modifier=".cg")
        want = tl.sum(tl.where(lane == base, theirs, 0))
        peer = tl.min(tl.where((theirs != want) & (alive == 1), lane, R))
        if (peer < R) & (status == 0):
            status = S_DISAGREE + 16 * word
            say_status(state, call, status, peer, want, tl.sum(tl.where(lane == peer, theirs, 0)))
    return status


@triton.jit
def await_call(state, call, epoch, waits, R: tl.constexpr, RP: tl.constexpr):
    """Wait for what everybody sends in a call. Returns its status, 0 for good, which is noted."""
    tl.store(words_at(call) + C_STATUS, epoch * 0)
    good = await_words(state, PHASE_ARRIVED, arrived_word(epoch % 3, R), epoch, waits, R, RP)
    status = good * 0 + S_ABORTED
    if good == 0:
        tl.store(words_at(call) + C_STATUS, status)
    else:
        status = agree(state, call, epoch, R, RP)
    return status
