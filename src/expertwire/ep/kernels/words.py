"""Words that ranks share, and what every kernel does with them: publish, await, give up.

A rank's control region is int64 words, in device memory that every rank has mapped: a few of its own, then `notified[R]` and `done[R]`,
which have one writer each and hold the number of an operation (epoch), then notify slots [2 parities][R sources]. Nothing is ever reset
but by the collective `reset()` (renew.py), so a replayed graph needs no preparation, and a late word of an older operation never looks
like news.

Only one program of a kernel ever waits: the one of a notify, or the one that finished last. So nothing has to run at the same time for a
wait to end, however few programs the device has room for.

A load, and a look at the clock, is each warp's own. Where what they give may change meanwhile, two warps of a program could take different
branches, and from then on count at each other's barriers, so that what goes through shared memory is mixed up: no branch may depend on
them. What one atomic instruction gives reaches all warps through shared memory, so branches depend on that (`look`, `look_at_own`,
`look_at_all`); where there is no need to branch, stores have a mask.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from expertwire.ep.kernels.clock import now, pause

# Words of `state`, the one address that every kernel of a Buffer is given: where its memory is, then control[R] and data[R] of all ranks.
STATE_CONTROL, STATE_META, STATE_RECORD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STATE_RANK, STATE_DEADLINE = tl.constexpr(3), tl.constexpr(4)  # nanoseconds
STATE = tl.constexpr(8)

# Own words of a control region, by number.
EPOCH = tl.constexpr(0)  # operations begun here
FINISHED = tl.constexpr(1)  # operations ended here
ABORT = tl.constexpr(2)  # once a rank has given up: 1 + that rank, 1 + the rank that it waited for << 16, phase << 32
TICKET = tl.constexpr(3)  # programs of the kernel that runs that have finished
RENEWED = tl.constexpr(4)  # renewals of this region
CLOCK = tl.constexpr(5)  # when a wait here has looked last
FIRST = tl.constexpr(16)  # of notified[R], then done[R]
HEADER = tl.constexpr(16)  # words before the counts of a slot

# Words of a header: what a rank tells every other at the start of an operation.
H_EPOCH, H_OPERATION, H_HANDLE, H_WORST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
H_ROW, H_SHAPE, H_EXPERTS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)  # 1 … 6 must be the same on all ranks
H_OFFER, H_CAPACITY, H_WEIGHTS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)

# Words of `meta`: what the notify of an operation leaves for the kernel that moves its rows. Then tables [R].
M_EPOCH, M_STATUS, M_PEER, M_TOTAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
M_WANT, M_GOT, M_OVER = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
META = tl.constexpr(16)
T_BASE, T_X, T_SOURCE, T_IDS, T_WEIGHTS, T_SCALES = (tl.constexpr(n) for n in range(6))

# Statuses: why an operation moves no rows. OK is 0.
S_MISMATCH, S_CAPACITY, S_UNSENT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

# Words of a handle's routing tensor, then rows from source to destination [R, R], without those that there was no room for.
R_EPOCH, R_TOTAL = tl.constexpr(0), tl.constexpr(1)  # negative and 0 of a dispatch that moved no rows
ROUTING = tl.constexpr(8)

# Words of the record of a failure.
F_CODE, F_RANK, F_PHASE, F_PEER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
F_WANT, F_SEEN, F_EPOCH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
F_OVERFLOW = tl.constexpr(8)  # rank + 1, total, W, epoch of the first overflow; then the first status that nobody waited for
F_STATUS = tl.constexpr(12)  # status, peer, wanted, got
F_BAD_ID = tl.constexpr(16)  # 1: a layout was asked for with ids that are no experts
DEADLINE, TOLD = tl.constexpr(1), tl.constexpr(2)  # codes: this rank gave up; F_RANK did, and said so
PHASE_NOTIFY, PHASE_ROWS = tl.constexpr(1), tl.constexpr(2)
PHASE_TWO = tl.constexpr(3)  # nothing was waited for: two operations of one Buffer ran at the same time


def kernel(function: Callable[..., None]) -> Any:
    """A kernel whose numbers are never specialised: all ranks, and all calls, run the same code."""
    numbers = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=numbers)


@triton.jit
def words_at(address):
    """Where int64 words are."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def ints_at(address):
    """Where int32 numbers are."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def typed(address, KIND: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Where values of a type are; ALIGN bytes divide it (said here, for a hint on what a function returns is lost). An address below 2**31,
    such as none at all, is an int32 in Triton's interpreter."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(KIND)), ALIGN)


@triton.jit
def control_of(state):
    """Where this rank's control words are."""
    return words_at(tl.load(words_at(state) + STATE_CONTROL))


@triton.jit
def meta_of(state):
    """Where the words are that a notify leaves for the kernel behind it."""
    return words_at(tl.load(words_at(state) + STATE_META))


@triton.jit
def record_of(state):
    """Where the host finds why something failed."""
    return words_at(tl.load(words_at(state) + STATE_RECORD))


@triton.jit
def rank_of(state):
    """This rank."""
    return tl.load(words_at(state) + STATE_RANK)


@triton.jit
def look(word):
    """A word that may change at any time, the same for all warps."""
    return tl.atomic_add(word, 0, sem="relaxed", scope="sys")


@triton.jit
def look_at_own(state, step: tl.constexpr):
    """EPOCH, to which `step` is added, FINISHED and ABORT as they were before, the same for all warps, in one crossing to memory."""
    lane = tl.arange(0, 4)
    seen = tl.atomic_add(control_of(state) + lane, tl.where(lane == EPOCH, step, 0).to(tl.int64), sem="relaxed", scope="sys")
    epoch = tl.sum(tl.where(lane == EPOCH, seen, 0))
    return epoch, tl.sum(tl.where(lane == FINISHED, seen, 0)), tl.sum(tl.where(lane == ABORT, seen, 0))


@triton.jit
def look_at_all(place, lane, needed, time, R: tl.constexpr):
    """One look of a wait at words, none of which is negative: the same for all warps. Lane R + 1 is that of CLOCK, which becomes `time`,
    and gives what it was: so one crossing to memory tells whether the deadline has passed, too."""
    return tl.atomic_max(place, tl.where(lane == R + 1, time, 0).to(tl.int64), mask=needed | (lane == R + 1), sem="acquire", scope="sys")


@triton.jit
def waited(clock, looks, begin):
    """When a wait began, as all warps know it; `clock`: what CLOCK was at its look number `looks`. The first look brings no time, for who
    need not wait shall not read the timer either, so that the second finds what an earlier wait has left."""
    return tl.where(looks <= 2, clock, begin)


@triton.jit
def is_last(state):
    """The end of every program of a kernel that moves rows: whether it is the last one to end."""
    tl.debug_barrier()
    before = tl.atomic_add(control_of(state) + TICKET, 1, sem="acq_rel", scope="sys")
    last = before == tl.num_programs(0) - 1
    if last:
        tl.store(control_of(state) + TICKET, before * 0)
    tl.debug_barrier()
    return last


@triton.jit
def tell(state, number, value, R: tl.constexpr, RP: tl.constexpr):
    """Word `number` of every rank becomes `value`, behind everything that this program has written."""
    tl.debug_barrier()
    lane = tl.arange(0, RP)
    bases = tl.load(words_at(state) + STATE + lane, mask=lane < R, other=0)
    tl.atomic_xchg(words_at(bases + number * 8), value + lane * 0, mask=lane < R, sem="release", scope="sys")


@triton.jit
def give_up(state, phase, peer, want, seen, epoch, R: tl.constexpr, RP: tl.constexpr):
    """Nobody goes on after this: the first who gives up says why in its record, and every rank's kernels see it."""
    rank = rank_of(state)
    word = rank + 1 + (peer.to(tl.int64) + 1) * 65536 + (want * 0 + phase) * 4294967296
    old = tl.atomic_cas(control_of(state) + ABORT, want * 0, word, sem="acq_rel", scope="sys")
    if old == 0:
        note = record_of(state)
        tl.store(note + F_RANK, rank)
        tl.store(note + F_PHASE, phase)
        tl.store(note + F_PEER, peer)
        tl.store(note + F_WANT, want)
        tl.store(note + F_SEEN, seen)
        tl.store(note + F_EPOCH, epoch)
        lane = tl.arange(0, RP)
        bases = tl.load(words_at(state) + STATE + lane, mask=lane < R, other=0)
        tl.atomic_max(words_at(bases + ABORT * 8), word + lane.to(tl.int64) * 0, mask=lane < R, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        tl.store(note + F_CODE, DEADLINE)


@triton.jit
def note_told(state, word):
    """Another rank gave up, as its word says: the host is told that, unless there is more to tell."""
    note = record_of(state)
    first = tl.load(note + F_CODE) == 0
    tl.store(note + F_RANK, (word & 65535) - 1, mask=first)
    tl.store(note + F_PEER, ((word >> 16) & 65535) - 1, mask=first)
    tl.store(note + F_PHASE, word >> 32, mask=first)
    tl.debug_barrier()
    tl.store(note + F_CODE, TOLD, mask=first)


@triton.jit
def note_status(note, status, peer, want, got):
    """Why a call moved no rows, where the record has room for one status, unless there is one that the host has not read."""
    first = tl.load(note) == 0
    tl.store(note + 1, peer, mask=first)
    tl.store(note + 2, want, mask=first)
    tl.store(note + 3, got, mask=first)
    tl.debug_barrier()
    tl.store(note, status, mask=first)


@triton.jit
def await_all(state, phase, first, want, R: tl.constexpr, RP: tl.constexpr):
    """Wait until the words [first, first + R) have all reached `want`: 1. 0: somebody gave up, perhaps this rank, now."""
    lane = tl.arange(0, 4 * RP)
    place = control_of(state) + tl.where(lane < R, first + lane, tl.where(lane == R, ABORT, CLOCK))
    deadline_ns = tl.load(words_at(state) + STATE_DEADLINE)
    begin = want * 0
    time = want * 0
    looks = 0
    going = 1
    good = 0
    while going == 1:
        seen = look_at_all(place, lane, lane <= R, time, R)
        behind = tl.sum(tl.where(lane < R, (seen < want).to(tl.int32), 0))
        aborted = tl.sum(tl.where(lane == R, seen, 0))
        if aborted != 0:
            going = 0
            note_told(state, aborted)
        elif behind == 0:
            good = 1
            going = 0
        else:
            clock = tl.sum(tl.where(lane == R + 1, seen, 0))
            begin = waited(clock, looks, begin)
            time = now()
            looks += 1
            if clock - begin > deadline_ns:
                going = 0
                late = tl.where(lane < R, (seen < want).to(tl.int32), 0)
                peer = tl.min(tl.where(late == 1, lane, R))
                give_up(state, phase, peer, want, tl.sum(tl.where(lane == peer, seen, 0)), want, R, RP)
            else:
                pause()
    return good


@triton.jit
def finish(state, R: tl.constexpr, RP: tl.constexpr):
    """The end of every program of a kernel that moves rows, or should. The last one tells every rank that this one is done, and waits for
    all. 1: this is the last, and all are done; 2: it is the last, and somebody gave up; 0: it is not."""
    last = 0
    if is_last(state):
        last = 2
        if look(control_of(state) + ABORT) == 0:
            epoch = tl.load(meta_of(state) + M_EPOCH)
            tell(state, FIRST + R + rank_of(state), epoch, R, RP)
            if await_all(state, PHASE_ROWS, FIRST + R, epoch, R, RP) == 1:
                tl.store(control_of(state) + FINISHED, epoch)
                last = 1
    return last
