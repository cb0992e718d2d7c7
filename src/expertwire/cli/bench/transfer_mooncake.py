"""Mooncake's transfer engine behind the bench's interface: its own batches, by its peer-to-peer handshake over tcp."""

from __future__ import annotations

import importlib
import json
from typing import Any

from expertwire.cli.bench.transfer_engines import Bytes, Engine, Place
from expertwire.errors import TransferError, UnavailableError


def open_agent(engine: Engine, place: Place) -> MooncakeAgent:
    """An agent. Raises `UnavailableError` where the wheel does not load."""
    try:
        module = importlib.import_module(f"{engine.package()}.engine")
    except ImportError as error:
        raise UnavailableError(f"Mooncake does not load here: {error}") from None
    return MooncakeAgent(module.TransferEngine(), place)


class Batch:
    """A transfer of one piece: what its calls are given, and the number of the one under way."""

    def __init__(self, call: Any, peer: str, here: int, there: int, nbytes: int) -> None:
        self.call, self.peer = call, peer
        self.here, self.there, self.nbytes = [here], [there], [nbytes]
        self.number = 0


class MooncakeAgent:
    """Its threads serve others, so nothing has to be polled. A batch cannot be prepared: each post makes one."""

    polled = False

    def __init__(self, engine: Any, place: Place) -> None:
        self._engine = engine
        if code := engine.initialize(place.host, "P2PHANDSHAKE", "tcp", ""):
            raise UnavailableError(f"Mooncake does not start here: initialize gave {code}")
        self._name = f"{place.host}:{engine.get_rpc_port()}"
        self._peers: list[tuple[str, int]] = []
        self._memory: Bytes | None = None

    def region(self, memory: Bytes) -> None:
        """See `Agent`."""
        self._memory = memory
        if code := self._engine.register_memory(self._base, memory.nbytes):
            raise TransferError(f"Mooncake: register_memory gave {code} for {memory.nbytes} bytes")

    def card(self) -> bytes:
        """See `Agent`."""
        return json.dumps([self._name, self._base]).encode()

    def add(self, card: bytes) -> None:
        """See `Agent`."""
        name, base = json.loads(card)
        self._peers.append((name, base))

    def prepare(self, operation: str, peer: int, offset: int, nbytes: int) -> Batch:
        """See `Agent`."""
        name, base = self._peers[peer]
        call = self._engine.batch_transfer_async_read if operation == "read" else self._engine.batch_transfer_async_write
        return Batch(call, name, self._base + offset, base + offset, nbytes)

    def post(self, handle: Batch) -> None:
        """See `Agent`."""
        handle.number = handle.call(handle.peer, handle.here, handle.there, handle.nbytes)
        if handle.number <= 0:
            raise TransferError(f"Mooncake: a batch to {handle.peer} was refused with {handle.number}")

    def poll(self, handle: Batch) -> bool:
        """See `Agent`."""
        state = self._engine.transfer_check_status(handle.number)
        if state < 0:
            raise TransferError(f"Mooncake: a batch to {handle.peer} ended with {state}")
        return bool(state)

    def release(self, handle: Batch) -> None:
        """See `Agent`. A batch is freed by the look that finds it done."""

    def progress(self) -> None:
        """See `Agent`."""

    def withdraw(self) -> None:
        """See `Agent`."""
        self._engine.unregister_memory(self._base)

    def close(self) -> None:
        """See `Agent`. Its process ends by `os._exit`: its threads do not."""

    @property
    def _base(self) -> int:
        assert self._memory is not None
        return int(self._memory.ctypes.data)
