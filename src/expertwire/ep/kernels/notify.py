"""notify: how every operation begins. One program a rank.

What moves: a header and some counts to each rank (some hundred bytes), and is_token_in_rank read once (T·R bytes). The floor is the wait:
two crossings of the link, and as long as the last rank takes to come. No row leaves before all R notifies are here, so who offers a
buffer in one has seen the end of the operation before.

`notify_dispatch` counts, tells and waits; with all counts every rank knows every rank's totals, where its own rows begin at each
receiver, and whether they fit. `notify_again` is for operations whose counts a handle has: a repeated dispatch, and combine.
"""

import triton
import triton.language as tl

from expertwire.ep.kernels.words import (
    F_OVERFLOW,
    F_STATUS,
    FIRST,
    H_CAPACITY,
    H_EPOCH,
    H_EXPERTS,
    H_HANDLE,
    H_OFFER,
    H_OPERATION,
    H_ROW,
    H_SHAPE,
    H_WEIGHTS,
    H_WORST,
    HEADER,
    M_EPOCH,
    M_GOT,
    M_OVER,
    M_PEER,
    M_STATUS,
    M_TOTAL,
    M_WANT,
    META,
    PHASE_NOTIFY,
    PHASE_TWO,
    R_EPOCH,
    R_TOTAL,
    ROUTING,
    S_CAPACITY,
    S_MISMATCH,
    S_UNSENT,
    STATE,
    T_BASE,
    T_IDS,
    T_SCALES,
    T_SOURCE,
    T_WEIGHTS,
    T_X,
    TICKET,
    await_all,
    control_of,
    give_up,
    ints_at,
    kernel,
    look_at_own,
    meta_of,
    note_status,
    note_told,
    rank_of,
    record_of,
    tell,
    typed,
    words_at,
)

NOTIFY_DISPATCH, NOTIFY_AGAIN, NOTIFY_COMBINE = 1, 2, 3  # operations, as a header names them
MAILBOX_STATUS, MAILBOX_PEER, MAILBOX_WANT, MAILBOX_GOT, MAILBOX_TOTAL, MAILBOX = 0, 1, 2, 3, 4, 8
_BOX = tl.constexpr(MAILBOX)
_BOX_TOTAL = tl.constexpr(MAILBOX_TOTAL)


@triton.jit
def align(count):
    """The next multiple of 64."""
    return (count + 63) // 64 * 64


@triton.jit
def first_slot(R: tl.constexpr):
    """Word where the notify slots begin."""
    return (FIRST + 2 * R + 15) // 16 * 16


@triton.jit
def begin(state, R: tl.constexpr, RP: tl.constexpr):
    """The number of this operation, and whether it may go on. Beside an operation that has not ended yet nothing of either can be right,
    for they share `meta`: this rank gives up, so that all hear of it at once."""
    before, finished, aborted = look_at_own(state, 1)
    epoch = before + 1
    if aborted != 0:
        note_told(state, aborted)
        tl.store(control_of(state) + TICKET, epoch * 0)  # kernels that ran at the same time may have left it wrong
    elif finished + 1 != epoch:
        give_up(state, PHASE_TWO, rank_of(state), epoch, finished, epoch, R, RP)
    else:
        note = meta_of(state)
        tl.store(note + M_EPOCH, epoch)
        tl.store(note + M_STATUS, epoch * 0)
    tl.debug_barrier()
    return epoch, (aborted == 0) & (finished + 1 == epoch)


@triton.jit
def send_header(control_of_peer, rank, epoch, header, R: tl.constexpr, SLOT: tl.constexpr):
    """Write the header into this rank's slot at a peer. Returns where the counts behind it go."""
    slot = words_at(control_of_peer) + first_slot(R) + ((epoch % 2) * R + rank) * SLOT
    tl.store(slot + tl.arange(0, HEADER), header)
    return slot + HEADER


@triton.jit
def slot_of(state, source, epoch, R: tl.constexpr, SLOT: tl.constexpr):
    """This rank's slot of a source, or of several."""
    return control_of(state) + first_slot(R) + ((epoch % 2) * R + source) * SLOT


@triton.jit
def fail(state, quiet, status, peer, want, got):
    """This operation moves no rows. Unless the host waits for it (`quiet`), the record tells it later."""
    note = meta_of(state)
    tl.store(note + M_STATUS, status)
    tl.store(note + M_PEER, peer)
    tl.store(note + M_WANT, want)
    tl.store(note + M_GOT, got)
    if quiet == 0:
        note_status(record_of(state) + F_STATUS, status, peer, want, got)


@triton.jit
def compare(state, quiet, epoch, R: tl.constexpr, RP: tl.constexpr, SLOT: tl.constexpr):
    """Words 1 … 6 of all headers must be this rank's. 1: they are. Every rank finds the same, so all go without rows."""
    lane = tl.arange(0, RP)
    same = 1
    for word in tl.static_range(1, 7):
        theirs = tl.load(slot_of(state, lane, epoch, R, SLOT) + word, mask=lane < R, other=0, cache_modifier=".cg")
        first = tl.sum(tl.where(lane == 0, theirs, 0))
        peer = tl.min(tl.where((theirs != first).to(tl.int32) * (lane < R).to(tl.int32) == 1, lane, R))
        if same == 1:
            if peer < R:
                same = 0
                fail(state, quiet, S_MISMATCH + 16 * word, peer, first, tl.sum(tl.where(lane == peer, theirs, 0)))
    return same


@triton.jit
def count_tokens(in_rank, prefix, tokens, R: tl.constexpr, RP: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Tokens for each rank [RP]; `prefix` [groups, R]: those before each group of GROUP tokens. TILE groups at a time."""
    total = tl.zeros([RP], tl.int32)
    flags = typed(in_rank, tl.int8)
    before = ints_at(prefix)
    lane = tl.arange(0, RP)
    groups = tl.cdiv(tokens, GROUP)
    for start in range(0, groups, TILE):
        group = start + tl.arange(0, TILE)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (token < tokens)[:, :, None] & (lane < R)[None, None, :]
        there = tl.load(flags + token[:, :, None] * R + lane[None, None, :], mask=inside, other=0)
        counts = tl.sum((there != 0).to(tl.int32), axis=1)
        exclusive = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(before + group[:, None] * R + lane[None, :], exclusive, mask=(group < groups)[:, None] & (lane < R)[None, :])
        total += tl.sum(counts, axis=0)
    return total


@triton.jit
def note_addresses(state, rows, row_bytes, shape, offer, R: tl.constexpr, RP: tl.constexpr):
    """Where everything goes at each receiver, which offers `offer` [RP] and receives `rows` [RP]. Returns bytes that it takes [RP].

    As ep/plan.dispatch_extent lays it out."""
    lane = tl.arange(0, RP)
    live = lane < R
    base = tl.load(words_at(state) + STATE + R + lane, mask=live, other=0) + offer
    shape = shape.to(tl.int64)
    topk = shape % 65536
    source = align(rows * row_bytes)
    ids = align(source + rows * 4)
    weights = align(ids + rows * topk * ((shape >> 16) % 16))
    scales = align(weights + rows * topk * 4 * ((shape >> 20) % 2))
    table = meta_of(state) + META + lane
    tl.store(table + T_X * R, base, mask=live)
    tl.store(table + T_SOURCE * R, base + source, mask=live)
    tl.store(table + T_IDS * R, base + ids, mask=live)
    tl.store(table + T_WEIGHTS * R, base + weights, mask=live)
    tl.store(table + T_SCALES * R, base + scales, mask=live)
    return align(scales + rows * (shape >> 32))


@triton.jit
def count_experts(
    state, counts, mailbox, epoch, experts, alignment, R: tl.constexpr, RP: tl.constexpr, SLOT: tl.constexpr, STEP: tl.constexpr
):
    """Rows for each expert here, added up over sources: to the device [2, E_l], rounded up and as they are, and to the host's mailbox."""
    lane = tl.arange(0, RP)
    rank = rank_of(state)
    share = experts // R
    local = share + tl.where(rank < experts % R, 1, 0)
    for start in range(0, local, STEP):
        expert = start + tl.arange(0, STEP)
        inside = expert < local
        slots = (slot_of(state, lane, epoch, R, SLOT) + HEADER).to(tl.pointer_type(tl.int32)) + R
        found = tl.load(slots[:, None] + expert[None, :], mask=(lane < R)[:, None] & inside[None, :], other=0, cache_modifier=".cg")
        raw = tl.sum(found, axis=0)
        if counts != 0:
            tl.store(ints_at(counts) + expert, (raw + alignment - 1) // alignment * alignment, mask=inside)
            tl.store(ints_at(counts) + local + expert, raw, mask=inside)
        if mailbox != 0:
            tl.store(words_at(mailbox) + _BOX + expert, raw.to(tl.int64), mask=inside)


@triton.jit
def deliver(state, mailbox, total):
    """What the host waits for."""
    if mailbox != 0:
        tl.debug_barrier()
        note = meta_of(state)
        box = words_at(mailbox)
        tl.store(box, tl.load(note + M_STATUS))
        tl.store(box + 1, tl.load(note + M_PEER))
        tl.store(box + 2, tl.load(note + M_WANT))
        tl.store(box + 3, tl.load(note + M_GOT))
        tl.store(box + _BOX_TOTAL, total)


@triton.jit
def settle_dispatch(
    state,
    routing,
    counts,
    mailbox,
    epoch,
    experts,
    worst,
    alignment,
    row_bytes,
    shape,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT: tl.constexpr,
    STEP: tl.constexpr,
):
    """All notifies are here: rows, bases, addresses, counts. Returns rows received here."""
    rank = rank_of(state)
    lane = tl.arange(0, RP)
    live = lane < R
    slots = slot_of(state, lane, epoch, R, SLOT)
    both = live[:, None] & live[None, :]
    matrix = tl.load((slots + HEADER).to(tl.pointer_type(tl.int32))[:, None] + lane[None, :], mask=both, other=0, cache_modifier=".cg")
    matrix = matrix.to(tl.int64)
    ends = tl.cumsum(matrix, axis=0)
    total = tl.sum(matrix, axis=0)
    base = tl.sum(tl.where(lane[:, None] == rank, ends - matrix, 0), axis=0)
    tl.store(meta_of(state) + META + T_BASE * R + lane, base, mask=live)
    rows = total
    if worst > 0:
        matrix = tl.minimum(ends, worst) - tl.minimum(ends - matrix, worst)
        rows = total * 0 + worst
        over = tl.min(tl.where(total > worst, lane, R))
        if over < R:
            note_status(record_of(state) + F_OVERFLOW, over + 1, tl.sum(tl.where(lane == over, total, 0)), worst, epoch)
    offer = tl.load(slots + H_OFFER, mask=live, other=0, cache_modifier=".cg")
    capacity = tl.load(slots + H_CAPACITY, mask=live, other=0, cache_modifier=".cg")
    needed = note_addresses(state, rows, row_bytes, shape, offer, R, RP)
    small = tl.min(tl.where(live, tl.where(needed > capacity, lane, R), R))
    mine = tl.sum(tl.where(lane == rank, tl.sum(matrix, axis=0), 0))
    tl.store(meta_of(state) + M_TOTAL, mine)
    tl.store(meta_of(state) + M_OVER, tl.sum(tl.where(lane == rank, total, 0)) - mine)
    tl.store(words_at(routing) + ROUTING + lane[:, None] * R + lane[None, :], matrix, mask=both)
    if small < R:
        fail(state, mailbox, S_CAPACITY, small, tl.sum(tl.where(lane == small, needed, 0)), tl.sum(tl.where(lane == small, capacity, 0)))
    else:
        tl.store(words_at(routing) + R_EPOCH, epoch)
        tl.store(words_at(routing) + R_TOTAL, mine)
    count_experts(state, counts, mailbox, epoch, experts, alignment, R, RP, SLOT, STEP)
    return mine


@kernel
def notify_dispatch(
    state: tl.int64,
    in_rank: tl.int64,
    per_expert: tl.int64,
    prefix: tl.int64,
    routing: tl.int64,
    counts: tl.int64,
    mailbox: tl.int64,
    tokens: tl.int64,
    offer: tl.int64,
    capacity: tl.int64,
    experts: tl.int64,
    worst: tl.int64,
    alignment: tl.int64,
    row_bytes: tl.int64,
    shape: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Addresses, but for offer, which is bytes from the start of the data region. in_rank: bool[T, R]; per_expert: i32[E]; prefix: i32
    [groups, R], out; routing: out; counts: i32[2, E_l], out, or 0; mailbox: host words, or 0 where the host waits for nothing."""
    epoch, going = begin(state, R, RP)
    tl.store(words_at(routing) + R_EPOCH, -epoch)  # whatever becomes of this operation, what comes behind it reads no memory's leftovers
    tl.store(words_at(routing) + R_TOTAL, epoch * 0)
    if going:
        rank = rank_of(state)
        lane = tl.arange(0, RP)
        mine = count_tokens(in_rank, prefix, tokens, R, RP, GROUP, TILE)
        word = tl.arange(0, HEADER)
        header = tl.where(word == H_EPOCH, epoch, 0)
        header = tl.where(word == H_OPERATION, 1, header)
        header = tl.where(word == H_HANDLE, 0, header)
        header = tl.where(word == H_WORST, worst, header)
        header = tl.where(word == H_ROW, row_bytes, header)
        header = tl.where(word == H_SHAPE, shape, header)
        header = tl.where(word == H_EXPERTS, experts, header)
        header = tl.where(word == H_OFFER, offer, header)
        header = tl.where(word == H_CAPACITY, capacity, header)
        share = experts // R
        extra = experts % R
        for peer in range(R):
            behind = send_header(tl.load(words_at(state) + STATE + peer), rank, epoch, header, R, SLOT).to(tl.pointer_type(tl.int32))
            tl.store(behind + lane, mine, mask=lane < R)
            first = peer * share + tl.minimum(peer, extra)
            local = share + tl.where(peer < extra, 1, 0)
            for start in range(0, local, STEP):
                expert = start + tl.arange(0, STEP)
                rows = tl.load(ints_at(per_expert) + first + expert, mask=expert < local, other=0)
                tl.store(behind + R + expert, rows, mask=expert < local)
        tell(state, FIRST + rank, epoch, R, RP)
        if await_all(state, PHASE_NOTIFY, FIRST, epoch, R, RP) == 1:
            total = epoch * 0
            if compare(state, mailbox, epoch, R, RP, SLOT) == 1:
                total = settle_dispatch(
                    state, routing, counts, mailbox, epoch, experts, worst, alignment, row_bytes, shape, R, RP, SLOT, STEP
                )
            deliver(state, mailbox, total)


@kernel
def notify_again(
    state: tl.int64,
    routing: tl.int64,
    mailbox: tl.int64,
    operation: tl.int64,
    offer: tl.int64,
    capacity: tl.int64,
    weights: tl.int64,
    worst: tl.int64,
    row_bytes: tl.int64,
    shape: tl.int64,
    R: tl.constexpr,
    RP: tl.constexpr,
    SLOT: tl.constexpr,
):
    """A repeated dispatch offers room for its rows; a combine says where its rows and weights are, as bytes of the data region."""
    epoch, going = begin(state, R, RP)
    if going:
        rank = rank_of(state)
        lane = tl.arange(0, RP)
        live = lane < R
        word = tl.arange(0, HEADER)
        header = tl.where(word == H_EPOCH, epoch, 0)
        header = tl.where(word == H_OPERATION, operation, header)
        handle = tl.load(words_at(routing) + R_EPOCH)
        header = tl.where(word == H_HANDLE, handle, header)
        header = tl.where(word == H_WORST, worst, header)
        header = tl.where(word == H_ROW, row_bytes, header)
        header = tl.where(word == H_SHAPE, shape, header)
        header = tl.where(word == H_OFFER, offer, header)
        header = tl.where(word == H_CAPACITY, capacity, header)
        header = tl.where(word == H_WEIGHTS, weights, header)
        for peer in range(R):
            send_header(tl.load(words_at(state) + STATE + peer), rank, epoch, header, R, SLOT)
        tell(state, FIRST + rank, epoch, R, RP)
        if await_all(state, PHASE_NOTIFY, FIRST, epoch, R, RP) == 1:
            if handle <= 0:
                fail(state, mailbox, S_UNSENT, rank, -handle, handle * 0)
            elif compare(state, mailbox, epoch, R, RP, SLOT) == 1:
                slots = slot_of(state, lane, epoch, R, SLOT)
                theirs = tl.load(slots + H_OFFER, mask=live, other=0, cache_modifier=".cg")
                if operation == 3:
                    data = tl.load(words_at(state) + STATE + R + lane, mask=live, other=0)
                    their_weights = tl.load(slots + H_WEIGHTS, mask=live, other=0, cache_modifier=".cg")
                    tl.store(meta_of(state) + META + T_X * R + lane, data + theirs, mask=live)
                    tl.store(meta_of(state) + META + T_WEIGHTS * R + lane, data + their_weights, mask=live)
                else:
                    both = live[:, None] & live[None, :]
                    matrix = tl.load(words_at(routing) + ROUTING + lane[:, None] * R + lane[None, :], mask=both, other=0)
                    rows = tl.sum(matrix, axis=0)
                    rows = tl.where(worst > 0, worst, rows)
                    room = tl.load(slots + H_CAPACITY, mask=live, other=0, cache_modifier=".cg")
                    needed = note_addresses(state, rows, row_bytes, shape, theirs, R, RP)
                    small = tl.min(tl.where(live, tl.where(needed > room, lane, R), R))
                    if small < R:
                        fail(
                            state,
                            mailbox,
                            S_CAPACITY,
                            small,
                            tl.sum(tl.where(lane == small, needed, 0)),
                            tl.sum(tl.where(lane == small, room, 0)),
                        )
            deliver(state, mailbox, epoch * 0)
