"""Whom a rank names, from given words at given times: no process, no clock, and every order that load can bring about."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import pytest

from expertwire._native import LivenessProbe

TICK_MS, BEAT_MS = 250, 1000
NAMED_MS_MAX = 9500  # SPEC T19 says 10 s, and the word must still travel


class Watch:
    """Rank 0 of `size` watches; all beat once a second, at another time each, until they are silenced."""

    def __init__(self, size: int, later: Collection[int] = ()) -> None:
        """`later`: ranks that are not added yet."""
        self.probe = LivenessProbe(0, size)
        for rank in set(range(1, size)) - set(later):
            self.probe.add(rank, 0)
        self.size = size
        self.silent: set[int] = set()
        self.now_ms = 0
        self.until(3000)

    def until(self, then_ms: int, event: Callable[[], None] | None = None) -> None:
        """Time passes; `event` happens at its end."""
        while self.now_ms < then_ms:
            self.now_ms += 50
            for rank in range(1, self.size):
                if rank not in self.silent and (self.now_ms - 100 * rank) % BEAT_MS == 0:
                    self.probe.beat(rank)
            if self.now_ms % TICK_MS == 0:
                self.probe.tick(self.now_ms)
        if event is not None:
            event()

    def ends(self, rank: int, *, breaks: bool = True) -> None:
        self.silent.add(rank)
        if breaks:
            self.probe.lose_connection(rank, self.now_ms)

    def named(self, since_ms: int) -> tuple[int, int, int]:
        """(rank, told by, after how many ms) of the first fault; fails when there is none in time."""
        while self.now_ms < since_ms + NAMED_MS_MAX:
            self.until(self.now_ms + 50)
            if (fault := self.probe.fault()) is not None:
                return fault[0], fault[1], self.now_ms - since_ms
        raise AssertionError(f"nobody was named; states: {[self.probe.state(rank) for rank in range(self.size)]}")


def test_a_broken_connection_names_its_peer_once_all_others_were_heard() -> None:
    watch = Watch(4)
    watch.ends(3)
    rank, told_by, after_ms = watch.named(3000)
    assert (rank, told_by) == (3, -1)
    assert after_ms <= BEAT_MS + 2 * TICK_MS


@pytest.mark.parametrize("leaving", [True, False])
def test_who_leaves_because_of_another_is_never_named(leaving: bool) -> None:
    """The victim is only silent; the survivor's connection breaks with or without a last word."""
    watch = Watch(4)
    watch.ends(3, breaks=False)
    watch.until(4200)
    if leaving:
        watch.probe.say(1, leaving=True)
    watch.ends(1)
    assert watch.probe.undecided(1, watch.now_ms)
    assert watch.named(3000)[0] == 3


def test_all_others_leave_without_a_word_and_the_first_to_fall_silent_is_named() -> None:
    watch = Watch(5)
    watch.ends(4, breaks=False)
    for rank, at_ms in ((1, 4400), (2, 4900), (3, 5600)):
        watch.until(at_ms)
        watch.ends(rank)
    assert watch.named(3000)[0] == 4


def test_the_messenger_breaks_first_and_the_dead_after_it() -> None:
    watch = Watch(4)
    watch.silent.add(2)
    watch.until(4500)
    watch.ends(1)
    watch.until(4800)
    watch.ends(2)
    rank, _, after_ms = watch.named(3000)
    assert rank == 2
    assert after_ms <= 5000, "a broken connection needs no five seconds of silence"


def test_a_verdict_ends_the_wait_at_once() -> None:
    watch = Watch(4)
    watch.ends(3, breaks=False)
    watch.until(4000)
    watch.ends(1)
    watch.probe.say(2, verdict=3)
    rank, told_by, after_ms = watch.named(4000)
    assert (rank, told_by) == (3, 2)
    assert after_ms <= TICK_MS


def test_a_verdict_is_followed_to_its_root() -> None:
    """3 was taken for dead by 1, but 3 itself had said that 4 is; and what a rank that left has said counts."""
    watch = Watch(5)
    watch.probe.say(3, verdict=4, leaving=True)
    watch.probe.say(1, verdict=3)
    watch.ends(3)
    assert watch.named(3000)[0] == 4


def test_the_word_of_one_that_has_left_still_counts() -> None:
    watch = Watch(4)
    watch.probe.say(1, leaving=True)
    watch.until(3500)
    assert watch.probe.state(1) == "left"
    watch.probe.say(1, verdict=2)
    assert watch.named(3500)[:2] == (2, 1)


def test_ranks_that_accuse_each_other_end_the_search() -> None:
    watch = Watch(4)
    watch.probe.say(1, verdict=2)
    watch.probe.say(2, verdict=1)
    assert watch.named(3000)[0] in (1, 2)


def test_leaving_alone_is_no_fault_and_ends_the_doubt() -> None:
    watch = Watch(4)
    watch.probe.say(1, leaving=True)
    watch.ends(1)
    since_ms = watch.now_ms
    watch.until(since_ms + BEAT_MS + TICK_MS)
    assert watch.probe.fault() is None
    assert watch.probe.state(1) == "left"
    assert not watch.probe.undecided(1, since_ms)
    watch.until(since_ms + 15_000)
    assert watch.probe.fault() is None


@pytest.mark.parametrize("breaks", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_of_two_killed_at_once_one_is_named(breaks: tuple[bool, bool]) -> None:
    watch = Watch(4)
    watch.ends(2, breaks=breaks[0])
    watch.ends(3, breaks=breaks[1])
    assert watch.named(3000)[0] in (2, 3)


def scramble(seed: int, dead: Collection[int]) -> tuple[int, str]:
    """One death, then every survivor but the watcher leaves in a random order, telling or not, breaking or not."""
    random_ = random.Random(seed)
    watch = Watch(6)
    start_ms = 3000 + 50 * random_.randrange(20)
    watch.until(start_ms)
    for rank in dead:
        watch.ends(rank, breaks=random_.random() < 0.5)
    story = [f"{dead} died at {start_ms}"]
    leaving = [rank for rank in range(1, 6) if rank not in dead]
    random_.shuffle(leaving)
    at_ms = start_ms + 1000  # nobody holds another dead before its beat is overdue
    for rank in leaving[: random_.randrange(6)]:
        at_ms += 50 * random_.randrange(20)
        watch.until(at_ms)
        told, farewell, breaks = (random_.random() < 0.5 for _ in range(3))
        story.append(f"{rank} left at {at_ms}: told {told}, farewell {farewell}, breaks {breaks}")
        watch.probe.say(rank, verdict=next(iter(dead)) if told else None, leaving=farewell)
        watch.ends(rank, breaks=breaks)
    return watch.named(start_ms)[0], "; ".join(story)


def test_a_thousand_ways_to_leave_name_the_dead_rank() -> None:
    for seed in range(1000):
        dead = 1 + seed % 5
        named, story = scramble(seed, [dead])
        assert named == dead, f"seed {seed}: {named} was named; {story}"


def test_what_a_removed_rank_says_of_who_removed_it_counts_for_nothing() -> None:
    """It was stopped; rank 1 removed it and said so; it wakes up, finds rank 1's endpoint gone, and holds rank 1 dead."""
    watch = Watch(4)
    watch.probe.fences(1, 3)
    watch.probe.say(3, 1, False)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.fault() is None
    watch.probe.say(2, 3, False)  # who holds rank 3 dead names rank 3, and not whom rank 3 names
    assert watch.named(watch.now_ms)[:2] == (3, 2)


def test_one_that_is_held_dead_has_no_say_any_more() -> None:
    watch = Watch(4)
    watch.ends(3)
    watch.named(3000)
    watch.probe.say(3, 1, False)
    watch.until(watch.now_ms + 3000)
    assert [watch.probe.state(rank) for rank in (1, 2, 3)] == ["watched", "watched", "dead"]
    watch.probe.remove(3)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.fault() is None


def test_who_was_removed_here_cannot_hold_this_rank_dead() -> None:
    """Rank 1 has not removed it, and blames it for the trouble that it sees: that is no trouble of ours."""
    watch = Watch(4)
    watch.probe.remove(3)
    watch.probe.say(3, 0, False)
    watch.probe.say(1, 3, False)
    watch.until(watch.now_ms + 3000)
    fault = watch.probe.fault()
    assert fault is None or fault[0] != 0


def test_who_comes_back_under_its_name_is_not_held_dead_for_the_one_before() -> None:
    """Rank 1 has not yet taken back what it said of the process before; when it says it anew, it counts."""
    watch = Watch(4)
    watch.ends(3)
    watch.probe.say(1, 3, False)
    watch.named(3000)
    assert watch.probe.own_verdict() == 3
    watch.probe.remove(3)
    watch.until(watch.now_ms + 3000)
    assert (watch.probe.own_verdict(), watch.probe.state(3)) == (None, "removed")
    watch.probe.add(3, watch.now_ms)
    watch.silent.clear()
    watch.until(watch.now_ms + 3000)
    assert (watch.probe.fault(), watch.probe.state(3)) == (None, "watched")
    watch.probe.take_back(1)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.fault() is None
    watch.probe.say(1, 3, False)
    assert watch.named(watch.now_ms)[:2] == (3, 1)


def test_the_end_of_one_that_left_is_not_that_of_who_comes_back_under_its_name() -> None:
    """Removed and added again before a turn has told the engine: a soak's rank was held dead for its predecessor."""
    watch = Watch(3)
    watch.probe.say(2, None, True)
    watch.ends(2)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.state(2) == "left"
    watch.probe.remove(2)
    watch.probe.add(2, watch.now_ms)
    assert watch.probe.take_deaths() == []


def back_again(rank: int, size: int = 4) -> Watch:
    """The rank fell silent, was removed here, and another process has come back under its name."""
    watch = Watch(size)
    watch.ends(rank)
    watch.named(3000)
    watch.probe.remove(rank)
    watch.probe.add(rank, watch.now_ms)
    watch.silent.clear()
    watch.until(watch.now_ms + 2000)
    assert watch.probe.state(rank) == "watched"
    return watch


def test_a_farewell_of_the_one_before_does_not_end_who_has_its_name_now() -> None:
    """The one before was stopped in the middle of a store to mapped memory, and wakes."""
    watch = back_again(3)
    watch.probe.say(3, leaving=True, old_speaker=True)
    watch.until(watch.now_ms + 3000)
    assert (watch.probe.state(3), watch.probe.farewell(3), watch.probe.fault()) == ("watched", False, None)
    watch.ends(3)  # its connection breaks: that word excuses nothing
    assert watch.named(watch.now_ms)[:2] == (3, -1)


def test_the_farewell_of_who_has_the_name_now_counts() -> None:
    watch = back_again(3)
    watch.probe.say(3, leaving=True)
    watch.until(watch.now_ms + 500)
    assert (watch.probe.state(3), watch.probe.farewell(3)) == ("left", True)


def test_a_verdict_of_the_one_before_names_nobody() -> None:
    watch = back_again(3)
    watch.probe.say(3, 1, old_speaker=True)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.fault() is None
    watch.probe.say(2, 3)  # nor does it say whom to hold for the root of the trouble with rank 3
    assert watch.named(watch.now_ms)[:2] == (3, 2)


def test_a_verdict_about_the_one_before_that_comes_late_names_nobody() -> None:
    watch = back_again(3)
    watch.probe.say(1, 3, old_accused=True)
    watch.until(watch.now_ms + 3000)
    assert (watch.probe.state(3), watch.probe.fault()) == ("watched", None)
    watch.probe.say(1, 3)
    assert watch.named(watch.now_ms)[:2] == (3, 1)


def test_a_verdict_about_this_rank_under_an_earlier_process_is_none_about_this_one() -> None:
    watch = Watch(3)
    watch.probe.say(1, 0, old_accused=True)
    watch.until(watch.now_ms + 3000)
    assert watch.probe.fault() is None
    watch.probe.say(1, 0)
    assert watch.named(watch.now_ms)[:2] == (0, 1)


def test_a_verdict_from_before_its_rank_was_added_here_waits_for_whom_it_is_about() -> None:
    """Who joins hears of the dead before it knows who has their names now."""
    watch = Watch(4, later=(3,))
    watch.probe.say(1, 3, old_accused=True)
    watch.until(watch.now_ms + 1000)
    assert (watch.probe.state(3), watch.probe.fault()) == ("absent", None)
    watch.probe.add(3, watch.now_ms)
    watch.until(watch.now_ms + 3000)
    assert (watch.probe.state(3), watch.probe.fault()) == ("watched", None)
    watch = Watch(4, later=(3,))
    watch.probe.say(1, 3)
    watch.until(watch.now_ms + 1000)
    assert watch.probe.fault() is None
    watch.probe.add(3, watch.now_ms)
    assert watch.named(watch.now_ms)[:2] == (3, 1)
