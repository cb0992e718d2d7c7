"""What a door is told: whole records only, of bounded size, from those who have the token; whoever says other things is sent away."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import MismatchError, PeerError, UnavailableError
from expertwire.transfer.card import Door
from expertwire.transfer.door import VISIT_S, VISITORS_MAX, Doorkeeper, knock
from expertwire.transfer.introduction import LENGTH, RECORD_BYTES_MAX, Answer, Elsewhere, Knock, Later, Record, Refusal, decode, encode

TOKEN = bytes(range(16))
RECORDS: tuple[Record, ...] = (
    Knock(TOKEN, "näme", 2**64 - 1, 7, "tcp", 2**63, b"blob", b"key"),
    Answer(5, 2**32 - 1, b"", b""),
    Answer(5, 1, b"blob", b"key"),
    Refusal("why not"),
    Elsewhere("not so"),
    Later("not yet"),
)


@pytest.mark.parametrize("record", RECORDS)
def test_records_come_back_as_they_were(record: Record) -> None:
    data = encode(record)
    assert decode(data) == record
    for cut in range(len(data)):
        with pytest.raises(MismatchError):
            decode(data[:cut])
    with pytest.raises(MismatchError, match="1 bytes follow"):
        decode(data + b"\0")
    with pytest.raises(MismatchError, match="version 3"):
        decode(data[:4] + b"\3" + data[5:])
    with pytest.raises(MismatchError, match="kind 9"):
        decode(data[:6] + b"\x09" + data[7:])
    assert len(encode(Refusal("é" * 5000))) <= 1100, "a reason has a limit"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(RECORDS), st.integers(0, 200), st.binary(max_size=40))
def test_noise_is_refused_and_never_more(record: Record, at: int, noise: bytes) -> None:
    data = encode(record)
    at = min(at, len(data))
    try:
        decode(data[:at] + noise + data[at + len(noise) :])
    except MismatchError:
        return


def test_a_door_hears_many_at_once_and_sends_away_who_says_nothing() -> None:
    keeper = Doorkeeper("127.0.0.1", lambda said: Answer(said.instance, said.number + 1, said.blob), lambda: True)
    door = Door("127.0.0.1", keeper.port, TOKEN)
    ask = Knock(TOKEN, "me", 4, 8, "tcp", 1, b"b" * 20_000)
    silent = [socket.create_connection((door.host, door.port)) for _ in range(3)]
    try:
        silent[0].sendall(LENGTH.pack(100) + b"half")
        silent[1].sendall(LENGTH.pack(RECORD_BYTES_MAX + 1))
        begun = time.monotonic()
        assert knock(door, ask, "it", 5) == Answer(4, 9, ask.blob), "nobody waits for those who are silent"
        silent[1].settimeout(VISIT_S / 2)
        assert silent[1].recv(10) == b"", "what is too long is not even heard"
        for each in (silent[0], silent[2]):
            each.settimeout(3 * VISIT_S)
            assert each.recv(10) == b""
        assert time.monotonic() - begun >= VISIT_S / 2
        with socket.create_connection((door.host, door.port)) as other:
            data = encode(Refusal("no"))
            other.sendall(LENGTH.pack(len(data)) + data)
            heard = other.recv(RECORD_BYTES_MAX)
            assert decode(heard[LENGTH.size :]) == Refusal("this is no knock")
        crowd = [socket.create_connection((door.host, door.port)) for _ in range(VISITORS_MAX)]
        try:
            with pytest.raises(PeerError, match=r"closed its door|cannot be reached"):
                knock(door, ask, "it", 5)
        finally:
            for each in crowd:
                each.close()
        ends = time.monotonic() + 10
        while True:  # until the door has seen that the crowd has gone
            try:
                assert knock(door, ask, "it", 5).number == 9
                break
            except PeerError:
                assert time.monotonic() < ends, "the crowd has gone, and the door is still full"
    finally:
        for each in silent:
            each.close()
        keeper.close()
    keeper.close()
    with pytest.raises(PeerError, match="cannot be reached"):
        knock(door, ask, "it", 1)


def test_who_knocks_is_told_why_not_and_waits_no_longer_than_it_says() -> None:
    keeper = Doorkeeper("127.0.0.1", lambda said: Refusal("not today"), lambda: True)
    try:
        with pytest.raises(MismatchError, match=r"agent 'it' at 127.0.0.1:\d+ refuses the introduction: not today"):
            knock(Door("127.0.0.1", keeper.port, TOKEN), Knock(TOKEN, "me", 4, 8, "tcp", 1, b""), "it", 5)
    finally:
        keeper.close()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        with pytest.raises(PeerError, match=r"has not answered within 0\.2 s"):
            knock(Door("127.0.0.1", deaf.getsockname()[1], TOKEN), Knock(TOKEN, "me", 4, 8, "tcp", 1, b""), "it", 0.2)


def test_a_door_that_ends_by_itself_leaves_no_socket_open() -> None:
    """As that of an agent that was dropped without `close()`."""
    keeper = Doorkeeper("127.0.0.1", lambda said: None, lambda: False)
    keeper._thread.join(10)
    assert not keeper._thread.is_alive()
    assert [each.fileno() for each in (keeper._listener, keeper._bell, keeper._button)] == [-1] * 3
    keeper.close()


def test_who_comes_too_early_knocks_again_and_who_comes_by_another_path_is_told() -> None:
    replies: list[Record] = [
        Later("it is being let go"),
        Later("it is being let go"),
        Answer(4, 9, b""),
        Elsewhere("this agent speaks 'local'"),
    ]
    keeper = Doorkeeper("127.0.0.1", lambda said: replies.pop(0) if len(replies) > 1 else replies[0], lambda: True)
    door, ask = Door("127.0.0.1", keeper.port, TOKEN), Knock(TOKEN, "me", 4, 8, "tcp", 1, b"")
    try:
        assert knock(door, ask, "it", 10) == Answer(4, 9, b"")
        with pytest.raises(UnavailableError, match="is not reached over 'tcp': this agent speaks 'local'"):
            knock(door, ask, "it", 10)
        replies[0] = Later("it is being let go")
        with pytest.raises(PeerError, match=r"has not let go of what was between us within 0\.1 s: it is being let go"):
            knock(door, ask, "it", 0.1)
    finally:
        keeper.close()
