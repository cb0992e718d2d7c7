"""Two agents in processes of their own, over both ways that bytes may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from expertwire.fabric.config import Settings
from transfer import bodies
from transfer.world import BOTH, Group, agents


@pytest.fixture(scope="module", params=list(BOTH))
def settings(request: pytest.FixtureRequest) -> Settings:
    return BOTH[request.param]


@pytest.fixture(scope="module")
def pair(settings: Settings) -> Iterator[Group]:
    """a knows b, and not the other way round, as in a cluster's prefill and decode."""
    with agents(["a", "b"], settings) as group:
        group["a"].call(bodies.register)
        group["a"].call(bodies.add, group["b"].call(bodies.register))
        yield group


def test_513_descriptors_go_both_ways_and_their_word_comes_behind_them(pair: Group) -> None:
    count, nbytes = 513, 1040
    pair["a"].call(bodies.prepare, "b", pair["b"].call(bodies.base_of), count, nbytes)
    pair["b"].call(bodies.clear)
    assert pair["a"].call(bodies.move, "WRITE", 1, b"\0word\0") == (count, count, "released")
    found, wrong = pair["b"].call(bodies.written_with_word, 0, 1, count, nbytes)
    assert found == {"a": [b"\0word\0"]}, "the sender is known by name, though it was not added"
    assert not wrong
    pair["b"].call(bodies.fill, 2)
    assert pair["a"].call(bodies.move, "READ", 2, b"read") == (count, count, "released")
    assert not pair["a"].call(bodies.check_read, 1, 2, count, nbytes)
    assert pair["b"].call(bodies.take, 1) == {"a": [b"read"]}


def test_every_form_of_descriptors_and_indices_moves_the_same(pair: Group) -> None:
    assert pair["a"].call(bodies.forms, "b", pair["b"].call(bodies.base_of)) == 7


def test_messages_come_in_order_and_may_be_of_any_bytes(pair: Group) -> None:
    messages = [b"", b"\0", bytes(range(256)), bytes(8000), *(b"%d" % i for i in range(300))]
    pair["a"].ask(bodies.say, "b", *messages)
    assert pair["b"].call(bodies.take, len(messages)) == {"a": messages}
    pair["a"].answer()


def test_twenty_thousand_pieces_are_one_post(pair: Group) -> None:
    inside_ms = pair["a"].call(bodies.many, "b", pair["b"].call(bodies.base_of), 20_000)
    assert not pair["b"].call(bodies.check_many, 20_000)
    print(f"{inside_ms:.2f} ms inside the post")


def test_an_event_loop_awaits_transfers_side_by_side(pair: Group) -> None:
    pair["a"].call(bodies.prepare, "b", pair["b"].call(bodies.base_of), 8, 20_000)
    pair["b"].call(bodies.fill, 3)
    assert pair["a"].call(bodies.awaited) == ["done"] * 8
    assert not pair["a"].call(bodies.check_read, 1, 3, 8, 20_000)


def test_an_agent_reaches_its_own_memory(pair: Group) -> None:
    assert not pair["a"].call(bodies.loopback)


def test_what_cannot_be_is_refused_by_name(pair: Group) -> None:
    base = pair["b"].call(bodies.base_of)
    expected = [
        "NotFoundError: agent 'nobody' is not known here; known: 'b'",
        "NotFoundError: descriptor 0 (8 bytes",
        "NotFoundError: descriptor 0 (8 bytes at",
        "UnavailableError: the local side is VRAM memory",
        "UnavailableError: this memory is VRAM memory",
        "InvalidArgumentError: operation is 'COPY'",
        "InvalidArgumentError: 2 local and 1 remote descriptors",
        "InvalidArgumentError: descriptor 0 has 64 bytes here and 32 there",
        "InvalidArgumentError: local index 0 is 2; the prepared list has 2",
        "InvalidArgumentError: the local side is a list of agent 'b'",
        "InvalidArgumentError: the remote side is a list that was prepared as local",
        "StateError: a prepared list of 1 descriptors was released",
        "InvalidArgumentError: a notification has 9000 bytes",
        "NotPostedError: the WRITE of 1 descriptors, 64 bytes, with agent 'b' was never posted",
        "StateError: the WRITE of 1 descriptors, 64 bytes, with agent 'b' was released",
        "NotFoundError: descriptor 0 (64 bytes at",
        "InvalidArgumentError: agent 'a' needs no card",
        "InvalidArgumentError: a notification has 9000 bytes",
        "NotFoundError: agent 'nobody' is not known here",
    ]
    for found, wanted in zip(pair["a"].call(bodies.refused, "b", base), expected, strict=True):
        assert found.startswith(wanted), found
    assert pair["a"].call(bodies.known, [(base, 64, 0)], "b") == (True, [True])
    assert pair["a"].call(bodies.known, [(base - 8, 64, 0)], "b") == (False, [True])
    assert pair["a"].call(bodies.known, [(base, 64, 0)], "nobody") == (False, [True])


def test_a_registration_that_is_gone_is_an_error_and_its_bytes_stay(pair: Group) -> None:
    base = pair["b"].call(bodies.base_of)
    pair["a"].call(bodies.keep_transfer, "b", base)
    pair["a"].call(bodies.fill, 4)
    pair["b"].call(bodies.clear)
    pair["b"].call(bodies.deregister)
    said = pair["a"].call(bodies.post_stale)
    assert said.startswith("TransferError: the WRITE of 1 descriptors, 64 bytes, with agent 'b' failed: bad_key"), said
    assert said.endswith("[released]")
    assert pair["b"].call(bodies.first_bytes) == {0}
    pair["a"].call(bodies.add, pair["b"].call(bodies.register))  # again at the same place, under another key
    assert pair["a"].call(bodies.one_write, "b", base) == "done"
    assert not pair["b"].call(bodies.first_hold, 0, 4)


def test_a_forked_child_is_told_whose_the_agent_is(pair: Group) -> None:
    pair["a"].call(bodies.keep_transfer, "b", pair["b"].call(bodies.base_of))
    said = pair["a"].call(bodies.in_a_child)
    assert len(said) == 6
    assert all(each.startswith("StateError: ") and "forked" in each for each in said), said
    assert pair["a"].call(bodies.post_stale) == "done", "the parent's agent works on"


def test_fourteen_outstanding_over_28_slots_and_129_reuses(settings: Settings) -> None:
    count, nbytes = 14, 6000
    with agents(["a", "b"], dataclasses.replace(settings, max_outstanding=28)) as group:
        group["a"].call(bodies.register)
        group["a"].call(bodies.add, group["b"].call(bodies.register))
        group["b"].call(bodies.add, group["a"].call(bodies.card_of))
        group["a"].call(bodies.prepare, "b", group["b"].call(bodies.base_of), count, nbytes)
        for epoch in (1, 2, 3):
            assert not group["a"].call(bodies.outstanding, epoch, count, nbytes)
            words = group["b"].call(bodies.take, count)["a"]
            assert sorted(words) == sorted(b"%d/%d" % (epoch, i) for i in range(count))
            assert not group["b"].call(bodies.check_written, 0, epoch, count, nbytes)
        group["a"].ask(bodies.again, 129)
        assert not group["b"].call(bodies.answer_again, 129, count, nbytes)
        group["a"].answer()
