"""Providers as they are, between two real processes.

Over mapped memory, and over `tcp;ofi_rxm` with both libraries and both signal paths.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import InvalidArgumentError, StateError, UnavailableError
from fabric.provider_peer import DATA, DATA_BYTES, DEADLINE_S, WORD_BYTES, WORDS, Pair, Side, pair
from fabric.provider_setups import SETUPS, Setup

CLOSE_S = 2.0
SLEEP_MS = 15_000
EVERY = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
WIRE = pytest.mark.parametrize("setup", [SETUPS["tcp-system-atomic"], SETUPS["tcp-wheel-message"]], ids=["system", "wheel"])


@pytest.fixture(scope="module", params=SETUPS.values(), ids=SETUPS.keys())
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One pair of processes for the tests that leave it as they found it."""
    request.param.require()
    with pair(request.param.kind, request.param.options) as made:
        yield made


def payload(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("length", [0, 1, 8, 4097, 7 << 10, 64 << 10, (64 << 10) + 1, 1 << 20])
def test_write_and_read_carry_every_byte(both: Pair, length: int) -> None:
    sent = payload(length, length)
    both.side.store(0, sent)
    assert both.run("write", slot=length % 7, local=DATA, remote=DATA, remote_offset=24, bytes=length) == "ok"
    assert both.ask("load", 24, length) == sent
    there = payload(length + 1, length)
    both.ask("store", 100, there)
    assert both.run("read", slot=3, local=DATA, local_offset=8, remote=DATA, remote_offset=100, bytes=length) == "ok"
    assert both.side.load(8, length) == there


def test_a_write_touches_nothing_beside_it(both: Pair) -> None:
    both.ask("store", 0, b"\xaa" * 8192)
    both.side.store(0, b"\x55" * 4096)
    assert both.run("write", local=DATA, remote=DATA, remote_offset=2048, bytes=4096) == "ok"
    assert both.ask("load", 0, 8192) == b"\xaa" * 2048 + b"\x55" * 4096 + b"\xaa" * 2048


def test_a_signal_that_follows_a_delivered_write_never_overtakes_it(both: Pair) -> None:
    length, start = 7 << 10, both.ask("word", 128)
    for turn in range(1, 41):
        sent = payload(turn, length)
        both.side.store(0, sent)
        both.pipe.send(("await_word", 128, start + turn, length))
        assert both.run("write", local=DATA, remote=DATA, bytes=length) == "ok"
        assert both.run("signal", remote=WORDS, remote_offset=128, operand=1) == "ok"
        assert both._answer() == sent


def test_signals_add_up_however_many_are_in_flight(both: Pair) -> None:
    before, applied = both.ask("word", 64), both.ask("counters")["signals_applied"]
    count, done, slots = 300, 0, list(range(32))
    posted = 0
    end = time.monotonic() + DEADLINE_S
    while done < count:
        assert time.monotonic() < end, f"{done} of {posted} posted signals have ended, of {count}"
        while slots and posted < count:
            outcome, status, _ = both.post("signal", slots[-1], remote=WORDS, remote_offset=64, operand=posted + 1)
            if outcome != "posted":
                assert outcome == "again", status
                break
            slots.pop()
            posted += 1
        for slot, _, status, _ in both.probe.poll()[0]:
            assert status == "ok"
            slots.append(slot)
            done += 1
    assert both.ask("word", 64) - before == count * (count + 1) // 2
    emulated = not both.probe.capabilities()["remote_atomics"]
    assert both.ask("counters")["signals_applied"] - applied == (count if emulated else 0)


def test_notifications_arrive_whole_once_and_name_their_sender(both: Pair) -> None:
    both.ask("arrivals")
    limit = both.probe.capabilities()["notification_bytes_max"]
    sent = [payload(length, length) for length in (0, 1, 48, 500, limit)]
    for slot, note in enumerate(sent):
        assert both.run("notification", slot=slot, payload=note) == "ok"
    arrived: list[tuple[int, bytes]] = []
    end = time.monotonic() + DEADLINE_S
    while len(arrived) < len(sent) and time.monotonic() < end:
        arrived += both.ask("arrivals")
    assert arrived == [(0, note) for note in sent]
    assert both.post("notification", payload=bytes(limit + 1)) == ("failed", "out_of_range", 0)


def test_a_killed_writer_gives_back_the_region_that_it_was_writing_to_and_a_stopped_one_does_not() -> None:
    """On local. Most kills find it in the middle of a copy; those that do not say nothing."""
    seen = 0
    for _ in range(10):
        with pair("local", {}) as made:
            made.side.store(DATA_BYTES - 1, b"\1")
            made.pipe.send(("write_on",))  # zeros
            end = time.monotonic() + DEADLINE_S
            while made.side.load(DATA_BYTES - 1, 1) == b"\1":
                assert time.monotonic() < end, "nothing has been written"
            made.stop()
            refused = not made.probe.deregister_region(DATA)
            if refused:
                assert not made.probe.deregister_region(DATA), "it goes on with its copy when it wakes"
            made.kill()
            if refused:
                assert made.probe.deregister_region(DATA)
        seen += refused
        if seen:
            return
    raise AssertionError("no writer was caught in the middle of a copy")


def test_a_copy_goes_in_steps_of_which_a_region_being_closed_waits_for_one() -> None:
    """On local: a poll copies 128 KiB under the word that says so, and what was not copied by then is not written any more."""
    step = 128 << 10
    with pair("local", {}) as both:
        both.side.store(0, b"\1" * (4 * step))
        assert both.post("write", 1, local=DATA, remote=DATA, bytes=4 * step)[0] == "posted"
        both.probe.poll()
        assert both.ask_without_looking("load", 0, 2 * step) == b"\1" * step + bytes(step)
        assert both.ask_without_looking("deregister", DATA) == 0
        completions, _ = both.probe.poll()
        assert [entry[2] for entry in completions] == ["bad_key"]
        assert both.ask_without_looking("load", step, step) == bytes(step)


def test_who_is_fenced_off_adds_to_nothing_until_it_is_added_again() -> None:
    """On local: it maps our memory, and may wake up."""
    ours, theirs = Side("local", {}), Side("local", {})
    try:
        ours.connect(theirs.blob())
        theirs.connect(ours.blob())
        assert theirs.probe.post("signal", 0, 0, remote=WORDS, operand=1)[0] == "posted"
        ours.probe.fence_peer(0)
        ours.probe.remove_peer(0)
        assert theirs.probe.post("signal", 1, 0, remote=WORDS, operand=1)[:2] == ("failed", "bad_key")
        assert theirs.probe.post("write", 2, 0, local=DATA, remote=DATA, bytes=8)[:2] == ("failed", "bad_key")
        assert ours.word(0) == 1
        ours.connect(theirs.blob())
        assert theirs.probe.post("signal", 3, 0, remote=WORDS, operand=1)[0] == "posted"
        assert ours.word(0) == 2
    finally:
        ours.probe.close()
        theirs.probe.close()


@EVERY
def test_what_is_sent_to_a_peer_that_has_not_added_us_arrives_once_it_has(setup: Setup) -> None:
    """Ranks do not add each other at one moment. Over a network nothing leaves before the peer has said that it knows us."""
    setup.require()
    first, second = Side(setup.kind, setup.options), Side(setup.kind, setup.options)
    try:
        first.connect(second.blob())
        posted, ended = False, []

        def turn() -> None:
            nonlocal posted
            posted = posted or first.probe.post("signal", 0, 0, remote=WORDS, operand=5)[0] == "posted"
            ended.extend(first.probe.poll()[0])
            second.probe.poll()

        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            turn()
        assert posted == (setup.kind == "local")
        second.connect(first.blob())
        end = time.monotonic() + DEADLINE_S
        while (not ended or second.word(0) != 5) and time.monotonic() < end:
            turn()
        assert [completion[2] for completion in ended] == ["ok"]
        assert second.word(0) == 5
    finally:
        first.probe.close()
        second.probe.close()


@pytest.mark.parametrize(
    ("kind", "arguments", "status"),
    [
        ("write", {"remote_offset": DATA_BYTES - 4, "bytes": 8}, "out_of_range"),
        ("write", {"remote_offset": 2**64 - 4, "bytes": 8}, "out_of_range"),
        ("write", {"bytes": DATA_BYTES + 1}, "out_of_range"),
        ("write", {"local_offset": DATA_BYTES - 4, "bytes": 8}, "out_of_range"),
        ("read", {"remote_offset": DATA_BYTES, "bytes": 1}, "out_of_range"),
        ("signal", {"remote": WORDS, "remote_offset": WORD_BYTES - 4}, "out_of_range"),
        ("signal", {"remote": WORDS, "remote_offset": 12}, "invalid"),
        ("write", {"remote": 77, "bytes": 8}, "bad_key"),
        ("write", {"local": 77, "bytes": 8}, "invalid"),
        ("write", {"endpoint": 9, "bytes": 8}, "invalid"),
        ("write", {"slot": 1 << 20, "bytes": 8}, "invalid"),
    ],
)
def test_what_cannot_be_is_refused_at_the_post_and_touches_nothing(both: Pair, kind: str, arguments: dict[str, int], status: str) -> None:
    both.ask("store", DATA_BYTES - 64, b"\x33" * 64)
    assert both.post(kind, **{"slot": 5, **arguments}) == ("failed", status, 0)
    assert both.collect(1, seconds=0.01) == []
    assert both.ask("load", DATA_BYTES - 64, 64) == b"\x33" * 64


def test_an_unknown_peer_is_refused(both: Pair) -> None:
    assert both.probe.post("write", 0, 5, bytes=8)[:2] == ("failed", "invalid")


def test_a_signal_wakes_a_sleeper(both: Pair) -> None:
    before = both.side.word(0)
    both.ask("signal_later", 0.02)
    begin = time.monotonic()
    while both.probe.poll() and both.side.word(0) == before:  # what landed is looked at between the poll and the sleep
        assert time.monotonic() - begin < DEADLINE_S, "never woken"
        both.probe.sleep(SLEEP_MS if both.probe.capabilities()["waits_on_descriptor"] else 1)  # shm has nothing to sleep on
    assert time.monotonic() - begin < SLEEP_MS / 2000, "slept on though the signal was there"


@EVERY
def test_a_full_queue_says_again_and_loses_nothing(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, {**setup.options, "transmit_queue": 2}) as both:
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"  # connections are made
        length, count = 512 << 10, 7
        both.side.store(0, payload(1, length * count))
        again = posted = done = 0
        end = time.monotonic() + DEADLINE_S
        while done < count:
            assert time.monotonic() < end, f"{done} of {posted} posted writes have ended, of {count}; again: {again}"
            if posted < count:
                place = posted * length
                outcome, _, _ = both.post("write", posted, local=DATA, local_offset=place, remote=DATA, remote_offset=place, bytes=length)
                again += outcome == "again"
                posted += outcome == "posted"
                if outcome == "posted":
                    continue
            finished = both.probe.poll()[0]
            assert all(entry[2] == "ok" for entry in finished)
            done += len(finished)
        assert again > 0
        assert both.ask("load", 0, length * count) == payload(1, length * count)


@EVERY
def test_a_target_that_does_not_look_pushes_back_and_gets_everything(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options, {**setup.options, "receive_buffers": 2}) as both:
        notes = [payload(number, 700) for number in range(60)]
        assert both.run("notification", payload=b"first") == "ok"
        both.pipe.send(("silent", 0.2))
        slots, sent, done = list(range(16)), 0, 0
        end = time.monotonic() + DEADLINE_S
        while done < len(notes):
            assert time.monotonic() < end, f"{done} of {sent} posted notifications have ended, of {len(notes)}"
            while slots and sent < len(notes) and both.post("notification", slots[-1], payload=notes[sent])[0] == "posted":
                slots.pop()
                sent += 1
            for entry in both.probe.poll()[0]:
                assert entry[2] == "ok"
                slots.append(entry[0])
                done += 1
        assert both._answer() is None
        arrived: list[tuple[int, bytes]] = []
        end = time.monotonic() + DEADLINE_S
        while len(arrived) <= len(notes) and time.monotonic() < end:
            arrived += both.ask("arrivals")
        assert [note for _, note in arrived] == [b"first", *notes]


@EVERY
def test_a_stale_key_is_an_error_touches_nothing_and_harms_no_other_region(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        both.side.store(0, b"\x11" * 4096)
        assert both.run("write", local=DATA, remote=DATA, bytes=4096) == "ok"
        polls = both.ask("deregister", DATA)
        assert polls > 0 or setup.kind == "local"  # over a wire the target waits until we have said that nothing is on its way
        for kind in ("write", "read"):
            assert both.run(kind, local=DATA, remote=DATA, bytes=4096) == "bad_key"
        assert both.run("signal", remote=DATA, operand=1) == "bad_key"
        assert both.run("signal", remote=WORDS, remote_offset=8, operand=9) == "ok"
        assert both.ask("word", 8) == 9
        key = both.ask("register", DATA, DATA_BYTES)
        assert both.run("write", local=DATA, remote=DATA, bytes=4096) == "bad_key"  # the old key is not taken for the new one
        assert both.ask("load", 0, 4096) == bytes(4096)
        both.probe.add_remote_region(0, DATA, key)
        assert both.run("write", local=DATA, remote=DATA, bytes=4096) == "ok"
        assert both.ask("load", 0, 4096) == b"\x11" * 4096


@EVERY
def test_access_rights_of_a_region_hold(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        both.ask("deregister", DATA)
        both.probe.add_remote_region(0, DATA, both.ask("register", DATA, DATA_BYTES, False, True))
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "bad_key"
        assert both.run("signal", remote=DATA, operand=1) == "bad_key"
        assert both.run("read", local=DATA, remote=DATA, bytes=8) == "ok"


@EVERY
def test_a_region_in_use_is_not_deregistered(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"
        both.pipe.send(("silent", 0.1))
        assert both.post("write", 1, local=DATA, remote=DATA, bytes=1 << 20)[0] == "posted"
        with pytest.raises(UnavailableError, match="in use by 1 operations"):
            both.probe.deregister_region(DATA)
        assert both.post("write", 1, local=DATA, remote=DATA, bytes=8) == ("failed", "refused", 0) or setup.kind == "local"
        assert both.collect(1)[0][2] == "ok"
        assert both._answer() is None


@EVERY
def test_a_killed_peer_ends_in_errors_never_in_success_and_closing_is_quick(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("notification", payload=b"hello") == "ok"
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"  # its key is known to be good
        both.stop()
        if setup.kind != "local":  # mapped memory outlives its process: a copy there succeeds, and nobody is misled by a signal
            for slot in range(4):
                assert both.post("write", slot, local=DATA, remote=DATA, bytes=1 << 20)[0] == "posted"
        both.kill()
        if both.probe.capabilities()["detects_death"]:
            assert {entry[2] for entry in both.collect(4)} == {"peer_dead"}
        elif setup.kind != "local":  # shm says nothing at all: only the deadlines above it end such an operation
            assert both.collect(4, seconds=0.2) == []
        seen = both.probe.capabilities()["detects_death"] or setup.kind == "local"
        end = time.monotonic() + (DEADLINE_S if seen else 0.2)
        statuses: set[str] = set()
        while time.monotonic() < end and not statuses & ({"peer_dead", "would_block"} if seen else {"peer_dead"}):
            statuses.add(both.post("notification", 9, payload=b"anyone?")[1])
            statuses |= {entry[2] for entry in both.probe.poll()[0]}
        if seen:
            assert statuses <= {"peer_dead", "would_block", "ok" if setup.kind != "local" else ""}, statuses  # "ok": it was posted, no more
            assert "peer_dead" in statuses or "would_block" in statuses
        else:
            assert statuses <= {"would_block", "ok", "refused"}, statuses  # "refused": its slot is still taken by what never ends
        assert both.probe.close() < CLOSE_S


@EVERY
def test_closing_is_quick_with_operations_on_their_way_to_a_stopped_peer(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"
        both.stop()
        try:
            for slot in range(4):
                both.post("write", slot, local=DATA, remote=DATA, bytes=1 << 20)
            assert both.probe.close() < CLOSE_S
            both.probe.close()  # again: nothing happens
            assert both.post("write", 9, local=DATA, remote=DATA, bytes=8) == ("failed", "closed", 0)
            with pytest.raises(StateError, match="closed"):
                both.probe.add_peer(1, b"")
        finally:
            both.send_signal(signal.SIGCONT)


@EVERY
def test_a_removed_peer_is_forgotten_and_can_come_back(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        blob = Side(setup.kind, setup.options)  # a third provider, in this process
        both.probe.add_peer(1, blob.probe.address())
        both.probe.remove_peer(1)
        assert both.probe.post("notification", 0, 1, payload=b"")[:2] == ("failed", "invalid")
        both.probe.add_peer(1, blob.probe.address())
        both.probe.add_remote_region(1, 9, blob.probe.region_key(WORDS))
        assert both.post("signal", remote=9, operand=1)[:2] == ("failed", "bad_key")  # that region is not peer 0's
        blob.probe.add_peer(0, both.probe.address())
        end = time.monotonic() + DEADLINE_S
        while both.probe.post("signal", 4, 1, remote=9, operand=3)[0] == "again" and time.monotonic() < end:
            both.probe.poll()
            blob.probe.poll()
        finished: list[tuple[int, int, str, int]] = []
        while not finished and time.monotonic() < end:
            finished = both.probe.poll()[0]
            blob.probe.poll()
        assert finished == [(4, 1, "ok", 0)]
        assert blob.word(0) == 3
        blob.probe.close()


@EVERY
def test_what_a_removed_peer_had_sent_does_no_harm_when_it_is_found(setup: Setup) -> None:
    """libfabric's shm answered it through memory that the removal had unmapped, and this process died."""
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("signal", remote=WORDS, operand=1) == "ok"  # each knows the other
        posts: list[tuple[str, dict[str, Any]]] = [
            ("signal", {"remote": WORDS, "operand": 1}),
            ("notification", {"payload": b"late"}),
            ("write", {"local": DATA, "remote": DATA, "bytes": 64 << 10}),
            ("read", {"local": DATA, "remote": DATA, "bytes": 64 << 10}),
        ]
        for slot, (kind, arguments) in enumerate(posts):
            assert both.ask_without_looking("post", kind, slot, arguments) in ("posted", "again", "done"), kind
        both.probe.remove_peer(0)
        for _ in range(1000):
            both.probe.poll()
        both.side.connect(both.peer_blob)
        both.side.store(0, b"again")
        assert both.run("write", local=DATA, remote=DATA, bytes=5) == "ok"
        assert both.ask("load", 0, 5) == b"again"


def test_addresses_that_are_kept_come_to_an_end_in_words_and_one_that_is_known_is_still_taken() -> None:
    SETUPS["shm-wheel"].require()
    side = Side("libfabric", SETUPS["shm-wheel"].options)

    def address(number: int) -> bytes:
        name = b"fi_shm://%d:%d\0" % (1 << 22, number)  # of a process that there is not; nothing is sent to it
        return side.probe.address()[:4] + struct.pack("<IQQI", 1, number + 1, 0, len(name)) + name

    for number in range(256):
        side.probe.add_peer(0, address(number))
        side.probe.remove_peer(0)
    with pytest.raises(UnavailableError, match=r"takes no more addresses than the 256 .* make a new endpoint"):
        side.probe.add_peer(0, address(256))
    side.probe.add_peer(0, address(7))
    side.probe.close()


def test_an_address_is_looked_at_as_a_whole_before_any_of_it_is_taken() -> None:
    """What keeps addresses has room for all that are good, however many were not."""
    SETUPS["shm-wheel"].require()
    side = Side("libfabric", SETUPS["shm-wheel"].options)

    def address(number: int, *names: bytes, more: bytes = b"") -> bytes:
        head = side.probe.address()[:4] + struct.pack("<IQQ", len(names), number + 1, 0)
        return head + b"".join(struct.pack("<I", len(name)) + name for name in names) + more

    def name(number: int) -> bytes:
        return b"fi_shm://%d:%d\0" % (1 << 22, number)

    wrong = {
        "name 1 of an endpoint has 0 bytes, outside 1..512": lambda n: address(n, name(n), b""),
        "name 1 of an endpoint has 513 bytes": lambda n: address(n, name(n), b"x" * 513),
        "name 1 of an endpoint does not end with a zero": lambda n: address(n, name(n), b"fi_shm://1:1"),
        "name 1 of an endpoint breaks off after 1[0-9] of": lambda n: address(n, name(n), name(n))[:-4],
        "name 1 of an endpoint is missing, of 2": lambda n: address(n, name(n), b"")[:-4],
        "3 bytes follow the last name": lambda n: address(n, name(n), name(n + 1), more=b"abc"),
    }
    for number in range(300):
        message, made = list(wrong.items())[number % len(wrong)]
        with pytest.raises(InvalidArgumentError, match=message):
            side.probe.add_peer(0, made(number))
    for number in range(1000, 1256):
        side.probe.add_peer(0, address(number, name(number)))
        side.probe.remove_peer(0)
    side.probe.close()


def test_a_name_of_another_network_is_refused() -> None:
    setup = SETUPS["tcp-system-message"]
    setup.require()
    side = Side(setup.kind, setup.options)
    own = side.probe.address()
    with pytest.raises(InvalidArgumentError, match="name 0 of an endpoint has 28 bytes, those here 16: it is not of the same network"):
        side.probe.add_peer(0, own[:4] + struct.pack("<IQQI", 1, 7, 0, 28) + bytes(28))
    side.probe.close()


@pytest.mark.parametrize("setup", [SETUPS["tcp-system-message"], SETUPS["tcp-wheel-message"]], ids=["system", "wheel"])
def test_an_emulated_signal_that_nobody_answers_ends_with_its_peer(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("signal", remote=WORDS, operand=1) == "ok"
        both.stop()
        assert both.post("signal", 3, remote=WORDS, operand=1)[0] == "posted"
        assert both.collect(1, seconds=0.1) == []  # sent is not applied
        both.kill()
        both.probe.poll()
        both.probe.remove_peer(0)
        finished = both.collect(1)
        assert [(slot, status) for slot, _, status, _ in finished] == [(3, "peer_dead")]


@WIRE
def test_two_endpoints_carry_both(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, {**setup.options, "endpoints": 2}) as both:
        for endpoint in (0, 1):
            both.side.store(0, payload(endpoint, 9000))
            assert both.run("write", local=DATA, remote=DATA, bytes=9000, endpoint=endpoint) == "ok"
            assert both.ask("load", 0, 9000) == payload(endpoint, 9000)
            assert both.run("signal", remote=WORDS, remote_offset=8 * endpoint, operand=4, endpoint=endpoint) == "ok"
            assert both.ask("word", 8 * endpoint) == 4


@EVERY
def test_a_forked_child_closes_nothing_of_its_parents(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, setup.options) as both:
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"
        child = os.fork()
        if child == 0:
            both.probe.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        both.side.store(0, payload(3, 4096))
        assert both.run("write", local=DATA, remote=DATA, bytes=4096) == "ok"
        assert both.ask("load", 0, 4096) == payload(3, 4096)


@pytest.fixture(scope="module", params=["local", "tcp-wheel-atomic"])
def alone(request: pytest.FixtureRequest) -> Iterator[Side]:
    setup = SETUPS[request.param]
    setup.require()
    side = Side(setup.kind, setup.options)
    side.probe.add_peer(0, side.probe.address())
    yield side
    side.probe.close()


@settings(max_examples=200, deadline=None)
@given(noise=st.binary(max_size=200), cut=st.integers(0, 200), flip=st.integers(0, 10_000))
def test_nothing_that_a_bootstrap_could_bring_is_trusted(alone: Side, noise: bytes, cut: int, flip: int) -> None:
    for good, take in (
        (alone.probe.address(), lambda blob: alone.probe.add_peer(3, blob)),
        (alone.probe.region_key(DATA), lambda blob: alone.probe.add_remote_region(0, 30, blob)),
    ):
        changed = bytearray(good)
        changed[flip % 4] ^= 0xFF  # the mark of its kind and version
        for bad in (noise, good[: min(cut, len(good) - 1)], bytes(changed)):
            with pytest.raises(InvalidArgumentError):
                take(bad)


def test_local_memory_that_is_no_file_is_attached_to() -> None:
    side = Side("local", {})
    side.probe.create_region(5, 4096, mappable=False)
    key = bytearray(side.probe.region_key(5))
    assert key[4:8] == b"\xff" * 4, "no file"
    side.probe.add_peer(0, side.probe.address())
    side.probe.add_remote_region(0, 6, bytes(key))
    stranger = bytearray(side.probe.address())
    stranger[32:40] = (int.from_bytes(stranger[32:40], "little") + 8).to_bytes(8, "little")  # where the secret is not
    side.probe.add_peer(1, bytes(stranger))
    with pytest.raises(UnavailableError, match=r"may not be attached to.*ptrace_scope"):
        side.probe.add_remote_region(1, 7, bytes(key))
    for wrong, says in ((slice(40, 48), "names no memory"), (slice(16, 24), "not one of this version's")):
        bad = bytearray(key)
        bad[wrong] = bytes(8)
        with pytest.raises(InvalidArgumentError, match=says):
            side.probe.add_remote_region(0, 8, bytes(bad))
    side.probe.close()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UnavailableError, match="/nowhere/libfabric"):
        Side("libfabric", {"libraries": ["/nowhere/libfabric.so.1"]})
    setup = SETUPS["tcp-wheel-atomic"]
    setup.require()
    with pytest.raises(UnavailableError, match='no provider "psm9"'):
        Side("libfabric", {**setup.options, "provider": "psm9"})
    with pytest.raises(InvalidArgumentError, match='"eth77"'):
        Side("libfabric", {**setup.options, "interface": "eth77"})
    with pytest.raises(UnavailableError, match="misbehave"):
        Side("libfabric", {**setup.options, "provider": "sockets"})
