"""What callers import from `nixl._api`: the agent, its configuration and its handles, made of `expertwire.transfer`."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from expertwire.compat.nixl._bindings import (
    DEFAULT_COMM_PORT,
    NIXL_INIT_AGENT,
    NIXL_READ,
    NIXL_WRITE,
    SEGMENT_OF,
    as_nixl,
    nixl_mem_t,
    nixl_thread_sync_t,
    nixlRegDList,
    nixlXferDList,
    nixlXferTelemetry,
    translated,
)
from expertwire.errors import ExpertwireError, InvalidArgumentError, NoTelemetryError, NotFoundError, UnavailableError
from expertwire.fabric.config import Settings
from expertwire.transfer import (
    Agent,
    Descriptors,
    Directory,
    MetadataStore,
    Prepared,
    Telemetry,
    TextFile,
    Transfer,
    TransferState,
    metadata,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

LOCAL = ("", "NIXL_INIT_AGENT", NIXL_INIT_AGENT)
PLUGINS = ("UCX", "LIBFABRIC", "EXPERTWIRE")  # what callers look for in the list; any other name is taken as well
HOST_SEGMENTS = ["DRAM_SEG"]
ACTIVE = TransferState.ACTIVE


class nixl_agent_config:
    """How an agent is to be. Also attributes; `listen_token` and `store` are ours."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
        *,
        listen_token: str | bytes = b"",
        store: Any = None,
    ) -> None:
        """Args:

            enable_prog_thread, num_threads, sync_mode: taken and not looked at; there is one progress thread, and any thread may call.
            enable_listen_thread, listen_port: take metadata by socket; port 0: the system chooses, `get_listen_port()` says which.
            capture_telemetry: measure each transfer for `get_xfer_telemetry`.
            backends: any names; all mean Expertwire, and `EXPERTWIRE_PROVIDER` says over what.
            listen_token: both sides of metadata by socket must have the same; it does not cross the wire.
            store: of metadata without an address: a `torch.distributed.TCPStore`, or anything with its `set`, `get` and `check`.

        Raises:
            TypeError: `sync_mode` is no `nixl_thread_sync_t`.
        """
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode is a {type(sync_mode).__name__}; it must be a nixl_thread_sync_t or None")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
        self.listen_token = listen_token.encode() if isinstance(listen_token, str) else bytes(listen_token)
        self.store = store


class nixl_prepped_dlist_handle:
    """A prepared list of descriptors."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    @translated
    def release(self) -> None:
        """Again: nothing. Transfers made of it go on without it."""
        self._prepared.release()


class nixl_xfer_handle:
    """A transfer, which can be posted again and again."""

    def __init__(self, transfer: Transfer, backend: str, telemetry: Telemetry) -> None:
        self._transfer, self._backend, self._telemetry = transfer, backend, telemetry
        self._counted = True  # whether what became of the last post has been counted

    @property
    def stalled(self) -> bool:
        """Ours: it is on its way for longer than `EXPERTWIRE_TIMEOUT_MS`, and still owns its memory."""
        return self._transfer.stalled

    @translated
    def release(self) -> None:
        """Again: nothing. Raises `nixlRepostActiveError` while what was posted cannot be cancelled; the handle stays valid then."""
        self._count(self._transfer.state(), None)
        self._transfer.release()

    def _count(self, state: TransferState, error: ExpertwireError | None) -> None:
        """Once a post, what became of it."""
        if self._counted or state is ACTIVE:
            return
        self._counted = True
        if error is not None:
            self._telemetry.failed(self._transfer.operation, error)
        elif state is TransferState.DONE:
            self._telemetry.ended(self._transfer)


class nixl_agent:
    """NIXL's agent over `expertwire.transfer.Agent`. `docs/nixl.md` says of each call what it is here."""

    @translated
    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False) -> None:
        """Raises `ValueError` for an empty name."""
        if not agent_name:
            raise ValueError("an agent has a name, and this one's is empty; others find it by its name")
        config = nixl_conf or nixl_agent_config()
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.plugin_list = list(PLUGINS)
        self.backends: dict[str, str] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.nixl_mems = {**SEGMENT_OF, "cpu": nixl_mem_t.DRAM_SEG, "cuda": nixl_mem_t.VRAM_SEG}
        self.nixl_ops = {"WRITE": NIXL_WRITE, "READ": NIXL_READ}
        self._capture = config.capture_telemetry
        self._held = threading.Lock()  # of `notifs`
        store = None if config.store is None else MetadataStore(config.store)
        self._agent = Agent(agent_name)
        self._telemetry = Telemetry(agent_name)
        self._directory = Directory(self._agent, store=store, token=config.listen_token)
        self._file: TextFile | None = None
        try:
            if folder := Settings.read("telemetry_folder"):
                self._file = TextFile(folder, agent_name, self._telemetry.prometheus)
            for backend in PLUGINS if instantiate_all and nixl_conf is None else config.backends:
                self.create_backend(backend)
            if config.enable_listen:
                self._directory.listen(self._hosts(), config.port)
        except BaseException:
            self._end_file()
            self._agent.close()
            raise

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def _hosts(self) -> list[str]:
        """Where to listen for metadata: where the agent itself is reached, and the loopback, which nobody else reaches."""
        door = self._agent.card().door
        return [*([door.host] if door else []), "127.0.0.1"]

    @translated
    def close(self) -> None:
        """Ours: end it now, and not when it is collected. Again: nothing."""
        self._directory.close()
        self._end_file()
        self._agent.close()

    def __enter__(self) -> nixl_agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then no thread ends any more, and none is waited for
            with contextlib.suppress(Exception):  # not made whole, or in a forked child
                self._directory.close()
                self._end_file()
                self._agent.close(0)

    # Backends: names, all of which mean the same.

    def get_plugin_list(self) -> list[str]:
        """Names of backends that callers look for."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Kinds of memory of a backend; none of an unknown one."""
        return list(HOST_SEGMENTS) if backend in PLUGINS else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """What a backend can be told; nothing. It is told by `EXPERTWIRE_*`."""
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Kinds of memory of a backend that was created."""
        return list(self.backend_mems.get(backend, []))

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """What a backend was created with, and what it is."""
        return dict(self.backend_options.get(backend, {}))

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Take a name as a backend's. What is in `initParams` is kept and not looked at."""
        self.backends[backend] = backend
        self.backend_mems[backend] = list(HOST_SEGMENTS)
        self.backend_options[backend] = {**(initParams or {}), "engine": "expertwire", "provider": self._agent.provider}

    # Memory.

    @translated
    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """Memory to register, from tuples, an array N × 3, one or several tensors, or such a list. Raises `nixlInvalidParamError`."""
        return descs if isinstance(descs, nixlRegDList) else nixlRegDList.of(_descriptors(descs, mem_type))

    @translated
    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """A list of pieces to move, from the same. Raises `nixlInvalidParamError`."""
        return descs if isinstance(descs, nixlXferDList) else nixlXferDList.of(_descriptors(descs, mem_type))

    @translated
    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()) -> nixlRegDList:
        """Let others reach that memory, and this agent's transfers use it; the list is what `deregister_memory` takes.

        Raises `nixlInvalidParamError`, `nixlNotSupportedError` (no host memory), `nixlBackendError` (no room for more).
        """
        found = self.get_reg_descs(reg_list, mem_type)
        self._agent.register(found.descriptors())
        return found

    @translated
    def deregister_memory(self, dereg_list: Any, backends: Sequence[str] = ()) -> None:
        """Take it back: from here on nobody reaches it. Raises `nixlNotFoundError`, and `nixlBackendError` while somebody is at it."""
        self._agent.deregister(_descriptors(dereg_list, None))

    @translated
    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Of each piece of host memory its size, if this agent has registered it, else None. Other kinds: `nixlNotSupportedError`."""
        if mem_type not in (None, "DRAM", "cpu"):
            raise UnavailableError(
                f"{mem_type} memory cannot be asked about with backend {backend!r}: Expertwire moves host memory, no files"
            )
        found = _descriptors(reg_list, mem_type)
        there = self._agent.registered(found)
        return [{"size": str(nbytes)} if known else None for known, (_, nbytes, _) in zip(there, found.rows(), strict=True)]

    # Transfers.

    @translated
    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Pieces of one side, of which transfers are made by index: "" or "NIXL_INIT_AGENT" is this side, the own name a loopback's other.

        Raises `nixlNotFoundError` of an unknown agent, and of memory that is not registered there.
        """
        name = _text(agent_name)
        return nixl_prepped_dlist_handle(self._agent.prepare("" if name in LOCAL else name, _descriptors(xfer_list, mem_type)))

    @translated
    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Again: nothing."""
        handle.release()

    @translated
    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer of those pieces, not posted yet. Neighbours are merged unless told otherwise. Raises `nixlInvalidParamError`."""
        transfer = self._agent.make(
            _operation(operation),
            local_xfer_side._prepared,
            local_indices,
            remote_xfer_side._prepared,
            remote_indices,
            _bytes(notif_msg),
            merge=not skip_desc_merge,
        )
        return nixl_xfer_handle(transfer, self._backend_of(backends), self._telemetry)

    @translated
    def initialize_xfer(
        self,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """The same of two whole lists. Raises `nixlInvalidParamError` where they do not pair, `nixlNotFoundError`."""
        transfer = self._agent.initialize(
            _operation(operation), _descriptors(local_descs, None), _descriptors(remote_descs, None), _text(remote_agent), _bytes(notif_msg)
        )
        return nixl_xfer_handle(transfer, self._backend_of(backends), self._telemetry)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Post it: "PROC", or "DONE" where it was that short. Its notification leaves behind its data; an empty one keeps the earlier one.

        Raises `nixlRepostActiveError` while it is on its way, `nixlRemoteDisconnectError`, `nixlBackendError` (no room by the deadline).
        """
        transfer = handle._transfer
        try:
            state = self._agent.post(transfer, _bytes(notif_msg))
        except ExpertwireError as error:
            raise as_nixl(error) from error
        handle._counted = False
        self._telemetry.posted(transfer.operation)
        return "PROC" if state is ACTIVE else self.check_xfer_state(handle)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "DONE": delivered. "PROC": on its way, and owns its memory. A failure is raised, never returned, until it is posted again.

        Raises `nixlNotPostedError` before a post, and `nixlRemoteDisconnectError`, `nixlBackendError`, `nixlCancelledError`, after which
        its memory is the caller's again.
        """
        try:
            state = handle._transfer.check()
        except ExpertwireError as error:
            handle._count(handle._transfer.state(), error)
            raise as_nixl(error) from error
        if state is ACTIVE:
            return "PROC"
        if not handle._counted:
            handle._count(state, None)
        return "DONE"

    @translated
    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """As `handle.release()`."""
        handle.release()

    @translated
    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """What the last post took, once it is "DONE". Raises `nixlNoTelemetryError` before, and where `capture_telemetry` is off."""
        transfer = handle._transfer
        if not self._capture:
            raise NoTelemetryError("transfers are not measured: make the agent with nixl_agent_config(capture_telemetry=True)")
        if transfer.state() is not TransferState.DONE or transfer.ended_ns is None:
            raise NoTelemetryError(f"the transfer is {transfer.state().value}; what it took is known once check_xfer_state says DONE")
        return nixlXferTelemetry(
            transfer.start_wall_ns // 1000,
            max(1, transfer.post_duration_ns // 1000),
            max(1, (transfer.ended_ns - transfer.posted_ns) // 1000),
            transfer.nbytes,
            transfer.run_count,
        )

    @translated
    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """(µs, margin in µs, "UNKNOWN") from recent transfers, to whomever. Raises `nixlNotSupportedError` before the first has ended."""
        found = self._telemetry.estimate_us(req_handle._transfer.nbytes)
        if found is None:
            raise UnavailableError("no transfer of this agent has ended yet, and estimates are made from those that have")
        return (*found, "UNKNOWN")

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The backend's name that the transfer was made with."""
        return handle._backend

    # Notifications.

    @translated
    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What has come since the last call, by sender, in each sender's order. From several threads each notification is given once."""
        found = self._agent.notifications()
        self._telemetry.notified(received=sum(map(len, found.values())))
        return found

    @translated
    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Add what has come to `notifs`, which is the caller's to empty."""
        with self._held:
            for name, came in self.get_new_notifs().items():
                self.notifs.setdefault(name, []).extend(came)
            return self.notifs

    @translated
    def check_remote_xfer_done(
        self, remote_agent_name: str | bytes, lookup_tag: bytes | str, backends: Sequence[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        """Whether a notification from that agent begins with the tag, or holds it; that one is then taken out of `notifs`."""
        tag = _bytes(lookup_tag)
        self.update_notifs()
        with self._held:
            there = self.notifs.get(_text(remote_agent_name), [])
            for index, came in enumerate(there):
                if came.startswith(tag) if tag_is_prefix else tag in came:
                    del there[index]
                    return True
        return False

    @translated
    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Any bytes, in order; also none. Raises `nixlNotFoundError`, `nixlRemoteDisconnectError`, `nixlInvalidParamError` (too long)."""
        self._agent.notify(_text(remote_agent_name), _bytes(notif_msg))
        self._telemetry.notified(sent=1)

    # Metadata.

    @translated
    def get_agent_metadata(self) -> bytes:
        """A snapshot: who this is, how to reach it, and all memory that is registered now."""
        return metadata.encode(self._agent.card())

    @translated
    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool = False, backends: Sequence[str] = ()) -> bytes:
        """The same of those pieces alone, which may be none, and how to reach it only if asked. Raises `nixlNotFoundError`."""
        return metadata.encode(self._agent.card(_descriptors(descs, "DRAM"), connection=inc_conn_info))

    @translated
    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Know an agent by its metadata; its name, as bytes. Again is fine, and adds what is new.

        Raises `nixlMismatchError` (no metadata, or another provider), `nixlInvalidParamError` (its own), `nixlNotAllowedError` (another
        process is known by this name: remove it first), `nixlRemoteDisconnectError`.
        """
        return self._directory.add(metadata).encode()

    @translated
    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forget an agent. Raises `nixlNotFoundError`."""
        self._directory.remove(_text(agent))

    @translated
    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """Be connected to that agent when this returns. Raises `nixlNotFoundError`, `nixlRemoteDisconnectError`."""
        self._agent.connect(_text(remote_agent))

    @translated
    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Give all of it to the agent that listens there, which knows this one when this returns; without an address, into the store.

        Raises `nixlRemoteDisconnectError` (nobody listens), `nixlNotAllowedError` (another token, or refused there),
        `nixlNotSupportedError` (no store), `nixlBackendError` (not in time).
        """
        self._directory.send(self._agent.card(), ip_addr, port)

    @translated
    def send_partial_agent_metadata(
        self,
        descs: Any,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """The same of `get_partial_agent_metadata`; in the store under a label, of which an agent may have many."""
        self._directory.send(self._agent.card(_descriptors(descs, "DRAM"), connection=inc_conn_info), ip_addr, port, label)

    @translated
    def fetch_remote_metadata(self, remote_agent: str | bytes, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = "") -> None:
        """Know that agent when this returns, from its listener, or the store, which are waited for.

        Raises as `send_local_metadata` does, `nixlNotFoundError` (not in the store by the deadline), `nixlMismatchError` (another agent).
        """
        self._directory.fetch(_text(remote_agent), ip_addr, port, "" if ip_addr else label)

    @translated
    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Be forgotten by the agent that listens there; without an address, by the store. Raises as `send_local_metadata` does."""
        self._directory.withdraw(ip_addr, port)

    @translated
    def check_remote_metadata(self, agent: str | bytes, descs: Any = None) -> bool:
        """Whether that agent is known, with all those pieces of its memory."""
        return self._directory.check(_text(agent), None if descs is None else _descriptors(descs, None))

    @translated
    def get_listen_port(self) -> int:
        """Where it listens for metadata. Raises `nixlUnknownError` where it does not."""
        return self._directory.port

    @translated
    def get_serialized_descs(self, descs: Any) -> bytes:
        """A list as bytes."""
        return (b"R" if isinstance(descs, nixlRegDList) else b"X") + metadata.encode_descriptors(_descriptors(descs, None))

    @translated
    def deserialize_descs(self, serialized_descs: bytes) -> nixlXferDList | nixlRegDList:
        """The list again. Never a pickle, so nothing of a peer's is run. Raises `nixlMismatchError`."""
        kinds = {b"R": nixlRegDList, b"X": nixlXferDList}
        made = kinds.get(bytes(serialized_descs[:1]), nixlXferDList)
        rest = serialized_descs[1:] if bytes(serialized_descs[:1]) in kinds else serialized_descs
        return made.of(metadata.decode_descriptors(rest))  # type: ignore[no-any-return]

    # What there is not.

    @translated
    def prep_mem_view(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a view is for kernels on a GPU that start transfers themselves. Raises `nixlNotSupportedError`."""
        raise UnavailableError("memory views are for GPU kernels that start transfers themselves; transfers are started by the host here")

    @translated
    def release_mem_view(self, *_: Any, **__: Any) -> NoReturn:
        """Refused likewise: there are none."""
        raise UnavailableError("there are no memory views here, so there is none to release")

    @translated
    def prometheus(self) -> str:
        """Ours: all counters of this agent as Prometheus text."""
        return self._telemetry.prometheus()

    def _backend_of(self, backends: Sequence[str]) -> str:
        return next(iter((*backends, *self.backends)), PLUGINS[-1])


def _descriptors(given: Any, mem_type: str | None) -> Descriptors:
    """Of one of our lists, or of what a list can be made of."""
    if isinstance(given, nixlRegDList):
        return given.descriptors()
    return given.descriptors() if isinstance(given, nixlXferDList) else Descriptors.of(given, mem_type)


def _operation(given: str) -> str:
    if given not in ("READ", "WRITE"):
        raise InvalidArgumentError(f"operation {given!r} is not known; it is 'READ' or 'WRITE'")
    return given


def _text(name: str | bytes) -> str:
    """A name, which callers have as bytes from `add_remote_agent`."""
    if isinstance(name, str):
        return name
    if not isinstance(name, bytes | bytearray):
        raise InvalidArgumentError(f"an agent's name is a {type(name).__name__}; it must be a string or bytes")
    try:
        return bytes(name).decode()
    except UnicodeDecodeError:
        raise NotFoundError(f"agent {bytes(name)!r} is not known; names are UTF-8") from None


def _bytes(payload: bytes | str) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidArgumentError(f"a notification is a {type(payload).__name__}; it must be bytes or a string")
    return bytes(payload)
