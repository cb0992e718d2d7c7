"""Agreements on a virtual clock: a seed names which ranks die, stop, are suspected wrongly or call late, and what the network does."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from expertwire.ep.membership import Agreement, Phase, Record

DEADLINE_S = 5.0  # for each call
DONE = (Phase.settled, Phase.excluded)


@dataclass(frozen=True)
class Faults:
    """How often what happens; `certain`: an end is known to be one, as on one host, else it is silence."""

    deaths: int = 0
    stops: int = 0
    suspicions: int = 0
    certain: bool = True
    loss: float = 0.0
    spread_s: float = 0.02  # of a message's delay


@dataclass
class Actor:
    agreement: Agreement
    call_s: float
    deadline_s: float
    dead_s: float = float("inf")
    stopped: tuple[float, float] = (float("inf"), float("inf"))
    told: int = -1
    wire_s: float = float("inf")
    wiring_round: int = -1
    ended_s: float | None = None  # settled, excluded or out of time
    mail: list[Record] = field(default_factory=list)

    def sleeps(self, now: float) -> bool:
        return self.stopped[0] <= now < self.stopped[1]


class World:
    """Runs until every rank that lives has settled, is excluded, or is out of time."""

    def __init__(self, seed: int, size: int, faults: Faults, make: Callable[[int, int], Agreement] = Agreement) -> None:
        self.random = random.Random(f"{seed} {size}")
        self.faults = faults
        self.size = size
        self.silence_s = 1.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.now = 0.0
        self.changed = False
        self.actors = [Actor(make(rank, size), call := self.random.uniform(0, 0.3), call + DEADLINE_S) for rank in range(size)]
        self.wrongly: dict[tuple[int, int], tuple[float, float]] = {}  # (who, whom): when it takes it for silent though it is not
        ranks = list(range(size))
        for rank in self.random.sample(ranks, faults.deaths):
            self.actors[rank].dead_s = self.random.choice([0.0, self.random.uniform(0, 0.6), self.random.uniform(0.2, 0.4)])
        for rank in self.random.sample(ranks, faults.stops):
            begin = self.random.choice([0.0, self.random.uniform(0, 0.8)])
            self.actors[rank].stopped = (begin, begin + self.random.choice([self.random.uniform(0.1, 1), self.random.uniform(1.5, 4)]))
        for _ in range(faults.suspicions):
            begin = self.random.uniform(0, 1)
            whom = min(self.random.choice(ranks), self.random.choice(ranks))  # who leads, more often
            self.wrongly[self.random.choice(ranks), whom] = (begin, begin + self.random.uniform(0.05, 2))
        for rank, actor in enumerate(self.actors):
            self.at(actor.call_s, lambda rank=rank: self.turn(rank, 0))  # type: ignore[misc]

    def run(self) -> None:
        while self.queue:
            self.now, _, what = heapq.heappop(self.queue)
            what()
            if self.changed:
                self.changed = False
                self.check()

    def at(self, when: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (when, self.count, what))

    # ---- a rank

    def alive(self, rank: int) -> bool:
        return self.now < self.actors[rank].dead_s

    def turn(self, rank: int, number: int) -> None:
        """Every 100 ms, and when something came."""
        actor = self.actors[rank]
        if not self.alive(rank) or actor.ended_s is not None:
            return
        if actor.sleeps(self.now):
            self.at(actor.stopped[1], lambda: self.turn(rank, number))
            return
        if number >= 0:
            self.at(self.now + 0.1, lambda: self.turn(rank, number + 1))
        if self.now < actor.call_s:
            return
        agreement = actor.agreement
        if number == 0:
            agreement.begin()
        for record in actor.mail:
            agreement.hear(record)
        actor.mail.clear()
        agreement.see(*self.seen_by(rank))
        agreement.step(self.now)
        self.wire(rank)
        if agreement.record.version != actor.told or (number >= 0 and number % 3 == 0):
            self.changed = self.changed or agreement.record.version != actor.told
            actor.told = agreement.record.version
            for other in range(self.size):
                if other != rank:
                    self.send(agreement.record, other)
        if agreement.phase in DONE or self.now >= actor.deadline_s:
            actor.ended_s = self.now

    def seen_by(self, rank: int) -> tuple[list[int], list[int]]:
        ended, given_up = [], []
        for other, actor in enumerate(self.actors):
            since = min(actor.dead_s, actor.stopped[0] if actor.sleeps(self.now) else float("inf"))
            if other == rank:
                continue
            if self.faults.certain and self.now > actor.dead_s + 0.01 * ((rank + other) % 3):
                ended.append(other)
            begin, end = self.wrongly.get((rank, other), (1.0, 0.0))
            if self.now - since >= self.silence_s or begin <= self.now < end:
                given_up.append(other)
        return ended, given_up

    def wire(self, rank: int) -> None:
        """Takes some time, and ends only where every member came to the same decision."""
        actor = self.actors[rank]
        if actor.agreement.phase is not Phase.wiring:
            actor.wire_s = float("inf")
            return
        if actor.wiring_round != actor.agreement.round or actor.wire_s == float("inf"):
            actor.wiring_round = actor.agreement.round
            actor.wire_s = self.now + self.random.uniform(0.01, 0.1)
        if self.now < actor.wire_s:
            return
        mine = actor.agreement.record.decisions
        heard = {record.rank for record in actor.agreement.heard if record.decisions == mine}
        if actor.agreement.members <= heard | {rank}:
            actor.agreement.wiring_done()
            actor.agreement.step(self.now)

    def send(self, record: Record, to: int) -> None:
        if self.random.random() < self.faults.loss:
            return
        for _ in range(2 if self.random.random() < 0.05 else 1):
            self.at(self.now + self.random.uniform(0.0001, self.faults.spread_s), lambda: self.deliver(record, to))

    def deliver(self, record: Record, to: int) -> None:
        self.actors[to].mail.append(record)
        self.turn(to, -1)

    # ---- what must always hold

    def check(self) -> None:
        living = [actor.agreement for rank, actor in enumerate(self.actors) if self.alive(rank)]
        check_history(living, self.size)
        came = {rank for rank, actor in enumerate(self.actors) if actor.agreement.round >= 0}
        for agreement in living:
            for members in agreement.record.decisions:
                assert members <= came, f"validity: {members - came} never called"


class Walk:
    """No clock at all: whoever sees, hears, dies, gives up or takes back whom next is drawn, so that every order may come."""

    def __init__(self, seed: int, size: int, make: Callable[[int, int], Agreement] = Agreement, *, deaths: int = 1) -> None:
        self.random = random.Random(f"walk {seed} {size}")
        self.size = size
        self.agreements = [make(rank, size) for rank in range(size)]
        self.said: list[list[Record]] = [[] for _ in range(size)]
        self.given_up: list[set[int]] = [set() for _ in range(size)]
        self.known: list[set[int]] = [set() for _ in range(size)]  # ends
        self.dead: set[int] = set()
        self.side = [0] * size
        self.deaths = deaths
        self.now = 0.0

    def run(self, steps: int) -> None:
        parted = 0
        for step in range(steps):
            if step >= parted:
                self.part()
                parted = step + self.random.choice([5, 20, 60])
            self.now += self.random.choice([0.01, 1.0])
            rank = self.random.randrange(self.size)
            if rank not in self.dead:
                self.act(rank)
                check_history([self.agreements[rank] for rank in range(self.size) if rank not in self.dead], self.size)

    def part(self) -> None:
        """For a while ranks hear those of their own side only, or everybody, and perhaps take the others for silent."""
        self.side = [self.random.randrange(self.random.choice([1, 2, 3])) for _ in range(self.size)]
        for rank in range(self.size):
            others = {other for other in range(self.size) if self.side[other] != self.side[rank]}
            self.given_up[rank] = others if self.random.random() < 0.8 else set()

    def act(self, rank: int) -> None:
        agreement = self.agreements[rank]
        other = self.random.choice([other for other in range(self.size) if other != rank])
        draw = self.random.random()
        if draw < 0.75:
            if self.said[other] and self.side[other] == self.side[rank]:
                agreement.hear(self.random.choice(self.said[other][-2:]))
        elif draw < 0.8 and other in self.dead:
            self.known[rank].add(other)
        elif draw < 0.81 and len(self.dead) < self.deaths:
            self.dead.add(rank)
            return
        elif draw < 0.9:
            agreement.begin()
        elif agreement.phase is Phase.wiring:
            agreement.wiring_done()
        agreement.see(self.known[rank], self.given_up[rank])
        agreement.step(self.now)
        if not self.said[rank] or self.said[rank][-1] != agreement.record:
            self.said[rank].append(agreement.record)


def check_history(living: list[Agreement], size: int) -> None:
    """Of those that live: one decision a round, each a part of the one before, of ranks that called; and groups that work share a rank."""
    longest = max((agreement.record.decisions for agreement in living), key=len, default=())
    before = frozenset(range(size))
    for agreement in living:
        made = agreement.record.decisions
        assert made == longest[: len(made)], f"agreement: rank {agreement.rank} has {made}, another {longest}"
    for members in longest:
        assert members, "validity: nobody"
        assert members <= before, "validity: somebody new"
        before = members
    working = []
    for agreement in living:
        if agreement.phase is Phase.settled:
            of = [other for other in living if other.rank in agreement.members]
            if all(other.phase is Phase.settled and other.members == agreement.members for other in of):
                working.append(agreement.members)
    for one in working:
        assert all(one & other for other in working), f"split: {[sorted(members) for members in working]}"
