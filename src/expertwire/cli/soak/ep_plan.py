"""What one iteration of `soak ep` does: a function of (seed, iteration), so that every rank knows what the others do. No I/O, no clock.

An iteration is one flight or a few. A flight is a dispatch and what follows it, cut into phases; the phases of an iteration's flights are
interleaved, in an order that is the same on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from expertwire.cli.soak.plan import draw

MODES = ("ht", "ll", "both")
# Buffers: `main` has what the mode asks for, `small` is so small that high throughput goes in rounds, `beside` is a second of low latency.
MAIN, SMALL, BESIDE = "main", "small", "beside"
SPARSE = "sparse"  # a routing beside those of `bench ep`: distinct ids, half of them −1
HIDDENS = (16, 64, 72, 200, 512, 520, 1024)
TOKENS_MAX = 192  # of a rank, high throughput
TOPK_MAX = 8
LOCAL_EXPERTS_MAX = 8
SMALL_BYTES = 64 << 10  # 32 rows of the widest
DECODE_TOKENS_MAX, DECODE_TOKENS_ALL = 16, 128  # low latency: of a rank, and of all ranks: a reservation is for every rank's most
DECODE_LOCAL_EXPERTS_MAX = 3
AGAIN_MAX = 2
LIVE_MAX = 2  # low-latency sends of one Buffer whose hooks have not been called


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one dispatch. `tokens` by rank; `routing` as `bench ep` names it, or `SPARSE`; `seed` of rows and routing."""

    tokens: tuple[int, ...]
    hidden: int
    experts: int
    topk: int
    routing: str
    index: str  # dtype of the ids
    seed: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """High throughput: a dispatch, `again` more of other rows by its handle, and a combine of the last."""

    buffer: str
    shape: Shape
    weights: bool
    scales: str  # FP8 rows with scales of this dtype; empty: BF16
    worst: str  # num_worst_tokens: "" none, "ample", "exact", or "short" of one row
    alignment: int
    biases: int
    again: int
    in_place: bool  # the combine's rows are written over the received ones, where those are BF16
    keep: bool  # the handle is kept for a `Recall`

    @property
    def phases(self) -> tuple[str, ...]:
        """In order."""
        return ("dispatch", *("again",) * self.again, "combine")


@dataclass(frozen=True, slots=True)
class Recall:
    """High throughput: new rows by the handle that an earlier iteration kept of this Buffer, if any has, and a combine."""

    buffer: str
    seed: int

    @property
    def phases(self) -> tuple[str, ...]:
        """In order."""
        return ("again", "combine")


@dataclass(frozen=True, slots=True)
class Decode:
    """Low latency: a dispatch and a combine, each with a hook of its own to call later, or whole."""

    buffer: str
    shape: Shape
    tokens_max: int
    fp8: str  # "", "exact", "round" or "ue8m0"
    hook: bool
    zero_copy: bool
    out: bool

    @property
    def phases(self) -> tuple[str, ...]:
        """In order."""
        return ("send", "receive", "return", "collect") if self.hook else ("send", "return")


Flight = Exchange | Recall | Decode


@dataclass(frozen=True, slots=True)
class Iteration:
    """Flights, and whose phase comes next: numbers of `flights`, each as often as it has phases."""

    flights: tuple[Flight, ...]
    order: tuple[int, ...]


def decode_tokens_max(ranks: int) -> int:
    """M at most."""
    return max(1, min(DECODE_TOKENS_MAX, DECODE_TOKENS_ALL // ranks))


def iteration(seed: int, number: int, ranks: int, mode: str) -> Iteration:
    """What all ranks do in this iteration."""
    chance = draw(seed, number, "ep", mode)
    kinds = {"ht": ["ht"], "ll": ["ll"], "both": ["ht", "ll"]}[mode]
    if chance.random() < 0.35:
        kinds.append(chance.choice(kinds))
    flights = tuple(_high_throughput(chance, ranks) if kind == "ht" else _decode(chance, ranks, mode) for kind in kinds)
    return Iteration(flights, tuple(_interleaved(chance, flights)))


def _high_throughput(chance: random.Random, ranks: int) -> Exchange | Recall:
    buffer = SMALL if chance.random() < 0.2 else MAIN
    if chance.random() < 0.15:
        return Recall(buffer, chance.getrandbits(40))
    routing = chance.choice(("uniform", "uniform", "skewed", "duplicates", "holes", "none"))
    topk = chance.randint(1, TOPK_MAX)
    experts = chance.randint(1, LOCAL_EXPERTS_MAX * ranks)
    if routing in ("uniform", "skewed"):
        experts = max(experts, topk)
    shape = Shape(
        tokens=_tokens(chance, ranks, TOKENS_MAX),
        hidden=chance.choice(HIDDENS),
        experts=min(experts, LOCAL_EXPERTS_MAX * ranks),
        topk=topk,
        routing=routing,
        index=chance.choice(("int64", "int32")),
        seed=chance.getrandbits(40),
    )
    worst = chance.choice(("", "", "", "ample", "exact", "short")) if buffer == MAIN else ""
    return Exchange(
        buffer=buffer,
        shape=shape,
        weights=chance.random() < 0.8,
        scales=chance.choice(("", "", "float32", "int32")),
        worst=worst,
        alignment=chance.choice((1, 1, 4, 16, 128)),
        biases=chance.choice((0, 0, 1, 2)),
        again=chance.choice((0, 0, 1, AGAIN_MAX)),
        in_place=chance.random() < 0.5,
        keep=worst != "short" and chance.random() < 0.5,
    )


def _decode(chance: random.Random, ranks: int, mode: str) -> Decode:
    topk = chance.randint(1, min(TOPK_MAX, DECODE_LOCAL_EXPERTS_MAX * ranks))
    tokens_max = chance.randint(1, decode_tokens_max(ranks))
    shape = Shape(
        tokens=_tokens(chance, ranks, tokens_max),
        hidden=chance.choice(HIDDENS),
        experts=chance.randint(topk, DECODE_LOCAL_EXPERTS_MAX * ranks),
        topk=topk,
        routing=chance.choice(("uniform", "uniform", "skewed", SPARSE, "none")),
        index=chance.choice(("int64", "int32")),
        seed=chance.getrandbits(40),
    )
    return Decode(
        buffer=BESIDE if chance.random() < (0.5 if mode == "both" else 0.2) else MAIN,
        shape=shape,
        tokens_max=tokens_max,
        fp8=chance.choice(("", "", "exact", "round", "ue8m0")),
        hook=chance.random() < 0.7,
        zero_copy=chance.random() < 0.4,
        out=chance.random() < 0.5,
    )


def _tokens(chance: random.Random, ranks: int, most: int) -> tuple[int, ...]:
    """A number for each rank: the same for all, a random one for each with some that have none, one rank alone, or none at all."""
    kind = chance.random()
    if kind < 0.05:
        return (0,) * ranks
    top = min(most, round(most ** chance.uniform(0.3, 1.0)))
    if kind < 0.15:
        alone = chance.randrange(ranks)
        return tuple(top if rank == alone else 0 for rank in range(ranks))
    if kind < 0.3:
        return (top,) * ranks
    return tuple(0 if chance.random() < 0.2 else chance.randint(0, top) for _ in range(ranks))


def _interleaved(chance: random.Random, flights: Sequence[Flight]) -> list[int]:
    """A random order, in which a Buffer's low-latency sends come only when the hook of the one before the last has been called."""
    left = [list(flight.phases) for flight in flights]
    sends: dict[str, list[int]] = {}  # of each Buffer, in order: the flight whose hook is to be called, −1 when it has been
    order = []
    while any(left):
        may = [at for at, phases in enumerate(left) if phases and (phases[0] not in ("send", "return") or _free(sends, flights[at]))]
        at = chance.choice(may)
        phase, flight = left[at].pop(0), flights[at]
        order.append(at)
        if isinstance(flight, Decode):
            made = sends.setdefault(flight.buffer, [])
            if phase in ("send", "return"):
                made.append(at if flight.hook else -1)
            else:
                made[made.index(at)] = -1
    return order


def _free(sends: dict[str, list[int]], flight: Flight) -> bool:
    made = sends.get(flight.buffer, [])
    return len(made) < LIVE_MAX or made[-LIVE_MAX] == -1
