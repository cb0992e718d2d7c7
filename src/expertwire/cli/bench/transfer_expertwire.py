"""Our own engine behind the bench's interface; and the same with one global list of completions, which only the bench has."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from expertwire.cli.bench.transfer_engines import Agent, Bytes, Engine, Place
from expertwire.fabric.config import Settings
from expertwire.transfer.agent import Agent as TransferAgent
from expertwire.transfer.metadata import decode, encode
from expertwire.transfer.requests import Transfer
from expertwire.transfer.states import TransferState

KIND = "DRAM"


def open_agent(engine: Engine, place: Place) -> Agent:
    """An agent, as it is or with the global list."""
    return GlobalListAgent(place) if engine.name == "expertwire-global-list" else ExpertwireAgent(place)


class ExpertwireAgent:
    """`expertwire.transfer.Agent`: its progress thread serves others."""

    polled = False

    def __init__(self, place: Place) -> None:
        self._agent = TransferAgent(place.name, replace(Settings.from_environment(), provider=place.provider), lanes=place.lanes)
        self._peers: list[tuple[str, int]] = []
        self._memory: Bytes | None = None

    def region(self, memory: Bytes) -> None:
        """See `Agent`."""
        self._memory = memory
        self._agent.register([(self._base, memory.nbytes, 0)], KIND)

    def card(self) -> bytes:
        """See `Agent`."""
        return encode(self._agent.card())

    def add(self, card: bytes) -> None:
        """See `Agent`."""
        found = decode(card)
        name = self._agent.add_remote(found)
        self._agent.connect(name)
        self._peers.append((name, found.areas[0].address))

    def prepare(self, operation: str, peer: int, offset: int, nbytes: int) -> Transfer:
        """See `Agent`."""
        name, base = self._peers[peer]
        here = self._agent.prepare("", [(self._base + offset, nbytes, 0)], KIND)
        there = self._agent.prepare(name, [(base + offset, nbytes, 0)], KIND)
        return self._agent.make(operation.upper(), here, None, there, None)

    def post(self, handle: Transfer) -> None:
        """See `Agent`."""
        handle.post()

    def poll(self, handle: Transfer) -> bool:
        """See `Agent`."""
        return handle.check() is TransferState.DONE

    def release(self, handle: Transfer) -> None:
        """See `Agent`."""
        handle.release()

    def progress(self) -> None:
        """See `Agent`."""

    def withdraw(self) -> None:
        """See `Agent`."""
        assert self._memory is not None
        self._agent.deregister([(self._base, self._memory.nbytes, 0)], KIND)

    def close(self) -> None:
        """See `Agent`."""
        self._agent.close()

    @property
    def _base(self) -> int:
        assert self._memory is not None
        return int(self._memory.ctypes.data)


class GlobalListAgent(ExpertwireAgent):
    """One list of all that is under way, in the order of posting: nothing is seen done before all that was posted earlier."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._under_way: deque[Transfer] = deque()

    def post(self, handle: Transfer) -> None:
        """See `Agent`."""
        super().post(handle)
        self._under_way.append(handle)

    def poll(self, handle: Transfer) -> bool:
        """See `Agent`."""
        while self._under_way and super().poll(self._under_way[0]):
            self._under_way.popleft()
        return handle not in self._under_way
