"""low_latency_resume: a rank that is taken in again is told what this one has consumed meanwhile.

What moves: three words. Words are absolute, so what was not told is made up for at once.
"""

import triton.language as tl

from expertwire.ep.kernels.low_latency_words import consumed_word, control_at, packed_word
from expertwire.ep.kernels.words import control_of, kernel, rank_of, words_at


@kernel
def low_latency_resume(state: tl.int64, rank: tl.int64, R: tl.constexpr):
    """rank: who is taken in."""
    for third in tl.static_range(3):
        epoch = tl.load(control_of(state) + packed_word(third, R))
        word = words_at(control_at(state, rank)) + consumed_word(third, R) + rank_of(state)
        tl.atomic_max(word, epoch, sem="release", scope="sys")
