"""Who is left: the agreement behind `Buffer.shrink`. Pure: no clock, no network; `ep/shrink.py` carries records and looks at the peers.

Every rank has one `Record`, which only grows, and floods it; a newer one replaces an older one, so that loss, repetition and order of
messages change nothing. One *round* decides one membership, a subset of the one before, by Paxos: the lowest rank that is here asks for
promises for a ballot, then proposes; whoever promised a higher ballot accepts no lower one; what may have been decided is proposed again.

A quorum is more than half of the members, or half of them with the lowest, or *everyone who is not known to have ended*. The first two
meet each other in a rank. The third one leaves out only processes that the kernel has said are gone, so that nobody who lives is outside of
it; each of its ranks must know of those ends before it counts, and from then on hears nothing of theirs any more: a word of a dead rank
that is still under way cannot bring back another decision. So of silent ranks that may wake up the smaller part never goes on by itself.

A decision is worth nothing before its members have made their regions: `wiring`, `wired` where this rank has, `settled` where it knows
that all have. A member lost before that leads into the next round, with the members of this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

RETRY_S = 0.05  # before a ballot that lost against a higher one is tried again, times the rank's place
LOST_S = 0.3  # a rank that is wired leaves the round for a lost member only then: others may know that all were wired, and tell

Members = frozenset[int]
NOBODY: Members = frozenset()


class Phase(Enum):
    """Where a rank stands in a round."""

    idle = "idle"
    gathering = "gathering"  # until every member is here, has ended, or is given up
    preparing = "preparing"  # asks for promises
    proposing = "proposing"  # asks for acceptance
    wiring = "wiring"  # decided
    wired = "wired"
    settled = "settled"
    excluded = "excluded"  # decided, without this rank


_ROUND_ENDS = frozenset({Phase.wiring, Phase.excluded})
STEPS: dict[Phase, frozenset[Phase]] = {
    Phase.idle: frozenset({Phase.gathering}) | _ROUND_ENDS,
    Phase.gathering: frozenset({Phase.preparing}) | _ROUND_ENDS,
    Phase.preparing: frozenset({Phase.proposing, Phase.gathering}) | _ROUND_ENDS,
    Phase.proposing: frozenset({Phase.gathering}) | _ROUND_ENDS,
    Phase.wiring: frozenset({Phase.wired, Phase.gathering, Phase.excluded}),
    Phase.wired: frozenset({Phase.settled, Phase.gathering, Phase.excluded}),
    Phase.settled: frozenset(),
    Phase.excluded: frozenset(),
}


@dataclass(frozen=True)
class Vote:
    """A membership under a ballot."""

    ballot: int
    members: Members


@dataclass(frozen=True)
class Record:
    """What a rank says of itself; of two the one with the higher version counts."""

    rank: int
    version: int = 0
    round: int = -1  # entered; −1: none
    decisions: tuple[Members, ...] = ()  # by round
    phase: Phase = Phase.idle
    ended: Members = NOBODY  # processes known to be gone, whoever saw it
    promised: int = 0
    accepted: Vote | None = None
    prepare: int = 0  # the ballot that it asks promises for; 0: none
    propose: Vote | None = None


def is_quorum(some: Members, members: Members, ended_of: Callable[[int], Members]) -> bool:
    """Whether `some` of the members may decide. `ended_of(rank)`: the ends that this one knows of."""
    if not some:
        return False
    twice, all_of_them = 2 * len(some), len(members)
    if twice > all_of_them or (twice == all_of_them and min(members) in some):
        return True
    absent = members - some
    return all(absent <= ended_of(rank) for rank in some)


class Agreement:
    """One rank's part. Call `begin` for each call of shrink; then `hear`, `see` and `step`, and flood `record` whenever it has changed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._all: Members = frozenset(range(size))
        self._size = size
        self._mine = Record(rank)
        self._others: dict[int, Record] = {}
        self._given_up: Members = NOBODY
        self._not_before = 0.0  # the next ballot
        self._lost_since: float | None = None

    # ---- what is

    @property
    def record(self) -> Record:
        """What the others should know."""
        return self._mine

    @property
    def phase(self) -> Phase:
        """Where this rank stands."""
        return self._mine.phase

    @property
    def round(self) -> int:
        """The round that this rank has entered; −1: none."""
        return self._mine.round

    @property
    def heard(self) -> list[Record]:
        """The latest record of each other rank that is not known to have ended."""
        return list(self._others.values())

    @property
    def members(self) -> Members:
        """Of the last decision; before the first one everybody."""
        return self._mine.decisions[-1] if self._mine.decisions else self._all

    @property
    def ended(self) -> Members:
        """Processes known to be gone."""
        return self._mine.ended

    @property
    def given_up(self) -> Members:
        """Members that are not waited for, though they may live."""
        return self._given_up

    @property
    def here(self) -> Members:
        """Members that have entered this round, this rank included."""
        return frozenset(r for r in self.members if r == self.rank or self._in_round(r))

    @property
    def missing(self) -> Members:
        """Members that are neither here nor gone for good."""
        return self.members - self.here - self.ended

    def hopeless(self, left: Members) -> bool:
        """No decision can come about any more, if those that `left` never come."""
        return not is_quorum(self.members - self.ended - left, self.members, lambda _: self.ended)

    def excluding(self, record: Record) -> Members | None:
        """The membership that another rank knows of and that leaves this rank out."""
        return next((members for members in record.decisions if self.rank not in members), None)

    # ---- what happens

    def begin(self) -> None:
        """A call of shrink. A round that has decided but did not settle is over; one that has not goes on."""
        if self.phase in (Phase.idle, Phase.wiring, Phase.wired):
            self._enter_round()

    def hear(self, record: Record) -> None:
        """A record of another rank."""
        known = self._others.get(record.rank)
        if record.rank in self.ended or (known is not None and known.version >= record.version):
            return
        self._others[record.rank] = record

    def see(self, ended: Iterable[int], given_up: Iterable[int]) -> None:
        """What this rank sees itself: processes that are gone, and ranks not worth waiting for."""
        self._given_up = frozenset(given_up)
        self._know(frozenset(ended))

    def wiring_done(self) -> None:
        """The regions of the decision are there, and all members reached."""
        self._move(Phase.wired)

    def step(self, now: float) -> None:
        """Whatever can be done now."""
        if self.phase is Phase.settled:
            return
        for record in self.heard:
            self._know(record.ended)
        self._adopt()
        if self.phase in (Phase.wiring, Phase.wired):
            self._follow(now)
        if self.phase in (Phase.gathering, Phase.preparing, Phase.proposing):
            self._answer()
            self._lead(now)

    # ---- the acceptor

    def _answer(self) -> None:
        for record in self.heard:
            if record.round != self.round:
                continue
            if record.prepare > self._mine.promised:
                self._say(promised=record.prepare)
            vote = record.propose
            if vote is not None and vote.ballot >= self._mine.promised and vote != self._mine.accepted:
                self._say(promised=vote.ballot, accepted=vote)
        if self._mine.promised > self._mine.prepare and self.phase in (Phase.preparing, Phase.proposing):
            self._say(prepare=0, propose=None)
            self._move(Phase.gathering)

    # ---- the proposer

    def _lead(self, now: float) -> None:
        if self.phase is Phase.gathering and self._may_begin(now):
            highest = max([self._mine.promised, *(record.promised for record in self.heard if record.round == self.round)])
            ballot = (highest // self._size + 1) * self._size + self.rank
            self._not_before = now + RETRY_S * (1 + self.rank)
            self._say(prepare=ballot, promised=ballot)
            self._move(Phase.preparing)
        if self.phase is Phase.preparing:
            promised = [record for record in self._round() if record.promised == self._mine.prepare]
            if self._is_quorum(record.rank for record in promised):
                vote = Vote(self._mine.prepare, self._choose(promised))
                self._say(propose=vote, accepted=vote)
                self._move(Phase.proposing)
        if self.phase is Phase.proposing:
            proposed = self._mine.propose
            assert proposed is not None
            if self._is_quorum(record.rank for record in self._round() if record.accepted == proposed):
                self._decide((*self._mine.decisions, proposed.members))

    def _may_begin(self, now: float) -> bool:
        if now < self._not_before or self.missing - self._given_up:
            return False
        candidates = self.here - self.ended - self._given_up
        return min(candidates | {self.rank}) == self.rank and self._is_quorum(candidates | {self.rank})

    def _choose(self, promised: list[Record]) -> Members:
        """What may have been decided under a lower ballot, else those that are here."""
        votes = [record.accepted for record in promised if record.accepted is not None]
        if votes:
            return max(votes, key=lambda vote: vote.ballot).members
        return (self.here - self.ended - self._given_up) | {self.rank}

    # ---- after the decision

    def _decide(self, decisions: tuple[Members, ...]) -> None:
        within = all(self.rank in members for members in decisions)
        self._say(round=len(decisions) - 1, decisions=decisions, promised=0, accepted=None, prepare=0, propose=None)
        self._lost_since = None
        self._move(Phase.wiring if within else Phase.excluded)

    def _adopt(self) -> None:
        longest = max(self.heard, key=lambda record: len(record.decisions), default=self._mine)
        if len(longest.decisions) > len(self._mine.decisions) and self.phase is not Phase.excluded:
            self._decide(longest.decisions)

    def _follow(self, now: float) -> None:
        """Of a decision: settled, or over."""
        others = [record for record in self.heard if record.rank in self.members and len(record.decisions) == len(self._mine.decisions)]
        there = {record.rank for record in others if record.phase in (Phase.wired, Phase.settled)}
        if self.phase is Phase.wired:
            if self.members <= there | {self.rank} or any(record.phase is Phase.settled for record in others):
                self._move(Phase.settled)
                return
        if any(record.round > self.round for record in others):
            self._enter_round()
        elif not self.members & (self.ended | self._given_up):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        if self._lost_since is not None and (self.phase is Phase.wiring or now - self._lost_since >= LOST_S):
            self._enter_round()

    def _enter_round(self) -> None:
        self._lost_since = None
        self._say(round=len(self._mine.decisions), promised=0, accepted=None, prepare=0, propose=None)
        self._move(Phase.gathering)

    # ---- small things

    def _know(self, ended: Members) -> None:
        more = (ended & self._all) - self._mine.ended - {self.rank}
        if more:
            self._say(ended=self._mine.ended | more)
            for rank in more:
                self._others.pop(rank, None)

    def _round(self) -> list[Record]:
        return [self._mine, *(record for record in self.heard if record.round == self.round and record.rank in self.members)]

    def _in_round(self, rank: int) -> bool:
        record = self._others.get(rank)
        return record is not None and record.round >= self.round

    def _is_quorum(self, some: Iterable[int]) -> bool:
        def ended_of(rank: int) -> Members:
            return self.ended if rank == self.rank else self._others[rank].ended

        return is_quorum(frozenset(some), self.members, ended_of)

    def _say(self, **changes: object) -> None:
        self._mine = dataclasses.replace(self._mine, version=self._mine.version + 1, **changes)  # type: ignore[arg-type]

    def _move(self, phase: Phase) -> None:
        assert phase in STEPS[self.phase], f"{self.phase} → {phase}"
        self._say(phase=phase)
