"""Agents that die, stop, close, come back, or never were: an error is only that of who asked for it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from expertwire.errors import CapacityError
from expertwire.fabric.config import Settings
from expertwire.transfer import Agent
from harness import stop
from transfer import bodies
from transfer.world import BOTH, TCP, Group, agents


@pytest.fixture(params=list(BOTH))
def three(request: pytest.FixtureRequest) -> Iterator[tuple[Group, Settings]]:
    """a knows b and c."""
    with agents(["a", "b", "c"], BOTH[request.param]) as group:
        group["a"].call(bodies.register)
        for name in ("b", "c"):
            group["a"].call(bodies.add, group[name].call(bodies.register))
        yield group, BOTH[request.param]


def test_a_killed_agent_is_an_error_of_its_own_transfers_and_comes_back_under_its_name(three: tuple[Group, Settings]) -> None:
    group, _ = three
    a, c = group["a"], group["c"]
    base_b, base_c = group["b"].call(bodies.base_of), c.call(bodies.base_of)
    assert a.call(bodies.one_write, "b", base_b) == "done"
    stop(group["b"].pid)  # so that something is on its way when it dies
    a.call(bodies.post_only, "b", base_b)
    group.kill("b")
    assert a.call(bodies.one_write, "c", base_c) == "done"
    state, said = a.call(bodies.bulk_ends)
    if state == "failed":  # on one host the bytes may have been put there before it died
        assert said.startswith(("PeerError: ", "TransferError: ")), said
        assert "agent 'b'" in said
    assert a.call(bodies.bulk_call, "release") == "nothing"
    assert "PeerError" in a.call(bodies.until_refused, "b", base_b)
    assert a.call(bodies.one_write, "c", base_c) == "done"
    fresh = group.restart("b")
    card = fresh.call(bodies.register)
    # As whom depends on whether its end has been seen yet.
    assert a.call(bodies.add_refused, card).startswith("NotAllowedError: agent 'b' is known as ")
    assert a.call(bodies.remove, "b") == ["c"]
    a.call(bodies.fill, 7)
    a.call(bodies.add, card)
    base_b = fresh.call(bodies.base_of)
    assert a.call(bodies.one_write, "b", base_b) == "done"
    assert not fresh.call(bodies.first_hold, 0, 7)
    a.call(bodies.say, "b", b"welcome back")
    assert fresh.call(bodies.take, 1) == {"a": [b"welcome back"]}
    assert a.call(bodies.one_write, "c", base_c) == "done"


def test_an_agent_that_closed_is_gone_and_a_removed_one_is_not_reached(three: tuple[Group, Settings]) -> None:
    group, _ = three
    a, c = group["a"], group["c"]
    base_b, base_c = group["b"].call(bodies.base_of), c.call(bodies.base_of)
    a.call(bodies.keep_transfer, "c", base_c)
    group["b"].connection.send(None)
    group["b"].process.join(20)
    assert group["b"].process.exitcode == 0
    group["b"].connection.close()
    assert "PeerError" in a.call(bodies.until_refused, "b", base_b)
    assert a.call(bodies.remove, "b") == ["c"]
    assert a.call(bodies.one_write, "b", base_b).startswith("NotFoundError: agent 'b' is not known here")
    card = c.call(bodies.card_of)
    assert a.call(bodies.remove, "c") == []
    assert a.call(bodies.post_stale).startswith("NotFoundError: agent 'c' was removed")
    a.call(bodies.add, card)
    a.call(bodies.keep_transfer, "c", base_c)
    assert a.call(bodies.post_stale) == "done"
    c.call(bodies.deregister)  # nobody is waited for who is not there any more


def test_done_means_delivered_and_who_is_on_its_way_owns_its_memory() -> None:
    """To an agent that is stopped: nothing is done, nothing is let go, nothing is posted twice; then it wakes."""
    with agents(["a", "b", "c"], dataclasses.replace(TCP, timeout_ms=400, hard_timeout_ms=60_000)) as group:
        a = group["a"]
        a.call(bodies.register)
        for name in ("b", "c"):
            a.call(bodies.add, group[name].call(bodies.register))
        bases = {name: group[name].call(bodies.base_of) for name in ("b", "c")}
        a.call(bodies.post_only, "b", bases["b"])  # the lane is connected: what was not posted could be cancelled
        assert a.call(bodies.bulk_ends) == ("done", "")
        assert group["b"].call(bodies.take, 1) == {"a": [b"all"]}
        stop(group["b"].pid)
        try:
            a.call(bodies.fill, 3)
            a.call(bodies.post_only, "b", bases["b"])
            assert a.call(bodies.bulk_is) == ("active", False)
            assert a.call(bodies.bulk_call, "post").startswith("ActiveError: ")
            assert a.call(bodies.bulk_call, "wait").startswith("DeadlineError: the WRITE of 1 descriptors")
            assert a.call(bodies.bulk_is) == ("active", True), "stalled is a flag, not a state"
            assert a.call(bodies.bulk_call, "release").startswith("ActiveError: ")
            assert a.call(bodies.deregister_now).startswith("StateError: ")
            assert a.call(bodies.one_write, "c", bases["c"]) == "done"
        finally:
            os.kill(group["b"].pid, signal.SIGCONT)
        assert a.call(bodies.bulk_ends) == ("done", "")
        assert a.call(bodies.bulk_call, "release") == "nothing"
        assert group["b"].call(bodies.take, 1) == {"a": [b"all"]}
        assert not group["b"].call(bodies.bulk_holds, 0, 3)


def test_agents_that_know_each_other_part_one_by_one() -> None:
    with agents(["a", "b"], TCP) as group:
        a, b = group["a"], group["b"]
        cards = {name: group[name].call(bodies.register) for name in ("a", "b")}
        a.ask(bodies.add, cards["b"])  # both knock at once
        b.ask(bodies.add, cards["a"])
        assert (a.answer(), b.answer()) == ("b", "a")
        bases = {name: group[name].call(bodies.base_of) for name in ("a", "b")}
        a.call(bodies.say, "b", b"1")
        b.call(bodies.say, "a", b"2")
        assert b.call(bodies.take, 1) == {"a": [b"1"]}
        assert a.call(bodies.take, 1) == {"b": [b"2"]}
        assert a.call(bodies.remove, "b") == []
        assert b.call(bodies.one_write, "a", bases["a"]) == "done", "b uses it still"
        b.call(bodies.say, "a", b"3")
        assert a.call(bodies.take, 1) == {"b": [b"3"]}
        assert b.call(bodies.remove, "a") == []
        a.call(bodies.add, cards["b"])
        assert a.call(bodies.one_write, "b", bases["b"]) == "done"
        a.call(bodies.say, "b", b"4")
        assert b.call(bodies.take, 1) == {"a": [b"4"]}


def test_a_card_of_nobody_is_refused_and_nothing_is_kept() -> None:
    with agents(["a", "b"], BOTH["local"], connect_timeout_ms=2000, peers_max=1) as group:
        a, card = group["a"], group["b"].call(bodies.register)
        a.call(bodies.register)
        wrong = dataclasses.replace(card, door=dataclasses.replace(card.door, token=bytes(16)))
        closed = dataclasses.replace(card, door=dataclasses.replace(card.door, port=1))
        for bad, says in (
            (wrong, "MismatchError: .* refuses the introduction: the token is not"),
            (closed, "PeerError: .* cannot be reached"),
            (dataclasses.replace(card, provider="tcp;ofi_rxm"), "MismatchError: agent 'b' speaks 'tcp;ofi_rxm', this agent 'local'"),
            (dataclasses.replace(card, door=None), "InvalidArgumentError: the card of agent 'b' says nothing of its connection"),
            (dataclasses.replace(card, instance=7), "NotAllowedError: agent 'b' answers as instance"),
        ):
            said = a.call(bodies.add_refused, bad)
            assert re.match(says, said), said
        a.call(bodies.add, card)
        assert a.call(bodies.one_write, "b", group["b"].call(bodies.base_of)) == "done"
        strange = dataclasses.replace(card, name="c", instance=9)
        assert a.call(bodies.add_refused, strange).startswith("CapacityError: 1 agents are known")


def test_an_agent_may_close_while_it_lets_others_go() -> None:
    """A thread that raised here would fail the test."""
    quick = dataclasses.replace(BOTH["local"], timeout_ms=5000)
    for _ in range(3):
        with Agent("a", quick) as a:
            others = [Agent(name, quick) for name in ("b", "c", "d")]
            for other in others:
                a.add_remote(other.card())
            for other in others:
                other.close()
            until = time.monotonic() + 10
            while not any(thread.name == "expertwire parting" for thread in threading.enumerate()):
                assert time.monotonic() < until, "nobody is let go"
                a._connections.look_around()


def test_notifications_that_nobody_takes_are_bounded_and_their_target_is_told_of_those_that_were_lost() -> None:
    for settings in BOTH.values():
        with Agent("a", settings) as a, Agent("b", settings, notifications_max=50) as b:
            a.add_remote(b.card())
            words = [b"%d" % i for i in range(120)]
            for word in words[:50]:
                a.notify("b", word)
            until = time.monotonic() + 10
            while b._connections._held < 50:  # the door's thread takes them out of the transport, once
                b._connections.look_around()
                assert time.monotonic() < until
            for word in words[50:]:
                a.notify("b", word)
            while (seen := b.statistics()).notifications + seen.notifications_dropped < 120:
                assert time.monotonic() < until
            with pytest.raises(CapacityError, match=r"^20 notifications were lost: 50 waited .* 100 that came before are given"):
                b.notifications()
            assert b.notifications() == {"a": words[:100]}
            a.notify("b", b"after")
            while not (found := b.notifications()):
                assert time.monotonic() < until
            assert found == {"a": [b"after"]}


@pytest.mark.parametrize("provider", list(BOTH))
def test_who_parts_and_comes_again_at_once_is_not_let_go_for_its_parting(provider: str) -> None:
    """Its word of parting may be read only after its second introduction."""
    with Agent("a", BOTH[provider]) as a, Agent("b", BOTH[provider]) as b:
        card = b.card()
        for turn in range(3):
            a.add_remote(card)
            b._connections.look_around()
            b._connections.join()
            a.notify("b", b"%d" % turn)
            until = time.monotonic() + 10
            while not (found := b.notifications()):
                assert time.monotonic() < until, "its words are nobody's"
            assert found == {"a": [b"%d" % turn]}
            a.remove_remote("b")
