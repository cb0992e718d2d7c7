"""What one iteration of the soak does: a function of (seed, iteration), so that every rank knows what the others do. No I/O, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from expertwire.testing.oracle import mix64, payload_seed

AREA_BYTES = 1 << 20  # between two ranks, one way, written or read in one iteration
TRANSFERS_MAX = 20  # the same, requests
PIECES_MAX = 6  # chunks of one request
LANES = 3  # that carry the transfers; one more carries what is meant to fail
GAP_BYTES_MAX = 61  # between two pieces: odd addresses, and bytes that nothing may touch
SINK_BYTES = 1 << 18  # written from memory that its owner tries to take away
VICTIM_BYTES = 1 << 12  # of the region whose key is revoked
REVOKE_EVERY, LEAVE_EVERY = 8, 16
OUTSTANDING = (4, 512)
SIGNAL_BITS_MAX = 40  # sums cross 2^31 and 2^32
SCOPES = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` from `offset` of what the owner of the bytes offers, to `place` of where they go."""

    offset: int
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request of `source`: it writes to `target`, or reads from it."""

    number: int  # of those between these two ranks, in the order of submission
    kind: str  # "write" or "read"
    source: int
    target: int
    pieces: tuple[Piece, ...]
    lane: int
    signal: int  # added to the target's counter of (source, number); 0: none
    scope: int
    notification: int  # bytes of its payload; 0: none
    cancel: bool  # is cancelled at once, and submitted again if that succeeded

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Faults:
    """What is injected beside the transfers."""

    revoked: int | None  # this rank's victim region is closed before the others write to it
    leaver: int | None  # this rank closes its endpoint at the end and comes back with another
    old_blobs: bool  # it is given the others' blobs from before they remove it: what these lead to may be replaced since
    out_of_range: tuple[int, ...]  # by rank: how many writes and reads that end beyond their region
    in_use: tuple[int | None, ...]  # by rank: the peer that it writes to from memory that it closes meanwhile


def draw(*key: object) -> random.Random:
    """A generator for one purpose."""
    return random.Random("/".join(map(str, key)))


def content_seed(seed: int, iteration: int, kind: str, source: int, target: int) -> int:
    """Of the bytes that `source` writes to `target`, or reads from it."""
    lot = mix64(seed) ^ mix64(iteration * 8 + ("write", "read", "sink", "notification").index(kind))
    return payload_seed(source, mix64(lot) ^ mix64(target + 1))


def pressure(seed: int, rank: int, incarnation: int) -> int:
    """How many operations a rank's endpoint may have in flight: few as often as many."""
    low, high = (math.log2(limit) for limit in OUTSTANDING)
    return int(2.0 ** draw(seed, "pressure", rank, incarnation).uniform(low, high) + 0.5)


def transfers(seed: int, iteration: int, source: int, target: int) -> list[Transfer]:
    """What `source` does with `target` in this iteration, in the order of submission."""
    chance = draw(seed, iteration, source, target)
    count = chance.randint(0, TRANSFERS_MAX)
    kinds = [chance.choice(("write", "write", "read")) for _ in range(count)]
    pieces: list[tuple[Piece, ...]] = [()] * count
    for kind in ("write", "read"):
        numbers = [number for number in range(count) if kinds[number] == kind]
        for number, found in zip(numbers, pieces_of(chance, len(numbers), PIECES_MAX), strict=True):
            pieces[number] = found
    return [_transfer(chance, number, kinds[number], source, target, pieces[number]) for number in range(count)]


def _transfer(chance: random.Random, number: int, kind: str, source: int, target: int, pieces: tuple[Piece, ...]) -> Transfer:
    return Transfer(
        number=number,
        kind=kind,
        source=source,
        target=target,
        pieces=pieces,
        lane=chance.randrange(LANES),
        signal=chance.getrandbits(chance.randint(1, SIGNAL_BITS_MAX)) if chance.random() < 0.6 else 0,
        scope=chance.randrange(SCOPES),
        notification=chance.randint(1, 200) if chance.random() < 0.25 else 0,
        cancel=chance.random() < 0.08,
    )


def pieces_of(chance: random.Random, requests: int, parts_max: int) -> Iterator[tuple[Piece, ...]]:
    """Random sizes within one area, from an iteration of single bytes to one that fills it; no two overlap, neither there nor here."""
    split = [chance.randint(1, parts_max) if chance.random() < 0.3 else 1 for _ in range(requests)]
    count = sum(split)
    room = AREA_BYTES - count * (GAP_BYTES_MAX + 1)
    most = round(2.0 ** chance.uniform(0, math.log2(room)))
    wanted = [round(2.0 ** chance.uniform(0, math.log2(most))) for _ in range(count)]
    shrink = min(1.0, room / max(1, sum(wanted)))
    sizes = [max(1, int(size * shrink)) for size in wanted]
    offsets, places = [0] * count, [0] * count
    for found in (offsets, places):
        order = list(range(count))
        chance.shuffle(order)
        at = 0
        for index in order:
            at += chance.randint(0, GAP_BYTES_MAX)
            found[index] = at
            at += sizes[index]
    every = [Piece(offset, place, size) for offset, place, size in zip(offsets, places, sizes, strict=True)]
    at = 0
    for parts in split:
        yield tuple(every[at : at + parts])
        at += parts


def faults(seed: int, iteration: int, ranks: int) -> Faults:
    """What goes wrong on purpose. Keys are revoked and ranks leave at a fixed pace, so that a short soak has some of each."""
    chance = draw(seed, iteration, "faults")
    return Faults(
        revoked=chance.randrange(ranks) if iteration % REVOKE_EVERY == 3 else None,
        leaver=chance.randrange(ranks) if iteration % LEAVE_EVERY == 7 else None,
        old_blobs=draw(seed, iteration, "old blobs").random() < 0.5,
        out_of_range=tuple(chance.randint(1, 3) if chance.random() < 0.2 else 0 for _ in range(ranks)),
        in_use=tuple(
            chance.choice([peer for peer in range(ranks) if peer != rank]) if chance.random() < 0.25 else None for rank in range(ranks)
        ),
    )
