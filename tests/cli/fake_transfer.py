"""An engine for `bench transfer` inside one process: a copy at the second poll. By its name it does one thing wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from expertwire.cli.bench.transfer_engines import Bytes, Engine, Place
from expertwire.errors import TransferError

AGENTS: dict[str, FakeAgent] = {}


@dataclass
class Handle:
    operation: str
    peer: FakeAgent
    offset: int
    nbytes: int
    polls: int = 0
    posts: int = 0


class FakeAgent:
    polled = False

    def __init__(self, name: str, fault: str) -> None:
        self.name, self.fault = name, fault
        self.memory: Bytes | None = None
        self.peers: list[FakeAgent] = []
        self.prepared = self.copies = 0
        self.closed = False
        AGENTS[name] = self

    def region(self, memory: Bytes) -> None:
        self.memory = memory

    def card(self) -> bytes:
        return self.name.encode()

    def add(self, card: bytes) -> None:
        self.peers.append(AGENTS[card.decode()])

    def prepare(self, operation: str, peer: int, offset: int, nbytes: int) -> Handle:
        self.prepared += 1
        return Handle(operation, self.peers[peer], offset, nbytes)

    def post(self, handle: Handle) -> None:
        handle.polls = 0
        handle.posts += 1

    def poll(self, handle: Handle) -> bool:
        handle.polls += 1
        if handle.polls < 2:
            return False
        if handle.peer.memory is None and self.fault != "says a stale write was good":
            raise TransferError("the registration is stale")
        self.copy(handle)
        return True

    def copy(self, handle: Handle) -> None:
        self.copies += 1
        if handle.peer.memory is None:
            return
        ends = (self.memory, handle.peer.memory) if handle.operation == "write" else (handle.peer.memory, self.memory)
        assert ends[0] is not None
        assert ends[1] is not None
        begin, end = handle.offset, handle.offset + handle.nbytes
        if self.fault == "loses the last one" and handle.posts > 1:
            return
        if self.fault == "shifts by a byte":
            ends[1][begin + 9 : end] = ends[0][begin + 8 : end - 1]
            ends[1][begin : begin + 8] = ends[0][begin : begin + 8]
            return
        if self.fault == "tears":
            end -= 1
        if self.fault == "takes the next place":
            other = end if end + handle.nbytes <= ends[0].size else begin - handle.nbytes
            ends[1][begin + 8 : end] = ends[0][other + 8 : other + handle.nbytes]
            ends[1][begin : begin + 8] = ends[0][begin : begin + 8]
            return
        ends[1][begin:end] = ends[0][begin:end]

    def release(self, handle: Handle) -> None:
        self.prepared -= 1

    def progress(self) -> None:
        """Nothing: its peers copy."""

    def withdraw(self) -> None:
        self.memory = None

    def close(self) -> None:
        self.closed = True


def open_agent(engine: Engine, place: Place) -> Any:
    return FakeAgent(place.name, engine.name.partition("-")[2].replace("-", " "))
