"""The agreement of `Buffer.shrink` in every order of messages, deaths and pauses, on a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ep.membership_world import Faults, Walk, World, check_history
from expertwire.ep.membership import STEPS, Agreement, Members, Phase, Record, is_quorum

SEEDS = 8
FAMILIES = {
    "nobody": Faults(),
    "one death": Faults(deaths=1),
    "two deaths, far away": Faults(deaths=2, certain=False),
    "deaths": Faults(deaths=2, loss=0.2, spread_s=0.3),
    "stops": Faults(stops=2, loss=0.1, spread_s=0.1),
    "suspicions": Faults(suspicions=6, spread_s=0.2),
    "everything": Faults(deaths=1, stops=2, suspicions=4, loss=0.3, spread_s=0.4),
    "everything, far away": Faults(deaths=1, stops=1, suspicions=4, certain=False, loss=0.3, spread_s=0.4),
}


def sizes(faults: Faults) -> tuple[int, ...]:
    return tuple(size for size in (1, 2, 3, 4, 6) if size > faults.deaths and size >= faults.stops)


def worlds(faults: Faults, seeds: int, make: Callable[[int, int], Agreement] = Agreement) -> list[World]:
    made = [World(seed, size, faults, make) for size in sizes(faults) for seed in range(seeds)]
    for world in made:
        world.run()
    return made


@pytest.mark.parametrize("name", list(FAMILIES))
def test_agreement_validity_and_an_end_by_the_deadline(name: str) -> None:
    settled = 0
    for world in worlds(FAMILIES[name], SEEDS):
        for rank, actor in enumerate(world.actors):
            if actor.dead_s == float("inf"):
                assert actor.ended_s is not None, f"rank {rank} never ended"
                woken = actor.stopped[1] if actor.stopped[0] <= actor.deadline_s < actor.stopped[1] else 0.0
                assert actor.ended_s <= max(actor.deadline_s + 0.11, woken + 0.11)
                settled += actor.agreement.phase is Phase.settled
    assert settled > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_known_deaths_are_survived_by_everyone_who_lives(size: int) -> None:
    """Down to one rank, whoever dies and whenever."""
    for deaths, seed in itertools.product(range(size), range(10)):
        world = World(seed, size, Faults(deaths=deaths, spread_s=0.1))
        world.run()
        living = frozenset(rank for rank, actor in enumerate(world.actors) if actor.dead_s == float("inf"))
        for rank in living:
            agreement = world.actors[rank].agreement
            assert agreement.phase is Phase.settled, f"seed {seed}, {deaths} deaths: rank {rank} is {agreement.phase}"
            assert agreement.members >= living
            # Who died after it was wired may be a member: the next operation names it.
            assert all(world.actors[rank].dead_s > 0 for rank in agreement.members)


def test_nobody_dead_keeps_everybody() -> None:
    for world in worlds(Faults(spread_s=0.2), 10):
        for actor in world.actors:
            assert actor.agreement.phase is Phase.settled
            assert actor.agreement.members == frozenset(range(world.size))


def test_who_is_stopped_and_wakes_is_excluded_and_told_so() -> None:
    told = 0
    for seed in range(40):
        world = World(seed, 4, Faults(stops=1))
        world.run()
        for rank, actor in enumerate(world.actors):
            others = [other.agreement for place, other in enumerate(world.actors) if place != rank]
            if all(other.phase is Phase.settled and rank not in other.members for other in others):
                assert actor.agreement.phase is not Phase.settled
                told += actor.agreement.phase is Phase.excluded
    assert told > 3


def test_silent_ranks_are_left_behind_only_by_the_larger_part() -> None:
    def knows(*ended: int) -> Callable[[int], Members]:
        return lambda _: frozenset(ended)

    four = frozenset(range(4))
    assert is_quorum(frozenset({1, 2, 3}), four, knows())
    assert is_quorum(frozenset({0, 3}), four, knows()), "half of them, with the lowest"
    assert not is_quorum(frozenset({1, 2}), four, knows())
    assert not is_quorum(frozenset({0}), four, knows(1, 2))
    assert is_quorum(frozenset({3}), four, knows(0, 1, 2))
    assert not is_quorum(frozenset(), four, knows(0, 1, 2, 3))
    for size in range(1, 6):
        every = [frozenset(some) for count in range(1, size + 1) for some in itertools.combinations(range(size), count)]
        decide = [some for some in every if is_quorum(some, frozenset(range(size)), knows())]
        assert all(one & other for one in decide for other in decide)


def test_a_rank_alone_neither_decides_nor_hopes_beyond_those_that_left() -> None:
    alone = Agreement(1, 4)
    alone.begin()
    alone.see([], [0, 2])
    alone.step(0.0)
    assert alone.phase is Phase.gathering
    assert alone.missing == {0, 2, 3}
    assert not alone.hopeless(frozenset({0}))
    assert alone.hopeless(frozenset({0, 2}))
    alone.see([0, 2, 3], [])
    alone.step(0.0)
    assert alone.phase is Phase.wiring
    assert alone.members == {1}


def test_a_word_of_the_dead_that_comes_late_is_not_heard() -> None:
    living = Agreement(2, 3)
    living.begin()
    living.see([0, 1], [])
    living.hear(Record(0, version=9, round=0, decisions=(frozenset({0, 1}),), phase=Phase.wiring))
    living.step(0.0)
    assert living.record.decisions == (frozenset({2}),)


def test_every_phase_can_end_and_the_last_ones_stay() -> None:
    assert set(STEPS) == set(Phase)
    assert [phase for phase, after in STEPS.items() if not after] == [Phase.settled, Phase.excluded]
    with pytest.raises(AssertionError, match="idle"):
        Agreement(0, 2).wiring_done()


# ---- kept mutants: what the worlds above must catch


class AnyPart(Agreement):
    """Whoever is here may decide."""

    def _is_quorum(self, some: object) -> bool:
        return True


class Forgets(Agreement):
    """Proposes what it likes, whatever may have been decided."""

    def _choose(self, promised: list[Record]) -> Members:
        return super()._choose([])


class Promiscuous(Agreement):
    """Accepts ballots below the one it promised."""

    def _answer(self) -> None:
        super()._answer()
        for record in self.heard:
            vote, last = record.propose, self._mine.accepted
            if record.round == self.round and vote is not None and (last is None or vote.ballot > last.ballot):
                self._say(accepted=vote)


class Script:
    """Three ranks that hear each other only as told."""

    def __init__(self, make: Callable[[int, int], Agreement]) -> None:
        self.ranks = [make(rank, 3) for rank in range(3)]
        self.now = 0.0
        for agreement in self.ranks:
            agreement.begin()

    def hears(self, *pairs: tuple[int, int]) -> None:
        """(who, whom), one after the other."""
        for who, whom in pairs:
            self.now += 1.0
            self.ranks[who].hear(self.ranks[whom].record)
            self.ranks[who].step(self.now)
        check_history(self.ranks, 3)

    def gives_up(self, who: int, *whom: int) -> None:
        self.ranks[who].see([], whom)


def taken_over(make: Callable[[int, int], Agreement]) -> Script:
    """Rank 0 decides with rank 1 and nobody hears of it; then rank 1 leads, and rank 2 follows."""
    script = Script(make)
    script.hears((0, 1), (0, 2), (1, 0), (0, 1), (1, 0), (0, 1))
    assert script.ranks[0].phase is Phase.wiring
    script.gives_up(1, 0)
    script.hears((1, 2), (2, 1), (1, 2), (2, 1), (1, 2))
    assert script.ranks[1].phase is Phase.wiring
    return script


def outbid(make: Callable[[int, int], Agreement]) -> Script:
    """Rank 0 proposes; before that is heard rank 1 leads and has rank 2's promise; then the late proposal comes, and both go on."""
    script = Script(make)
    script.hears((0, 1), (0, 2), (1, 0), (0, 1))
    assert script.ranks[0].phase is Phase.proposing
    late = script.ranks[0].record
    script.gives_up(1, 0)
    script.hears((1, 2), (2, 1), (1, 2))
    assert script.ranks[1].phase is Phase.proposing
    script.ranks[2].hear(late)
    script.ranks[2].step(script.now)
    script.hears((0, 2), (2, 1), (1, 2))
    return script


def late_listener(make: Callable[[int, int], Agreement]) -> Script:
    """Rank 0 has decided, and rank 1, which leads now, hears of it before it goes on."""
    script = Script(make)
    script.gives_up(0, 1)
    script.hears((1, 2), (0, 2), (2, 0), (0, 2), (2, 0), (0, 2))
    assert script.ranks[0].members == {0, 2}
    script.hears((1, 0))
    script.gives_up(1, 0)
    script.hears((1, 2), (2, 1), (1, 2), (2, 1), (1, 2))
    assert script.ranks[1].phase is Phase.excluded
    return script


def each_alone(make: Callable[[int, int], Agreement]) -> Script:
    """Nobody hears anybody, and everybody gives up the others."""
    script = Script(make)
    for rank in range(3):
        script.gives_up(rank, *{0, 1, 2} - {rank})
        script.ranks[rank].step(1.0)
    script.hears()
    return script


@pytest.mark.parametrize(("script", "mutant"), [(taken_over, Forgets), (outbid, Promiscuous), (each_alone, AnyPart)])
def test_mutants_are_caught(script: Callable[[object], Script], mutant: object) -> None:
    script(Agreement)
    with pytest.raises(AssertionError):
        script(mutant)


def test_whatever_may_have_been_decided_is_decided() -> None:
    late_listener(Agreement)
    script = taken_over(Agreement)
    assert script.ranks[1].record.decisions == script.ranks[0].record.decisions == (frozenset({0, 1, 2}),)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_messages_and_deaths(size: int) -> None:
    for seed in range(60):
        walk = Walk(seed, size, deaths=seed % size)
        walk.run(240)
