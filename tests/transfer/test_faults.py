"""Agents that die, stop, close, come back, or never were: an error is only that of who asked for it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from expertwire.errors import CapacityError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from expertwire.transfer import Agent
from expertwire.transfer.requests import NOTIFICATION
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
            refused = a.call(bodies.deregister_now)
            assert re.match(r"StateError: .* \(it was asked for again and again for 50 ms\)$", refused)
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


def test_notifications_that_nobody_takes_are_bounded_and_both_sides_are_told_of_those_that_were_lost() -> None:
    for settings in BOTH.values():
        with Agent("a", settings) as a, Agent("b", settings, notifications_max=50) as b:
            a.add_remote(b.card())
            words = [b"%d" % i for i in range(120)]
            until = time.monotonic() + 10
            for first in range(0, 120, 40):
                for word in words[first : first + 40]:
                    a.notify("b", word)
                while b._connections._held + b._connections._lost["a"] < first + 40:  # the door's thread takes them out of the transport
                    b._connections.look_around()
                    assert time.monotonic() < until
            with pytest.raises(CapacityError, match=r"^20 notifications were lost, since 100 waited .* 100 that came before .*: a: 20$"):
                b.notifications()
            assert b.notifications() == {"a": words[:100]}
            while not a._connections.peers.named("b").lost:
                b._connections.look_around()
                a._connections.look_around()
                assert time.monotonic() < until
            with pytest.raises(CapacityError, match=r"agent 'b' has lost 20 notifications of this agent, .* this one was not sent"):
                a.notify("b", b"not sent")
            a.notify("b", b"after")
            while not (found := b.notifications()):
                assert time.monotonic() < until
            assert found == {"a": [b"after"]}


def test_what_the_transport_itself_has_lost_is_said_without_a_name() -> None:
    with Agent("a", BOTH["local"]) as a, Agent("b", BOTH["local"], notifications_max=50) as b:
        a.add_remote(b.card())
        with b._lock:  # so that its door does not take them out
            for number in range(60):
                a.notify("b", b"%d" % number)
            until = time.monotonic() + 10
            while (seen := b.statistics()).notifications + seen.notifications_dropped < 60:
                assert time.monotonic() < until
        with pytest.raises(CapacityError, match=r"^10 notifications were lost, .*: not known: 10$"):
            b.notifications()


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


@pytest.mark.parametrize("provider", list(BOTH))
def test_who_closes_lets_go_first_whoever_has_parted(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the host they do not hear its farewell, for which a second was waited in every such close."""
    known: list[bool] = []

    def close(endpoint: Endpoint, timeout_ms: int = 2000) -> None:
        known.append(any(endpoint in peer.reached for peer in b._connections.peers.all()))
        endpoint.native.close(timeout_ms)

    with Agent("a", BOTH[provider]) as a:
        b = Agent("b", BOTH[provider])
        a.add_remote(b.card())
        with b._lock:  # so that its door does not look first
            a.remove_remote("b")
        monkeypatch.setattr(Endpoint, "close", close)
        b.close()
        assert known == [False]
        monkeypatch.undo()


@pytest.mark.parametrize("provider", list(BOTH))
def test_a_parting_that_is_read_after_the_next_visit_ends_nothing(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word may be late by any time: it names the visit that it ends."""
    with Agent("a", BOTH[provider]) as a, Agent("b", BOTH[provider]) as b:
        a.add_remote(b.card())
        b.add_remote(a.card())  # so that a keeps b, who may be using it, and the word can be sent late
        endpoint, held = a._endpoint, []
        send = endpoint.notify

        def hold(peer: int, payload: bytes) -> Any:
            held.append((peer, payload))
            return send(peer, NOTIFICATION + b"in its place")

        monkeypatch.setattr(endpoint, "notify", hold)
        a.remove_remote("b")
        monkeypatch.undo()
        a.add_remote(b.card())
        b.remove_remote("a")
        (word,) = held
        send(*word).wait(10_000)
        until = time.monotonic() + 10
        while b.notifications() != {"a": [b"in its place"]}:
            assert time.monotonic() < until
        for turn in range(2):
            b._connections.look_around()
            b._connections.join()
            a.notify("b", b"%d" % turn)
            while not (found := b.notifications()):
                assert time.monotonic() < until, "its words are nobody's"
            assert found == {"a": [b"%d" % turn]}


@pytest.mark.parametrize("provider", list(BOTH))
def test_who_comes_while_it_is_being_let_go_waits_for_that(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other side has under way with it takes its time to end; then it is met anew."""
    with Agent("a", BOTH[provider]) as a, Agent("b", BOTH[provider]) as b:
        a.add_remote(b.card())
        endpoint, begun, go_on = b._endpoint, threading.Event(), threading.Event()
        remove = endpoint.remove_peer

        def slowly(number: int) -> None:
            begun.set()
            assert go_on.wait(60)
            remove(number)

        monkeypatch.setattr(endpoint, "remove_peer", slowly)
        a.remove_remote("b")
        assert begun.wait(40), "b's door lets a go"
        adding = threading.Thread(target=lambda: a.add_remote(b.card()))
        adding.start()
        adding.join(0.1)
        assert adding.is_alive()
        go_on.set()
        adding.join(20)
        assert a.remotes() == ["b"]
        a.notify("b", b"again")
        until = time.monotonic() + 10
        while b.notifications() != {"a": [b"again"]}:
            assert time.monotonic() < until


def test_a_parting_that_is_not_heard_at_once_is_not_lost() -> None:
    """Who parts does not let go of the other before that has heard it, which takes its time where it is busy."""
    with agents(["a", "b"], TCP) as group:
        group["a"].call(bodies.register)
        group["a"].call(bodies.add, group["b"].call(bodies.register))
        stop(group["b"].pid)
        try:
            group["a"].call(bodies.part_unheard, "b")
        finally:
            os.kill(group["b"].pid, signal.SIGCONT)
        assert group["b"].call(bodies.is_visited_by_nobody)


def test_who_looks_around_while_a_parting_is_said_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door's tick found that nobody used the peer any more, and let go of it with the word on its way."""
    with Agent("a", TCP) as a, Agent("b", TCP) as b:
        a.add_remote(b.card())
        send = a._endpoint.notify

        def look_first(peer: int, payload: bytes) -> Any:
            a._connections.look_around()
            a._connections.join()
            return send(peer, payload)

        monkeypatch.setattr(a._endpoint, "notify", look_first)
        a.remove_remote("b")
        until = time.monotonic() + 20
        while any(peer.visitor for peer in b._connections.peers.all()):
            assert time.monotonic() < until, "b was not told"
            b._connections.look_around()
