"""renew: a control region after a failure, for either mode: as after the last operation that any rank has begun. One program a rank.

What moves: two words to every rank, one from every rank, and every word of this one's. Ranks meet twice: when all are here nobody's kernels
touch anybody's words any more, and nobody goes on before all words are as they should be. Where a rank did not come until the deadline the
same renewal is tried again: who was here is, and who has renewed its words does not do so twice. Numbers of operations go on growing, so
that what was captured before, and a word that is looked at late, mean what they meant.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.clock import now, pause
from expertwire.ep.kernels.words import (
    ABORT,
    CLOCK,
    EPOCH,
    FINISHED,
    FIRST,
    RENEWED,
    STATE,
    TICKET,
    control_of,
    kernel,
    look,
    look_at_all,
    rank_of,
    tell,
    waited,
    words_at,
)


@triton.jit
def meet(state, number, first, deadline_ns, R: tl.constexpr, RP: tl.constexpr):
    """This rank's word from `first` on becomes `number` at every rank; wait until all have. Returns who has not by then; R: all have."""
    tell(state, first + rank_of(state), number, R, RP)
    lane = tl.arange(0, 4 * RP)
    place = control_of(state) + tl.where(lane < R, first + lane, CLOCK)
    begin = number * 0
    time = number * 0
    looks = 0
    late = R
    going = 1
    while going == 1:
        seen = look_at_all(place, lane, lane < R, time, R)
        late = tl.min(tl.where((seen < number) & (lane < R), lane, R))
        if late == R:
            going = 0
        else:
            clock = tl.sum(tl.where(lane == R + 1, seen, 0))
            begin = waited(clock, looks, begin)
            time = now()
            looks += 1
            if clock - begin > deadline_ns:
                going = 0
            else:
                pause()
    tl.debug_barrier()
    return late


@kernel
def renew(
    state: tl.int64,
    number: tl.int64,
    meeting: tl.int64,
    deadline_ns: tl.int64,
    numbers: tl.int64,
    zeros: tl.int64,
    answer: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
):
    """number: of this renewal, the same on all ranks, growing; meeting: the first of 2 R words to meet by. From word FIRST on `numbers`
    words become the number of the last operation, and `zeros` words behind them 0. answer: address of a word of the host: 0, or 1 + a rank
    that did not come."""
    late = meet(state, number, meeting, deadline_ns, R, RP)
    if late == R:
        words = control_of(state)
        if look(words + RENEWED) < number:
            lane = tl.arange(0, RP)
            bases = tl.load(words_at(state) + STATE + lane, mask=lane < R, other=0)
            last = tl.max(tl.load(words_at(bases) + EPOCH, mask=lane < R, other=0, cache_modifier=".cv"))
            step: tl.constexpr = 32
            for start in range(0, numbers + zeros, step):
                word = start + tl.arange(0, step)
                tl.store(words + FIRST + word, tl.where(word < numbers, last, 0), mask=word < numbers + zeros)
            tl.store(words + EPOCH, last)
            tl.store(words + FINISHED, last)
            tl.store(words + TICKET, last * 0)
            tl.store(words + ABORT, last * 0)
            tl.store(words + RENEWED, number)
        late = meet(state, number, meeting + R, deadline_ns, R, RP)
    tl.store(words_at(answer), number * 0 + (late + 1) % (R + 1))
