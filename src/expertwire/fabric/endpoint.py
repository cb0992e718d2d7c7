"""One rank's end of the transport."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from expertwire.errors import InvalidTypeError
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import choose_binding, choose_provider, library_candidates
from expertwire.fabric.lanes import BULK_CHUNK_BYTES, BULK_HOLD_US, BULK_WINDOW, lane_for
from expertwire.fabric.native import Context
from expertwire.fabric.region import Region
from expertwire.fabric.request import Chunk, PreparedRequest, Request, Scope, Signal, Watcher
from expertwire.fabric.stats import Statistics

if TYPE_CHECKING:
    import numpy


REMOTE_REGIONS_MAX = 1 << 20


class Endpoint:
    """Reaches the peers of a job of `size` ranks: one-sided writes and reads, signals that never overtake their data, notifications.

    Every rank makes one, creates or registers its regions, passes `blob()` to the others by whatever means it has, calls `add_peer()` for
    each of them and then `start()`. A context manager; `close()` ends it. Its calls may come from several threads, not from a forked child.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        settings: Settings | None = None,
        *,
        counters: int = 0,
        lanes: int = 1,
        endpoints: int = 1,
        bulk_chunk_bytes: int = BULK_CHUNK_BYTES,
        bulk_window: int = BULK_WINDOW,
        bulk_hold_us: int = BULK_HOLD_US,
        hosts: int = 1,
        heartbeat_ms: int = 1000,
        silence_ms: int = 5000,
        requests_max: int = 4096,
        operations_max: int = 4096,
        regions_max: int = 1024,
        remote_regions_max: int = REMOTE_REGIONS_MAX,
        notifications_max: int = 65_536,
        independent: bool = False,
    ) -> None:
        """`counters`: 64-bit words that peers' signals add to. `lanes`: ordered queue pairs per peer. `hosts`: how many hosts the ranks
        are on (chooses the interface).

        `endpoints`: of the provider, each with connections of its own; lane i is on endpoint i % endpoints. Lanes off the first one are for
        bulk: what goes over them is cut into chunks of `bulk_chunk_bytes`, of which `bulk_window` are in flight at a time on each lane
        (half as many of reads; up to four neighbours are posted as one where nothing small is about), so that a small write on lane 0 does
        not stand behind megabytes. While small work is on its way, to whichever peer, no chunk is begun, and in a stream of it one in
        `bulk_hold_us` microseconds (0: at any time); for 20 ms after it has met bulk a bulk lane has one chunk in flight, and what is
        submitted then is cut half as large. `write()` and `read()` choose the lane by size.

        A peer on another host that has not been heard for `silence_ms` is dead. At most `requests_max` requests are kept, of
        `operations_max` chunks and controls beside those in flight; `regions_max` regions here, and `remote_regions_max` of all peers
        together at one time. Of notifications that have come and were not taken `notifications_max`
        are kept; what comes beyond them is counted (`Statistics.notifications_dropped`) and lost.

        `independent`: the ranks are no job. This endpoint numbers its peers from 1 as it likes (it is 0 itself), learns from each which
        number it has there (`place` of `add_peer()`), knows no barrier, and a peer's death is nobody else's.

        Raises `InvalidArgumentError`, `UnavailableError` (no such provider here), `CapacityError` (no memory).
        """
        self.settings = Settings.from_environment() if settings is None else settings
        self.timeout_ms = self.settings.timeout_ms
        self._remotes: dict[tuple[int, str], int] = {}
        self._watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watcher] = weakref.WeakKeyDictionary()
        provider = choose_provider(self.settings)
        options: dict[str, Any] = {
            "provider": provider,
            "max_outstanding": self.settings.max_outstanding,
            "lanes": lanes,
            "endpoints": endpoints,
            "bulk_chunk_bytes": bulk_chunk_bytes,
            "bulk_window": bulk_window,
            "bulk_hold_us": bulk_hold_us,
            "requests_max": requests_max,
            "operations_max": operations_max,
            "regions_max": regions_max,
            "remote_regions_max": remote_regions_max,
            "notifications_max": notifications_max,
            "independent": independent,
            "counters": counters,
            "timeout_ms": self.settings.timeout_ms,
            "hard_timeout_ms": self.settings.hard_timeout(),
            "heartbeat_ms": heartbeat_ms,
            "silence_ms": silence_ms,
            "sync_writes": self.settings.sync_writes,
            "liveness": self.settings.liveness,
            **self.settings.provider_settings(),
        }
        if provider != "local":
            options["libraries"] = library_candidates(self.settings)
            options["source_address"], options["domain"] = choose_binding(self.settings, provider, hosts)
            options["signal_path"] = self.settings.signal_path
        # In this order: where an endpoint is dropped unclosed, the core ends before the memory that it may still read.
        self.native = Context(rank, size, options)
        self._kept: dict[int, object] = {}
        self.lanes = lanes
        self._endpoints, self._bulk_turn = endpoints, 0
        self.bulk_chunk_bytes, self.operations_max = bulk_chunk_bytes, operations_max
        self.rank = rank
        self.size = size
        self.provider = str(self.native.capabilities["provider"])

    def __repr__(self) -> str:
        return f"Endpoint(rank {self.rank} of {self.size}, {self.provider}{', closed' if self.native.closed else ''})"

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- regions

    def region(self, name: str, nbytes: int) -> Region:
        """Create a shared region of `nbytes` zero bytes. Peers know it by `name` once they have a `blob()` made after this call."""
        return Region(self, self.native.create_region(name, nbytes), name, shared=True)

    def register(self, memory: Any) -> Region:
        """Register the caller's memory: a writable buffer (bytearray, numpy array) or a CPU tensor, contiguous. It is kept alive."""
        address, nbytes = _extent(memory)
        number = self.native.register_region(address, nbytes)
        self._kept[number] = memory
        return Region(self, number, f"#{number}", shared=False)

    def register_address(self, address: int, nbytes: int) -> Region:
        """The same of `nbytes` bytes at an address of this process. Whoever calls keeps the memory until the region is closed."""
        number = self.native.register_region(address, nbytes)
        return Region(self, number, f"#{number}", shared=False)

    def counters(self) -> Region:
        """The 64-bit words that peers' signals add to (`counters=` of the constructor)."""
        return Region(self, self.native.region("counters"), "counters", shared=True)

    # ---- peers

    def blob(self, *, own_only: bool = False) -> bytes:
        """What the other ranks need in order to reach this one. Not secret, not executable.

        `own_only`: without the regions, whose keys (`Region.key()`) go another way, to `announce()`.
        """
        return self.native.blob(own_only)

    def announce(self, rank: int, name: str, nbytes: int, key: bytes) -> int:
        """The peer's region `name` has that size and key; the number under which `prepare_arrays()` knows it. Anew where it changed.

        Raises `InvalidArgumentError` (malformed), `StateError` (no such peer), `TransferError` (it cannot be reached, and why).
        """
        self._remotes.pop((rank, name), None)
        return self.native.announce_region(rank, name, nbytes, key)

    def add_peer(self, rank: int, blob: bytes, place: int | None = None) -> None:
        """Make `rank` reachable. Again with a newer blob: its new regions. After `remove_peer()` it may be another process under that rank.

        `place`: the number that the peer gives this endpoint, of an independent one.

        Who comes back takes the number of the last barrier from the others' blobs, so they have to be made after that barrier.

        Raises `InvalidArgumentError` (rank, malformed blob), `MismatchError` (another version, provider or size), `PeerError` (gone).
        """
        self.native.add_peer(rank, blob, place)
        self._forget(rank)

    def remove_peer(self, rank: int) -> None:
        """End all traffic with `rank`; its requests fail. `add_peer()` may follow.

        Work of it that does not end keeps its memory until the libfabric endpoint that it was posted over is closed. So that endpoint is
        replaced then: the other peers move over by themselves, and `blob()` is another from then on. Every rank should remove a peer that
        one removes: whoever still listens to it would heed what it says of others when it wakes up.

        Raises `StateError` where that cannot be done (a provider without it, `endpoints` above 1, or peers that do not come over in time).
        """
        self.native.remove_peer(rank)
        self._forget(rank)

    def start(self) -> None:
        """Start the progress thread. After every `add_peer()` of the bootstrap."""
        self.native.start()

    def fault(self, peer: int | None = None) -> tuple[int, str] | None:
        """(rank, why) of the first dead peer, the root cause and not its messenger; None while all live.

        `peer`: of what ends requests to that one, which is its own death where peers are independent.
        """
        if peer is not None:
            return self.native.fault_of(peer)
        found = self.native.fault()
        return None if found is None else (found[0], found[2])

    # ---- requests

    def write(
        self,
        peer: int,
        region: Region,
        remote: str,
        nbytes: int | None = None,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        lane: int | None = None,
        signal: Signal | None = None,
        notification: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Request:
        """Write bytes of `region` into the peer's region `remote`; `signal` and `notification` follow once they are there.

        Returns at once, or waits up to `timeout_ms` where the tables are full (then `DeadlineError`, and nothing was taken).
        """
        chunk = self._chunk(region, remote, nbytes, offset, remote_offset, lane)
        return self.submit("write", peer, [chunk], [signal] if signal else [], notification, timeout_ms=timeout_ms)

    def read(
        self,
        peer: int,
        region: Region,
        remote: str,
        nbytes: int | None = None,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        lane: int | None = None,
        signal: Signal | None = None,
        notification: bytes | None = None,
        timeout_ms: int | None = None,
    ) -> Request:
        """Read bytes of the peer's region `remote` into `region`; done when they are here. Otherwise as `write()`."""
        chunk = self._chunk(region, remote, nbytes, offset, remote_offset, lane)
        return self.submit("read", peer, [chunk], [signal] if signal else [], notification, timeout_ms=timeout_ms)

    def signal(self, peer: int, value: int, offset: int = 0, *, remote: str = "counters", scope: Scope = Scope.REQUEST) -> Request:
        """Add `value` to a 64-bit word of the peer, behind what `scope` covers."""
        return self.submit("write", peer, [], [Signal(value, offset, remote, scope)])

    def notify(self, peer: int, payload: bytes) -> Request:
        """Send a message that the peer takes by `notifications()`. The limit is `capabilities["notification_bytes_max"]`."""
        return self.submit("write", peer, [], [], payload)

    def submit(
        self,
        kind: str,
        peer: int,
        chunks: Sequence[Chunk],
        signals: Sequence[Signal] = (),
        notification: bytes | None = None,
        *,
        delivered: bool = True,
        timeout_ms: int | None = None,
    ) -> Request:
        """One request of many chunks (`kind`: "write" or "read"), which ends once, when all of it has.

        `delivered=False` lets it end when the local bytes may be reused, where the provider tells. Raises `InvalidArgumentError`,
        `DeadlineError` (full for `timeout_ms`), `PeerError`, `TransferError` (a latched error of the lane), `StateError`.
        """
        for chunk in chunks:
            chunk.region.require_open()
        native = self.native.submit(
            peer,
            kind,
            [(c.region.number, c.offset, self._remote(peer, c.remote), c.remote_offset, c.nbytes, c.lane) for c in chunks],
            [(self._remote(peer, s.remote), s.offset, s.value % 2**64, s.scope, s.lane) for s in signals],
            notification,
            delivered,
            self.timeout_ms if timeout_ms is None else timeout_ms,
        )
        return Request(self, native, kind if chunks else "signal")

    def write_many(
        self,
        peer: int,
        region: Region,
        remote: str,
        nbytes: int,
        offsets: numpy.ndarray[Any, Any],
        remote_offsets: numpy.ndarray[Any, Any],
        *,
        lane: int = 0,
        timeout_ms: int | None = None,
    ) -> Request:
        """One request of many writes of `nbytes` bytes each: write i goes from `offsets[i]` of `region` to `remote_offsets[i]`.

        Offsets are uint64 arrays of one length, in bytes. The whole batch crosses into the core at once; it ends once all of it is there.
        Waits and raises as `submit()`; `InvalidArgumentError` where a range does not lie within its region.
        """
        region.require_open()
        limit = self.timeout_ms if timeout_ms is None else timeout_ms
        target = self._remote(peer, remote)
        native = self.native.submit_batch(peer, "write", region.number, target, nbytes, offsets, remote_offsets, lane, limit)
        return Request(self, native, "write")

    def prepare_arrays(
        self,
        kind: str,
        peer: int,
        locals_: numpy.ndarray[Any, Any],
        offsets: numpy.ndarray[Any, Any],
        remotes: numpy.ndarray[Any, Any],
        remote_offsets: numpy.ndarray[Any, Any],
        lengths: numpy.ndarray[Any, Any],
        *,
        lane: int = 0,
    ) -> PreparedRequest:
        """A request of N chunks of any regions and sizes, which crosses into the core at once, to be submitted as often as one likes.

        Chunk i is `lengths[i]` bytes between `offsets[i]` of region number `locals_[i]` and `remote_offsets[i]` of the peer's region
        `remotes[i]` (a number that `announce()` gave). uint32 [N] the regions, uint64 [N] the rest. `InvalidArgumentError` where a range is
        not in its region.
        """
        native = self.native.prepare_arrays(peer, kind, locals_, offsets, remotes, remote_offsets, lengths, lane)
        return PreparedRequest(self, native, kind, peer)

    # ---- waits

    def wait_counter(self, index: int, at_least: int, timeout_ms: int | None = None) -> bool:
        """Until counter `index` is at least `at_least`; False when the deadline passed. Raises `PeerError`."""
        limit = self.timeout_ms if timeout_ms is None else timeout_ms
        return self.native.wait_word(self.native.region("counters"), 8 * index, at_least, limit)

    def notifications(self) -> list[tuple[int, bytes]]:
        """(rank, payload) of what has arrived, in order; each once."""
        return self.native.take_notifications()

    def quiet(self, timeout_ms: int | None = None) -> None:
        """Until everything submitted before this call has ended. Raises `DeadlineError`, `TransferError` (one failed), `PeerError`."""
        self.native.quiet(self.timeout_ms if timeout_ms is None else timeout_ms)

    def barrier(self, timeout_ms: int | None = None) -> None:
        """Until every rank is here and what each sent before is there. Raises `DeadlineError` naming who is missing, `PeerError`."""
        self.native.barrier(self.timeout_ms if timeout_ms is None else timeout_ms)

    # ---- the end

    def statistics(self) -> Statistics:
        """A snapshot of everything that is counted."""
        return Statistics.from_native(self.native.statistics())

    def close(self, timeout_ms: int = 2000) -> None:
        """Let what was submitted end for at most `timeout_ms`, tell the peers, release everything. Idempotent."""
        self.native.close(timeout_ms)

    def watcher(self) -> Watcher:
        """What wakes the running event loop's tasks."""
        loop = asyncio.get_running_loop()
        found = self._watchers.get(loop)
        if found is None:
            found = self._watchers[loop] = Watcher(self, loop)
        return found

    def _chunk(self, region: Region, remote: str, nbytes: int | None, offset: int, remote_offset: int, lane: int | None) -> Chunk:
        size = region.bytes - offset if nbytes is None else nbytes
        if lane is None:
            lane = lane_for(size, self.lanes, self._endpoints, self._bulk_turn)
            self._bulk_turn += lane > 0
        return Chunk(region, remote, size, offset, remote_offset, lane)

    def _remote(self, peer: int, name: str) -> int:
        found = self._remotes.get((peer, name))
        if found is None:
            found = self._remotes[peer, name] = self.native.remote_region(peer, name)
        return found

    def let_go(self, region: int) -> None:
        """The region is deregistered: its memory may go."""
        self._kept.pop(region, None)

    def _forget(self, rank: int) -> None:
        self._remotes = {key: value for key, value in self._remotes.items() if key[0] != rank}


def _extent(memory: Any) -> tuple[int, int]:
    if hasattr(memory, "data_ptr"):  # a tensor, without importing torch
        if not memory.is_contiguous() or memory.device.type != "cpu":
            raise InvalidTypeError(f"memory is a tensor on {memory.device} of strides {memory.stride()}; it must be contiguous, on the CPU")
        return int(memory.data_ptr()), int(memory.numel() * memory.element_size())
    import ctypes

    try:
        view = memoryview(memory)
    except TypeError:
        raise InvalidTypeError(f"memory is a {type(memory).__name__}; it must be a CPU tensor or have the buffer protocol") from None
    if view.readonly or not view.c_contiguous:
        raise InvalidTypeError("memory must be writable and contiguous")
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view.cast("B") if view.nbytes else view)), view.nbytes
