"""Agents in processes of their own, driven by a test over pipes.

A body is a function `body(self, *arguments)` of a module that the processes can import; `self` is the `Here` of its process.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy

from expertwire.fabric.config import Settings
from expertwire.testing.oracle import check_payload, payload, payload_seed
from harness import server
from leftovers import LEFT_OVER, held, left_over

ANSWER_S = 60.0
ARENA_BYTES = 3 << 20
LOCAL = Settings(provider="local", timeout_ms=20_000)
TCP = Settings(provider="tcp", timeout_ms=20_000, interface="lo")
BOTH = {"local": LOCAL, "tcp": TCP}


@dataclass
class Here:
    """What a body is given: the agent, `source` (its number in seeds), memory, and a place to keep things."""

    agent: Any
    source: int
    arena: numpy.ndarray[Any, Any]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return int(self.arena.ctypes.data)

    def fill(self, epoch: int, nbytes: int = ARENA_BYTES) -> None:
        """The arena's first bytes are this source's payload of that epoch."""
        self.arena[:nbytes] = payload(payload_seed(self.source, epoch), 0, nbytes)

    def holds(self, place: int, nbytes: int, source: int, epoch: int, offset: int) -> str:
        """ "" where the bytes at `place` are those at `offset` of another's payload, else which is not."""
        wrong = check_payload(self.arena[place : place + nbytes], payload_seed(source, epoch), offset)
        return "" if wrong is None else f"at {place}: {wrong}"


def serve(connection: Connection, name: str, source: int, settings: Settings, options: dict[str, Any]) -> None:
    before = held()
    live(connection, name, source, settings, options)
    more = left_over(before)
    if more:
        print(f"agent {name} left behind: {dict(more)}", file=sys.stderr, flush=True)
        sys.exit(LEFT_OVER)


def live(connection: Connection, name: str, source: int, settings: Settings, options: dict[str, Any]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    from expertwire.transfer import Agent

    with Agent(name, settings, **options) as agent:
        here = Here(agent, source, numpy.zeros(ARENA_BYTES, dtype=numpy.uint8))
        connection.send(os.getpid())
        while (work := connection.recv()) is not None:
            body, given = work
            try:
                connection.send((True, body(here, *given)))
            except Exception as error:
                connection.send((False, (error, traceback.format_exc())))


@dataclass
class Member:
    """One process, seen from the test."""

    name: str
    process: Any
    connection: Connection
    pid: int = 0

    def ask(self, body: Callable[..., Any], *arguments: Any) -> None:
        self.connection.send((body, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self.connection.poll(timeout_s), f"agent {self.name} has not answered within {timeout_s} s"
        fine, value = self.connection.recv()
        if fine:
            return value
        error, where = value
        error.add_note(f"in agent {self.name}:\n{where}")
        raise error

    def call(self, body: Callable[..., Any], *arguments: Any) -> Any:
        self.ask(body, *arguments)
        return self.answer()


def start(name: str, source: int, settings: Settings, options: dict[str, Any]) -> Member:
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, name, source, settings, options), daemon=True)
    process.start()
    theirs.close()
    return Member(name, process, ours)


class Group:
    """Agents by name. Their source in seeds is their place in the list."""

    def __init__(self, names: Sequence[str], settings: Settings, options: dict[str, Any]) -> None:
        self._given = settings, options
        self.members = {name: start(name, source, settings, options) for source, name in enumerate(names)}
        for member in self.members.values():
            self._meet(member)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def kill(self, name: str) -> None:
        """SIGKILL, and it has ended."""
        member = self.members[name]
        member.process.kill()
        member.process.join(10)
        member.connection.close()

    def restart(self, name: str) -> Member:
        """Another process under that name."""
        source = list(self.members).index(name)
        self.members[name] = start(name, source, *self._given)
        self._meet(self.members[name])
        return self.members[name]

    def close(self) -> None:
        """Each leaves by itself, with nothing left behind."""
        codes = {}
        for member in self.members.values():
            if member.connection.closed:
                continue
            member.connection.send(None)
        for member in self.members.values():
            if not member.connection.closed:
                member.process.join(20)
                codes[member.name] = member.process.exitcode
        self.end()
        assert not any(codes.values()), f"agents ended with {codes}"

    def end(self) -> None:
        for member in self.members.values():
            if member.process.is_alive():
                member.process.kill()
                member.process.join(10)
            member.process.close()
            member.connection.close()
        self.members = {}

    def _meet(self, member: Member) -> None:
        assert member.connection.poll(ANSWER_S), f"agent {member.name} did not start"
        member.pid = member.connection.recv()


@contextmanager
def agents(names: Sequence[str], settings: Settings, **options: Any) -> Iterator[Group]:
    """One process each; `options` are Agent's."""
    group = Group(names, settings, options)
    try:
        yield group
        group.close()
    finally:
        group.end()
