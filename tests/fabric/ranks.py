"""Real ranks for the tests of endpoints: one process each, driven by the test over a pipe.

A body is a function `body(endpoint, *arguments)` of a module that the processes can import; it runs in a rank's process and its result, or
its exception, comes back.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import pytest

from expertwire.fabric import discover
from expertwire.fabric.config import Settings
from fabric.provider_peer import remove_shared_files
from fabric.provider_setups import shm_refused
from harness import server
from leftovers import LEFT_OVER, forget_what_was_imported, held, left_over

ANSWER_S = 60.0
HOME = Settings.from_environment().libfabric_home  # whoever asks for another libfabric gets the tests of that one
LOCAL = Settings(provider="local", timeout_ms=20_000)
TCP = Settings(provider="tcp", timeout_ms=20_000, libfabric_home=HOME)
SHM = Settings(provider="shm", timeout_ms=20_000, libfabric_home=HOME)
DATA_BYTES = 1 << 20
COUNTERS = 64


class RankError(AssertionError):
    """A body failed in its rank; the message holds the rank's traceback."""


def serve(connection: Connection, rank: int, size: int, settings: Settings, arguments: dict[str, Any], share: bool) -> None:
    """One rank's process. It leaves with exit code `LEFT_OVER` where it still holds something when its endpoint is closed and dropped."""
    forget_what_was_imported()
    before = held()
    live(connection, rank, size, settings, arguments, share)
    more = left_over(before)
    if more:
        print(f"rank {rank} left behind: {dict(more)}", file=sys.stderr, flush=True)
        sys.exit(LEFT_OVER)


def live(connection: Connection, rank: int, size: int, settings: Settings, arguments: dict[str, Any], share: bool) -> None:
    """What it does."""
    # The server of all ranks may have been started by a test of the launcher, which blocks Ctrl-C in it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(arguments.pop("environment", {}))  # what libfabric reads when it is loaded
    from expertwire.fabric.endpoint import Endpoint

    with Endpoint(rank, size, settings, **{"counters": COUNTERS, **arguments}) as endpoint:
        endpoint.region("data", DATA_BYTES)
        connection.send((os.getpid(), {name: endpoint.native.region_fd(endpoint.native.region(name)) for name in ("runtime", "data")}))
        connection.send(endpoint.blob())
        peers = connection.recv()
        endpoint.blobs = [blob for _, _, blob in peers]  # type: ignore[attr-defined]
        for peer, (pid, descriptors, blob) in enumerate(peers):
            if peer == rank:
                continue
            endpoint.add_peer(peer, blob)
            if share:
                map_peer(endpoint, peer, pid, descriptors)
        connection.send("mapped")
        connection.recv()
        endpoint.start()
        while (work := connection.recv()) is not None:
            body, given = work
            try:
                connection.send((True, body(endpoint, *given)))
            except Exception as error:
                connection.send((False, (error, traceback.format_exc())))


@dataclass
class Rank:
    """One process, seen from the test."""

    process: Any
    connection: Connection
    rank: int
    pid: int = 0
    descriptors: dict[str, int] = field(default_factory=dict)

    def ask(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Start a body; `answer()` takes its result."""
        self.connection.send((body, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What the body returned; what it raised is raised here."""
        if not self.connection.poll(timeout_s):
            raise RankError(f"rank {self.rank} has not answered within {timeout_s} s")
        try:
            fine, value = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join(ANSWER_S)
            raise RankError(f"rank {self.rank} is gone: exit code {self.process.exitcode}") from error
        if fine:
            return value
        error, where = value
        error.add_note(f"in rank {self.rank}:\n{where}")
        raise error

    def call(self, body: Callable[..., Any], *arguments: Any) -> Any:
        self.ask(body, *arguments)
        return self.answer()


class Group:
    """Connected ranks."""

    def __init__(
        self, members: list[Rank], blobs: list[tuple[int, dict[str, int], bytes]], given: tuple[Settings, bool, dict[str, Any]]
    ) -> None:
        self.members = members
        self.former: list[Rank] = []  # that live on though another one has their name
        self.blobs = blobs  # (process, descriptors, blob) by rank, as they began
        self.given = given

    def __getitem__(self, rank: int) -> Rank:
        return self.members[rank]

    def all(self, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The body on every rank at once; the results by rank."""
        for member in self.members:
            member.ask(body, *arguments)
        return [member.answer() for member in self.members]

    def restart(
        self, rank: int, *, stale: bool = False, early: Callable[[], None] | None = None, spare: bool = False, mapped: bool = False
    ) -> Rank:
        """The process of this rank is ended, however it is; a new one under its name is connected to the others, who removed it before.

        `stale`: it is given the others' first blobs. `early`: is called when it has begun to work, and nobody has added it yet.
        `spare`: the old one, which is returned, lives on; a stopped one must be woken before the group ends. `mapped`: the others map the
        new one's memory, too, as it maps theirs where the group shares.
        """
        old = self.members[rank]
        if spare:
            self.former.append(old)
        else:
            old.process.kill()
            old.process.join(10)
            old.connection.close()
        fresh = start(rank, len(self.members), *self.given)
        self.members[rank] = fresh
        blob = fresh.connection.recv()
        others = [member for member in self.members if member is not fresh]
        blobs = {each.rank: self.blobs[each.rank] if stale else (each.pid, each.descriptors, each.call(blob_of)) for each in others}
        fresh.connection.send([blobs.get(each, (0, {}, b"")) for each in range(len(self.members))])
        assert fresh.connection.recv() == "mapped"
        if early:
            fresh.connection.send(None)
            early()
        for member in others:
            member.call(add_peer, rank, blob)
            if mapped:
                member.call(map_peer, rank, fresh.pid, fresh.descriptors)
        if not early:
            fresh.connection.send(None)
        return old


def blob_of(endpoint: Any) -> bytes:
    return bytes(endpoint.blob())


def add_peer(endpoint: Any, rank: int, blob: bytes) -> None:
    endpoint.add_peer(rank, blob)


def map_peer(endpoint: Any, rank: int, pid: int, descriptors: dict[str, int]) -> None:
    for name, number in descriptors.items():
        with open(f"/proc/{pid}/fd/{number}", "r+b", buffering=0) as file:
            endpoint.native.map_peer(rank, name, file.fileno())


def start(rank: int, size: int, settings: Settings, share: bool, arguments: dict[str, Any]) -> Rank:
    """A process that has opened its endpoint and is about to send its blob."""
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, rank, size, settings, arguments, share), daemon=True)
    process.start()
    theirs.close()
    member = Rank(process, ours, rank)
    assert ours.poll(ANSWER_S), f"rank {rank} did not start"
    member.pid, member.descriptors = ours.recv()
    return member


@contextmanager
def ranks(size: int, settings: Settings, *, share: bool = False, **arguments: Any) -> Iterator[Group]:
    """`share`: the ranks map each other's regions, as ranks of one node do. `environment`: of their processes; the rest is Endpoint's.

    Skips the test where the libfabric of this machine is one whose shm is refused.
    """
    if settings.provider == "shm" and (why := shm_refused(discover.best_library(settings))):
        pytest.skip(why)
    context = server()
    members: list[Rank] = []
    former: list[Rank] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, size, settings, arguments, share), daemon=True)
            process.start()
            theirs.close()
            members.append(Rank(process, ours, rank))
        for member in members:
            assert member.connection.poll(ANSWER_S), f"rank {member.rank} did not start"
            member.pid, member.descriptors = member.connection.recv()
        blobs = [(member.pid, member.descriptors, member.connection.recv()) for member in members]
        for word in (blobs, None):
            for member in members:
                member.connection.send(word)
            if word is not None:
                for member in members:
                    assert member.connection.recv() == "mapped"
        group = Group(members, blobs, (settings, share, arguments))
        former = group.former
        yield group
    finally:
        members = [*members, *former]
        for member in members:
            if member.process.is_alive():
                try:
                    member.connection.send(None)
                except OSError:
                    continue
        for member in members:
            member.process.join(10)
            if member.process.is_alive():
                member.process.kill()
                member.process.join(10)
            member.connection.close()
            if settings.provider == "shm":
                remove_shared_files(member.pid)
        left = [member.rank for member in members if member.process.exitcode == LEFT_OVER]
        assert not left, f"ranks {left} left something behind; they say what on stderr"
