"""NIXL behind the bench's interface: prepared lists, one of each side for each handle, as vLLM uses them."""

from __future__ import annotations

import contextlib
import importlib
import struct
from typing import Any

from expertwire.cli.bench.transfer_engines import Bytes, Engine, Place
from expertwire.errors import TransferError, UnavailableError

BACKENDS = {"nixl-ucx": "UCX", "nixl-libfabric": "LIBFABRIC"}
ADDRESS = struct.Struct("<Q")
KIND = "DRAM"


def open_agent(engine: Engine, place: Place) -> NixlAgent:
    """An agent with the one backend of the arm. Raises `UnavailableError` where the backend does not start."""
    return NixlAgent(importlib.import_module(f"{engine.package()}._api"), BACKENDS[engine.name], place)


class NixlAgent:
    """No progress thread: on as many cores as processes it would take its own side's core, and its figures are worse with it."""

    polled = True

    def __init__(self, api: Any, backend: str, place: Place) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[backend])
        try:
            self._agent = api.nixl_agent(place.name, config)
        except Exception as error:
            raise UnavailableError(f"NIXL's backend {backend} does not start here: {error or type(error).__name__}") from None
        if backend not in self._agent.backends:
            raise UnavailableError(f"NIXL has no plugin {backend} here")
        self._peers: list[tuple[bytes, int]] = []
        self._lists: dict[int, tuple[Any, Any]] = {}
        self._memory: Bytes | None = None
        self._registered: Any = None

    def region(self, memory: Bytes) -> None:
        """See `Agent`."""
        self._memory = memory
        self._registered = self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], KIND)

    def card(self) -> bytes:
        """See `Agent`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return ADDRESS.pack(self._base) + metadata

    def add(self, card: bytes) -> None:
        """See `Agent`."""
        name = self._agent.add_remote_agent(card[ADDRESS.size :])
        self._peers.append((name, ADDRESS.unpack_from(card)[0]))

    def prepare(self, operation: str, peer: int, offset: int, nbytes: int) -> Any:
        """See `Agent`."""
        name, base = self._peers[peer]
        here = self._agent.prep_xfer_dlist("", [(self._base + offset, nbytes, 0)], KIND)
        there = self._agent.prep_xfer_dlist(name, [(base + offset, nbytes, 0)], KIND)
        handle = self._agent.make_prepped_xfer(operation.upper(), here, [0], there, [0])
        self._lists[id(handle)] = (here, there)
        return handle

    def post(self, handle: Any) -> None:
        """See `Agent`."""
        self._agent.transfer(handle)

    def poll(self, handle: Any) -> bool:
        """See `Agent`."""
        state = self._agent.check_xfer_state(handle)
        if state == "PROC":
            return False
        if state != "DONE":
            raise TransferError(f"NIXL: a transfer is {state}")
        return True

    def release(self, handle: Any) -> None:
        """See `Agent`."""
        lists = self._lists.pop(id(handle))
        self._agent.release_xfer_handle(handle)
        for one in lists:
            self._agent.release_dlist_handle(one)

    def progress(self) -> None:
        """See `Agent`."""
        self._agent.get_new_notifs()

    def withdraw(self) -> None:
        """See `Agent`."""
        self._agent.deregister_memory(self._registered)

    def close(self) -> None:
        """See `Agent`. Its process ends by `os._exit`, which frees the rest: destructors crash."""
        for name, _ in self._peers:
            with contextlib.suppress(Exception):  # the other side may have gone
                self._agent.remove_remote_agent(name)

    @property
    def _base(self) -> int:
        assert self._memory is not None
        return int(self._memory.ctypes.data)
