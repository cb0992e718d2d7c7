"""What one iteration of `soak transfer` does: a function of (seed, iteration), so that every agent knows what the others do. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from expertwire.cli.soak.plan import Piece, draw, pieces_of
from expertwire.testing.oracle import mix64, payload_seed

MOVES_MAX = 6  # between two agents, one way
PIECES_MAX = 520  # descriptors of one transfer; X2 has 513
NOTIFICATION_BYTES_MAX = 200
STANDALONE_MAX = 3
SINK_BYTES = 1 << 18  # written to an agent while it is killed
BURST = 4  # such writes
VICTIM_BYTES = 1 << 12  # of the memory whose registration is taken back
STALE_EVERY, KILL_EVERY = 4, 8


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer of `source` with `target`: a READ from it or a WRITE to it."""

    number: int  # of those between these two, in the order of posting
    kind: str  # "read" or "write"
    source: int
    target: int
    pieces: tuple[Piece, ...]
    order: tuple[int, ...]  # in which prepared descriptors are taken; empty: made from two lists without preparing
    again: bool  # posted a second time once it is done
    notification: int  # bytes of the one attached; -1: none

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on purpose in one iteration, beside the moves."""

    stale: int | None  # this agent takes a registration back, and the others use it
    killed: int | None  # this one is killed while the others write to it, and started again under its name
    unregistered: tuple[int, ...]  # by agent: how many transfers with memory that nobody has registered


def content_seed(seed: int, iteration: int, what: str, source: int, target: int) -> int:
    """Of the bytes that `source` writes to `target`, or reads from it."""
    lot = mix64(seed) ^ mix64(iteration * 8 + ("write", "read", "notification").index(what))
    return payload_seed(source, mix64(lot) ^ mix64(target + 1))


def moves(seed: int, iteration: int, source: int, target: int) -> list[Move]:
    """What `source` does with `target`, in the order of posting."""
    chance = draw(seed, iteration, source, target, "transfer")
    kinds = [chance.choice(("write", "read")) for _ in range(chance.randint(1, MOVES_MAX))]
    found: list[tuple[Piece, ...]] = [()] * len(kinds)
    for kind in ("write", "read"):
        numbers = [number for number, one in enumerate(kinds) if one == kind]
        for number, parts in zip(numbers, pieces_of(chance, len(numbers), PIECES_MAX), strict=True):
            found[number] = parts
    return [_move(chance, number, kind, source, target, found[number]) for number, kind in enumerate(kinds)]


def _move(chance: random.Random, number: int, kind: str, source: int, target: int, pieces: tuple[Piece, ...]) -> Move:
    order = list(range(len(pieces)))
    if chance.random() < 0.5:
        chance.shuffle(order)
    return Move(
        number,
        kind,
        source,
        target,
        pieces,
        tuple(order) if chance.random() < 0.6 else (),
        chance.random() < 0.3,
        chance.randint(0, NOTIFICATION_BYTES_MAX) if chance.random() < 0.4 else -1,
    )


def standalone(seed: int, iteration: int, source: int, target: int) -> list[int]:
    """Bytes of each notification that `source` sends to `target` alone, in order."""
    chance = draw(seed, iteration, source, target, "standalone")
    return [chance.randint(0, NOTIFICATION_BYTES_MAX) for _ in range(chance.randint(0, STANDALONE_MAX))]


def faults(seed: int, iteration: int, agents: int) -> Faults:
    """Registrations are taken back and agents killed at a fixed pace, so that a short soak has some of each."""
    chance = draw(seed, iteration, "transfer faults")
    return Faults(
        chance.randrange(agents) if iteration % STALE_EVERY == 1 else None,
        chance.randrange(agents) if iteration % KILL_EVERY == 2 else None,
        tuple(chance.randint(1, 2) if chance.random() < 0.3 else 0 for _ in range(agents)),
    )
