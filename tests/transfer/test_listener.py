"""The metadata listener, and visits to it: what is right goes through, and what is not costs it nothing."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from expertwire.errors import (
    CapacityError,
    DeadlineError,
    ExpertwireError,
    InvalidArgumentError,
    MismatchError,
    NotAllowedError,
    NotFoundError,
    PeerError,
    StateError,
    TransferError,
    UnavailableError,
)
from expertwire.transfer import listener as ours
from expertwire.transfer.listener import Listener, ListenerCounts, fetch, send, withdraw

HOST = "127.0.0.1"


@dataclass
class Kept:
    """What a listener is for, in tests: remembers what came, and raises what it is told to."""

    came: list[bytes] = field(default_factory=list)
    gone: list[tuple[str, int]] = field(default_factory=list)
    error: Exception | None = None
    wait: threading.Event | None = None

    def card_of(self, label: str) -> bytes:
        if self.error is not None:
            raise self.error
        return b"card of " + label.encode()

    def card_came(self, data: bytes) -> None:
        if self.wait is not None:
            assert self.wait.wait(10)
        if self.error is not None:
            raise self.error
        self.came.append(data)

    def card_withdrawn(self, name: str, instance: int) -> None:
        self.gone.append((name, instance))


@contextmanager
def listening(token: bytes = b"", visit_ms: int = 2000) -> Iterator[tuple[Kept, Listener]]:
    kept = Kept()
    with closing(Listener([HOST], 0, kept, token, visit_ms=visit_ms)) as listener:
        yield kept, listener


def until(true: Callable[[], bool]) -> None:
    """Counts are made after a visitor has its answer."""
    ends = time.monotonic() + 10
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_cards_go_both_ways() -> None:
    with listening() as (kept, listener):
        large = os.urandom(3 << 20)
        send(HOST, listener.port, b"one")
        send(HOST, listener.port, large)
        assert kept.came == [b"one", large]
        assert fetch(HOST, listener.port) == b"card of "
        assert fetch(HOST, listener.port, "half\n") == b"card of half\n"
        withdraw(HOST, listener.port, "ä", 2**64 - 1)
        assert kept.gone == [("ä", 2**64 - 1)]
        until(lambda: listener.counts() == ListenerCounts(done=5))
    with pytest.raises(PeerError, match=f"nobody listens: the metadata listener at {HOST}:{listener.port}"):
        send(HOST, listener.port, b"late", timeout_ms=120)
    listener.close()


def test_on_several_addresses_at_one_port() -> None:
    with closing(Listener([HOST, "127.0.0.2", HOST], 0, Kept())) as listener:
        for host in (HOST, "127.0.0.2"):
            assert fetch(host, listener.port) == b"card of "
        with pytest.raises(PeerError, match="nobody listens"):
            fetch("127.0.0.3", listener.port, timeout_ms=60)
        with pytest.raises(UnavailableError, match=f"cannot listen for metadata on 127.0.0.1 at port {listener.port}: .*give another port"):
            Listener([HOST], listener.port, Kept())
    with closing(Listener([HOST], listener.port, Kept())) as again:
        assert again.port == listener.port, "a port is free as soon as its listener has closed"


@pytest.mark.parametrize(("host", "port"), [("", 1), (HOST, 0), (HOST, 65_536)])
def test_an_address_that_is_none(host: str, port: int) -> None:
    with pytest.raises(InvalidArgumentError, match="an address is a host and a port"):
        fetch(host, port)


def test_listeners_that_cannot_be() -> None:
    with pytest.raises(InvalidArgumentError, match="port is 65536"):
        Listener([HOST], 65_536, Kept())
    with pytest.raises(InvalidArgumentError, match="at least one address"):
        Listener([], 0, Kept())


def test_the_token_decides() -> None:
    with listening(b"secret") as (kept, listener):
        send(HOST, listener.port, b"one", b"secret")
        for token in (b"", b"Secret", b"secret\0" * 40):
            with pytest.raises(NotAllowedError, match="has another token than was given here"):
                send(HOST, listener.port, b"two", token)
            with pytest.raises(NotAllowedError):
                fetch(HOST, listener.port, token=token)
        assert kept.came == [b"one"]
        until(lambda: listener.counts() == ListenerCounts(done=1, refused=6))


@pytest.mark.parametrize(
    "error",
    [
        MismatchError("no card"),
        NotAllowedError("another process"),
        NotFoundError("nothing"),
        CapacityError("full"),
        UnavailableError("lacking"),
        PeerError("dead"),
        DeadlineError("late"),
        InvalidArgumentError("wrong"),
        StateError("closed"),
        TransferError("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_host_raises_is_raised_at_the_visitors(error: ExpertwireError) -> None:
    with listening(b"t") as (kept, listener):
        kept.error = error
        with pytest.raises(type(error), match=f"the metadata listener at {HOST}:{listener.port} refuses: {error}"):
            send(HOST, listener.port, b"x", b"t")
        until(lambda: listener.counts().refused == 1)


def test_a_fault_of_the_host_ends_one_visit() -> None:
    with listening() as (kept, listener):
        kept.error = ZeroDivisionError("x" * 5000)
        with pytest.raises(TransferError, match="refuses: ZeroDivisionError: xxx"):
            fetch(HOST, listener.port)
        kept.error = None
        assert fetch(HOST, listener.port) == b"card of "


def visit(port: int, *parts: bytes, hang_up: bool = True) -> bytes:
    """Send these, and what came after the listener's hello until it hung up."""
    with socket.create_connection((HOST, port), timeout=10) as raw:
        assert len(raw.recv(ours._HELLO.size, socket.MSG_WAITALL)) == ours._HELLO.size
        answer = b""
        with suppress(OSError):  # it hangs up as soon as it knows enough
            for part in parts:
                raw.sendall(part)
            if hang_up:
                raw.shutdown(socket.SHUT_WR)
            while part := raw.recv(65_536):
                answer += part
        return answer


def test_garbage_costs_nothing() -> None:
    chance = random.Random(1)
    with listening(b"t") as (kept, listener):
        for round_ in range(40):
            visit(listener.port, chance.randbytes(chance.choice([0, 1, 43, 44, 75, 76, 77, 300])), b"GET / HTTP/1.1\r\n\r\n" * (round_ % 2))
        assert fetch(HOST, listener.port, token=b"t") == b"card of "
        until(lambda: listener.counts().done == 1 and sum(vars_of(listener.counts())) == 41)
        assert kept.came == []


def vars_of(counts: ListenerCounts) -> tuple[int, ...]:
    return counts.done, counts.refused, counts.broken, counts.busy


def asked(token: bytes, nonce: bytes, claim: int, verb: int = 1, digest: bytes = bytes(32)) -> bytes:
    head = ours._REQUEST.pack(ours.MAGIC, ours.VERSION, verb, 0, claim, digest)
    return head + ours._mac(token, nonce, head)


@pytest.mark.parametrize("claim", [ours.REQUEST_BYTES_MAX + 1, 2**32 - 1])
def test_too_much_is_refused_unread(claim: int) -> None:
    with listening() as (_, listener), socket.create_connection((HOST, listener.port), timeout=10) as raw:
        nonce = ours._HELLO.unpack(raw.recv(ours._HELLO.size, socket.MSG_WAITALL))[2]
        raw.sendall(asked(b"", nonce, claim))
        magic, version, status, nbytes = ours._REPLY.unpack(raw.recv(ours._REPLY.size, socket.MSG_WAITALL))
        assert (magic, version, status) == (ours.MAGIC, ours.VERSION, ours._ERRORS.index(CapacityError) + 1)
        raw.recv(32, socket.MSG_WAITALL)
        assert (
            raw.recv(nbytes, socket.MSG_WAITALL).decode()
            == f"a request of {claim} bytes is not read, the limit is {ours.REQUEST_BYTES_MAX}"
        )
    with pytest.raises(CapacityError, match="too many for"):
        send(HOST, 1, bytes(ours.REQUEST_BYTES_MAX + 1))
    with pytest.raises(CapacityError, match="too many for"):
        fetch(HOST, 1, "x" * 256)


def test_a_request_that_was_altered_or_is_unknown() -> None:
    with listening() as (kept, listener):
        for verb, digest in ((1, bytes(32)), (9, hashlib.sha256(b"abc").digest()), (3, hashlib.sha256(b"abc").digest())):
            with socket.create_connection((HOST, listener.port), timeout=10) as raw:
                nonce = ours._HELLO.unpack(raw.recv(ours._HELLO.size, socket.MSG_WAITALL))[2]
                raw.sendall(asked(b"", nonce, 3, verb, digest))
                assert ours._REPLY.unpack(raw.recv(ours._REPLY.size, socket.MSG_WAITALL))[2] == ours._GO_ON
                raw.recv(32, socket.MSG_WAITALL)
                raw.sendall(b"abc")
                assert ours._REPLY.unpack(raw.recv(ours._REPLY.size, socket.MSG_WAITALL))[2] == ours._ERRORS.index(MismatchError) + 1
        assert kept.came == []


def test_a_recorded_visit_is_of_no_use() -> None:
    """The same bytes again meet another nonce."""
    with listening(b"t") as (kept, listener):
        with socket.create_connection((HOST, listener.port), timeout=10) as raw:
            nonce = ours._HELLO.unpack(raw.recv(ours._HELLO.size, socket.MSG_WAITALL))[2]
            recorded = asked(b"t", nonce, 3, 1, hashlib.sha256(b"abc").digest())
            raw.sendall(recorded)
            assert ours._REPLY.unpack(raw.recv(ours._REPLY.size, socket.MSG_WAITALL))[2] == ours._GO_ON
        answer = visit(listener.port, recorded, hang_up=False)
        assert ours._REPLY.unpack(answer[: ours._REPLY.size])[2] == ours._ERRORS.index(NotAllowedError) + 1
        assert kept.came == []


def test_slow_visitors_hold_up_nobody() -> None:
    """All places but one are taken by visitors that say nothing, or stop in the middle; then all of them; then there is room again."""
    with listening(visit_ms=60_000) as (_, listener):
        idle = [socket.create_connection((HOST, listener.port)) for _ in range(ours.VISITORS_MAX - 1)]
        for raw in idle[::2]:
            raw.sendall(b"EWTL")
        assert fetch(HOST, listener.port) == b"card of "
        until(lambda: listener.counts().done == 1)
        idle.append(socket.create_connection((HOST, listener.port)))
        assert idle[-1].recv(ours._HELLO.size, socket.MSG_WAITALL)
        with pytest.raises(PeerError, match="hung up"):
            fetch(HOST, listener.port)
        for raw in idle:
            raw.close()
        until(lambda: listener.counts() == ListenerCounts(done=1, broken=ours.VISITORS_MAX, busy=1))
        assert fetch(HOST, listener.port) == b"card of "


def test_who_says_nothing_is_shown_out() -> None:
    with listening(visit_ms=100) as (_, listener), socket.create_connection((HOST, listener.port), timeout=10) as raw:
        assert raw.recv(ours._HELLO.size, socket.MSG_WAITALL)
        assert raw.recv(1) == b""
        until(lambda: listener.counts() == ListenerCounts(broken=1))


def test_a_host_that_takes_its_time_holds_up_only_its_visitor() -> None:
    with listening(visit_ms=200) as (kept, listener):
        kept.wait = threading.Event()
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(str(send(HOST, listener.port, b"slow"))))
        thread.start()
        assert fetch(HOST, listener.port) == b"card of "
        with pytest.raises(DeadlineError, match="has not answered in time"):
            send(HOST, listener.port, b"late", timeout_ms=50)
        assert not answers
        kept.wait.set()
        thread.join(10)
        assert answers == ["None"]
        until(lambda: sorted(kept.came) == [b"late", b"slow"])


def test_something_else_that_listens() -> None:
    with socket.create_server((HOST, 0)) as server:

        def serve(answers: list[bytes]) -> None:
            for answer in answers:
                visitor, _ = server.accept()
                with visitor:
                    visitor.sendall(answer)
                    visitor.settimeout(5)
                    with suppress(ConnectionResetError):
                        visitor.recv(1 << 16)

        hello = ours._HELLO.pack(ours.MAGIC, ours.VERSION, bytes(16))
        large = ours._REPLY.pack(ours.MAGIC, ours.VERSION, 0, 2**32 - 1) + bytes(32)
        thread = threading.Thread(target=serve, args=([b"HTTP/1.1 400 Bad Request\r\n\r\n", hello, hello + large],))
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(MismatchError, match="something else listens there"):
            fetch(HOST, port)
        with pytest.raises(PeerError, match="hung up"):
            fetch(HOST, port)
        with pytest.raises(MismatchError, match="4294967295 bytes: that is no answer"):
            fetch(HOST, port)
        thread.join(10)
        with pytest.raises(DeadlineError, match="has not answered in time"):
            fetch(HOST, port, timeout_ms=50)


def test_one_that_begins_to_listen_late_is_met() -> None:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(fetch(HOST, port, timeout_ms=10_000)))
    thread.start()
    with closing(Listener([HOST], port, Kept())):
        thread.join(10)
    assert answers == [b"card of "]


def test_a_child_closes_nothing_of_its_parents() -> None:
    with listening() as (_, listener):
        child = os.fork()
        if child == 0:
            listener.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert fetch(HOST, listener.port) == b"card of "


def test_layouts_are_as_documented() -> None:
    assert ours._REQUEST.size == 4 + 1 + 1 + 1 + 4 + 32
    assert ours._REPLY.size == struct.calcsize("<4sBBI") == 10
