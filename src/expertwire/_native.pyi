"""
Expertwire's native core. Use expertwire.fabric and expertwire.ep; this module's names may change.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Request:
    """
    One logical request. Dropping it gives the handle up, never the memory it still uses.
    """

    def status(self) -> int:
        """
        One local load (SPEC T13): 0 ok, 1 pending, else the number of the failure (Context.status_name).
        """

    def turn(self) -> int:
        """Help the engine for at most 20 us if nobody does, then status()."""

    def wait(self, timeout_ms: int) -> int:
        """
        The terminal status, or 1 (pending) when the deadline passed: the request then still owns its memory.
        """

    def cancel(self) -> int:
        """
        0: cancelled before anything was posted. 'refused': posted work is still owned; the handle stays valid.
        """

    def stalled(self) -> bool:
        """True once a wait for it has passed its deadline (a flag, not a state)."""

    def code(self) -> int:
        """The provider's own error number behind a failure, or 0."""

    def release(self) -> None:
        """
        Give the handle up now; what it owns is freed once it is terminal. Idempotent.
        """

    @property
    def rank(self) -> int:
        """The peer."""

class PreparedRequest:
    """
    A request whose chunks have been checked, submitted as often as one likes, one at a time.
    Dropping it gives the handle up, never the memory it still uses.
    """

    def submit(self, notification: bytes | None, timeout_ms: int, later: bool) -> int | None:
        """
        Once more; status(), or None where it is on its way or was released. notification: bytes or None, sent once all
        of it is there. later: nothing is posted by this call. Chunks are checked again where regions or peers have
        changed. Otherwise as Context.submit().
        """

    def status(self) -> int:
        """
        0 ok, 1 pending, -1 never submitted, -2 released, else the number of its failure (Context.status_name).
        """

    def turn(self) -> int:
        """Help the engine for at most 20 us if nobody does, then status()."""

    def wait(self, timeout_ms: int) -> int:
        """
        status() once it has ended, or 1 when the deadline passed: it then still owns its memory.
        """

    def cancel(self) -> None:
        """Of what is on its way, where nothing of it was posted; else nothing."""

    def release(self) -> bool:
        """It will not be submitted again. False: it is on its way."""

    @property
    def code(self) -> int:
        """The provider's number behind its failure, or 0."""

    @property
    def times(self) -> tuple[int, int, int, int]:
        """
        In ns: when its submission began (CLOCK_MONOTONIC), how long that took, the same of CLOCK_REALTIME, and when its
        end was seen (0: not yet).
        """

def status_name(status: int) -> str:
    """The word for a status number."""

def live_objects() -> dict:
    """
    dict[str, int]: how many objects of each kind are alive in this process; for tests.
    """

class Context:
    """
    One transport instance: provider, engine, regions, peers, one progress thread.
    """

    def __init__(self, rank: int, size: int, options: dict) -> None:
        """
        options (all optional): provider 'local' or libfabric's name, libraries list[str], source_address, domain,
        signal_path ('auto', 'atomic', 'message'), delivery_complete ('auto', '1', '0'), trust_order, trust_immediates, rendezvous,
        ordering ('auto', 'gated', 'counted'), max_outstanding, lanes, requests_max, counters, timeout_ms, hard_timeout_ms, heartbeat_ms, silence_ms, sync_writes,
        liveness ('auto', 'heartbeat'), endpoints, bulk_chunk_bytes, bulk_window, bulk_hold_us, operations_max, regions_max, remote_regions_max, notifications_max,
        independent (peers are no job: each numbers the others as it likes).
        Raises InvalidArgumentError, UnavailableError (no such provider here), CapacityError.
        """

    def create_region(self, name: str, bytes: int) -> int:
        """
        A shared region of `bytes` zero bytes (memfd, preallocated), registered with the provider; its number.
        Raises InvalidArgumentError (name taken, 0 bytes), CapacityError (no memory: call, bytes, errno).
        """

    def register_region(self, address: int, bytes: int) -> int:
        """
        Register the caller's memory, announced to peers as '#<number>'; its number.
        """

    def deregister_region(self, region: int, timeout_ms: int) -> None:
        """
        Raises StateError while a request uses the region (after waiting up to timeout_ms).
        """

    def region(self, name: str) -> int:
        """The number of the region of that name."""

    def region_address(self, region: int) -> int:
        """Its first byte's address in this process."""

    def region_bytes(self, region: int) -> int:
        """Its size."""

    def region_key(self, region: int) -> bytes:
        """
        What announce_region() of a peer takes; b'' where no peer can reach it.
        """

    def region_fd(self, region: int) -> int:
        """
        Its descriptor, borrowed (-1: the caller's memory). Pass it to node peers, do not close it.
        """

    def region_names(self) -> list[str]:
        """
        Names of the shared regions, 'runtime' first: node peers map each of them.
        """

    def blob(self, own_only: bool = False) -> bytes:
        """
        What the bootstrap carries to every rank: address, regions with keys, pid and start time. Versioned, binary.
        own_only: without the users' regions, which region_key() and announce_region() carry.
        """

    def add_peer(self, rank: int, blob: bytes, place: int | None = None) -> None:
        """
        Make the rank reachable and watch whether it lives. Again with a newer blob of the same process: adds regions.
        place: of an independent context, the number that the peer gives it.
        Raises InvalidArgumentError (rank, malformed blob), MismatchError (version, rank, size, provider).
        """

    def announce_region(self, rank: int, name: str, bytes: int, key: bytes) -> int:
        """
        The peer's region of that name has that size and key (its region_key()); the number under which submit() knows it.
        """

    def remove_peer(self, rank: int) -> None:
        """Its requests fail, its lanes close; add_peer may follow."""

    def map_peer(self, rank: int, region: str, fd: int) -> None:
        """
        Map a node peer's region of that name; the descriptor is only borrowed. Map 'runtime' too: its doorbell is there.
        """

    def peer_address(self, rank: int, region: str) -> int:
        """Where it is mapped here; 0 if it is not."""

    def remote_region(self, rank: int, region: str) -> int:
        """The number under which submit() knows a peer's region."""

    def remote_region_bytes(self, rank: int, region: str) -> int:
        """The size that the peer announced."""

    def start(self) -> None:
        """Start the progress thread. Once."""

    def close(self, timeout_ms: int = 2000) -> None:
        """
        Drain for at most timeout_ms, tell the peers that this rank leaves, stop and release everything. Idempotent.
        """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def submit(self, rank: int, kind: str, chunks: Sequence[tuple[int, int, int, int, int, int]], signals: Sequence[tuple[int, int, int, int, int]], notification: bytes | None, delivered: bool, timeout_ms: int) -> Request:
        """
        One logical request. kind: 'write' or 'read'; chunks: [(local region, offset, remote region, offset, bytes, lane)];
        signals: [(remote region, byte offset (8-aligned), value added, scope 0 request|1 queue pair|2 peer, lane)], sent once
        what they cover is there; notification: bytes or None, likewise. Full: waits up to timeout_ms, then DeadlineError.
        """

    def submit_batch(self, rank: int, kind: str, local: int, remote: int, bytes: int, offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], remote_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lane: int, timeout_ms: int) -> Request:
        """
        One logical request of many chunks of the same size, from arrays: chunk i is `bytes` bytes between local region
        `local` at offsets[i] and remote region `remote` at remote_offsets[i] (uint64, one dimension). Otherwise as submit().
        """

    def prepare_arrays(self, rank: int, kind: str, locals: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], remotes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], remote_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lane: int) -> PreparedRequest:
        """
        A request of many chunks, from arrays of one length, to be submitted later and often: chunk i is bytes[i] bytes (uint64)
        between offsets[i] (uint64) of local region locals[i] (uint32) and remote_offsets[i] of remote region remotes[i].
        """

    def quiet(self, timeout_ms: int) -> None:
        """
        Wait until everything submitted before the call is terminal; later submissions do not extend it.
        Raises DeadlineError with what is still unfinished.
        """

    def barrier(self, timeout_ms: int) -> None:
        """
        All ranks have arrived, and what each sent to this rank before its barrier is here.
        Raises DeadlineError naming the ranks that have not arrived, PeerError.
        """

    def wait_word(self, region: int, offset: int, at_least: int, timeout_ms: int) -> bool:
        """
        Wait until the 64-bit word of one of my regions is >= at_least; False when the deadline passed. Raises PeerError.
        """

    def turn(self) -> bool:
        """One turn of at most 20 us if the token is free."""

    def step_aside(self) -> None:
        """
        A caller that has taken turns is about to sleep elsewhere: the progress thread takes over at once.
        """

    def ring(self, rank: int) -> None:
        """Ring a mapped rank's doorbell after storing into its memory."""

    def doorbell_seen(self) -> int:
        """The count for doorbell_wait()."""

    def doorbell_wait(self, seen: int, timeout_ms: int) -> bool:
        """
        Sleep until my doorbell has rung since `seen`; False when the deadline passed.
        """

    def watch_open(self) -> int:
        """
        A descriptor that becomes readable when something completed; for event loops. Ends with watch_close().
        """

    def watch_close(self, fd: int) -> None:
        """Close a watch. Idempotent."""

    def fault(self) -> tuple[int, int, str] | None:
        """
        None, or (rank at fault, rank that told or -1, why): the first dead peer, root cause first.
        """

    def fault_of(self, rank: int) -> tuple[int, str] | None:
        """
        None, or (rank at fault, why) of what ends requests to that peer: the root cause among ranks of a job, its own death else.
        """

    def pulse(self, rank: int) -> tuple[int, int, int, int, bool]:
        """
        (heartbeats, call sequence, phase, ns since the last heartbeat, leaving) as last heard.
        """

    def publish_call(self, sequence: int, phase: int) -> None:
        """What my pulse tells the others about where I am."""

    def publish_verdict(self, rank: int) -> None:
        """
        Tell every live peer whom I hold dead, before raising PeerError; takes <= 500 ms.
        """

    def take_notifications(self) -> list:
        """list[(rank, bytes)] in order of arrival; each is given once."""

    def statistics(self) -> dict:
        """
        dict[str, int] of counters, a snapshot; fabric.stats.Statistics gives them names and types.
        """

    @property
    def capabilities(self) -> dict:
        """dict of what the provider promises (csrc/provider/capabilities.hpp)."""

    def publish_low_latency(self, call: int, told: Sequence[int]) -> None:
        """
        What my pulse tells of low-latency calls, to each rank a word of its own.
        """

    def low_latency_told(self, rank: int) -> int:
        """
        The word of low-latency calls that this rank has for me, as last heard.
        """

def library_facts(candidates: Sequence[str]) -> dict:
    """
    Load the best libfabric.so.1 among `candidates` (paths). Returns {found, path, version, message, tried}; never raises.
    """

def provider_facts(candidates: Sequence[str], settings: dict) -> list:
    """
    What fi_getinfo offers with the hints that the core uses, one dict per provider and domain; [] without a library.
    """

def provider_table() -> list:
    """
    What is known of each provider beside what getinfo grants, with its source: one dict per provider.
    """

def gate_facts(granted: dict, settings: dict) -> dict:
    """
    Ordering class and gate policy for what a getinfo grants (pure): {ordering, safe, why, delivery_complete, refused}.
    """

class ProbeWindow:
    """What `ProviderProbe.write_window` did."""

    @property
    def seconds(self) -> float: ...

    @property
    def completed(self) -> int: ...

    @property
    def again(self) -> int: ...

    @property
    def status(self) -> str: ...

class ProviderProbe:
    """
    One provider with nothing above it, for its tests and for raw figures. Single-threaded.
    """

    def __init__(self, kind: str, options: dict) -> None: ...

    def capabilities(self) -> dict: ...

    def counters(self) -> dict: ...

    def create_region(self, id: int, bytes: int, remote_write: bool = True, remote_read: bool = True, mappable: bool = True) -> int:
        """A memfd region of the probe's own; returns its address."""

    def deregister_region(self, id: int) -> bool: ...

    def address(self, endpoint: int = 0) -> bytes: ...

    def region_key(self, id: int) -> bytes: ...

    def add_peer(self, peer: int, address: bytes) -> None: ...

    def fence_peer(self, arg: int, /) -> None: ...

    def expect_nothing_of(self, arg: int, /) -> None: ...

    def remove_peer(self, peer: int) -> None: ...

    def add_remote_region(self, peer: int, id: int, key: bytes) -> None: ...

    def post(self, kind: str, slot: int, peer: int, local: int = 0, local_offset: int = 0, remote: int = 0, remote_offset: int = 0, bytes: int = 0, operand: int = 0, payload: bytes = ..., endpoint: int = 0, delivered: bool = True, generation: int = 1, counted: int = 0) -> tuple:
        """
        Returns (outcome, status, code). `counted`, not 0: the request whose writes and signal the target counts. A notification's payload must outlive its completion.
        """

    def poll(self, completions_max: int = 64) -> tuple:
        """([(slot, generation, status, code)], [(peer, payload)])"""

    def sleep(self, timeout_ms: int) -> bool: ...

    def serve_until(self, address: int, value: int, timeout_ms: int, sleeping: bool = True) -> bool: ...

    def write_window(self, kind: str, peer: int, local: int, remote: int, bytes: int, window: int, count: int, delivered: bool = True, timeout_ms: int = 10000, signal: bool = False, signal_remote: int = 0, signal_offset: int = 0) -> ProbeWindow: ...

    def close(self) -> float:
        """Closes the provider; returns the seconds that it took."""

    def open_replacement(self, old: int) -> int:
        """
        Opens endpoints in place of those from `old` on; returns the first one's number.
        """

    def announce_replacement(self, peer: int) -> None: ...

    def greet_peers(self) -> None: ...

    def unmoved_peers(self) -> list:
        """
        [(peer, it was told)] of who still uses the old endpoints, or has them used for it.
        """

    def forgo_peer(self, peer: int) -> None: ...

    def close_endpoints(self, old: int) -> bool:
        """False: peers still use them."""

class ExchangeHandle:
    """What a dispatch leaves for its combine. Immutable."""

    @property
    def epoch(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Rows of x of this rank."""

    @property
    def received(self) -> int:
        """Rows that this rank received, over all sources."""

    @property
    def matrix(self) -> list[int]:
        """list[int], R * R: rows from source s to destination d at [s * R + d]."""

    @property
    def node_matrix(self) -> list[int]:
        """
        list[int], R * RR: distinct rows from source s to node b at [s * RR + b].
        """

class DispatchResult:
    """What a dispatch received. Immutable."""

    @property
    def handle(self) -> ExchangeHandle: ...

    @property
    def received(self) -> int:
        """Rows N."""

    @property
    def layout(self) -> dict:
        """
        dict: byte offsets from the start of my data region, or of what was allocated: x [N, row_bytes], src_idx i32[N], topk_idx [N, K] of the index type sent (local ids, -1 elsewhere; None without), topk_weights f32[N, K] (0 where the id is -1; None without), scales [N, scale_bytes] (None without).
        """

    @property
    def used_bytes(self) -> int:
        """
        Bytes of the offered extent, or of what was allocated, that hold the result.
        """

    @property
    def spilled(self) -> bool:
        """The result lies in what was allocated."""

    @property
    def expert_counts(self) -> list[int]:
        """
        list[int]: rows per local expert (duplicates counted twice), not rounded; empty with a handle.
        """

    @property
    def overflows(self) -> list[tuple[int, int]]:
        """
        list[tuple[int, int]]: ranks that were sent more than rows_max rows, and how many; the same on every rank.
        """

class Exchange:
    """
    One rank's high-throughput exchange. The context has regions 'control' and 'staging' (sizes from layout(), zeroed) and
    'data' (any size), mapped for all peers of the node and announced by the others. All ranks call dispatch and combine in the
    same order. Calls from several threads are serialised.
    """

    def __init__(self, context: Context, node_of: Sequence[int], local_experts_max: int, ring_slots: int, slot_bytes: int) -> None:
        """
        node_of[r]: node of rank r, numbered 0..RR-1 without a gap. local_experts_max: the most experts that any rank will own in
        any call; all ranks must give the same, as also ring_slots (>= 1) and slot_bytes (a multiple of 64, at least one row with its
        top-k: a row that does not fit raises InvalidArgumentError at the call). Raises CapacityError where a region is too small,
        with both numbers.
        """

    def dispatch(self, x: int, tokens: int, row_bytes: int, x_type: str, scales: int, scale_bytes: int, scales_type: str, in_rank: int, topk_idx: int, topk_index_bytes: int, topk: int, topk_weights: int, counts_per_rank: int, counts_per_node: int, counts_per_expert: int, num_experts: int, expert_first: Sequence[int], rows_max: int, handle: ExchangeHandle | None, offer_offset: int, offer_capacity: int, allocate: Callable, timeout_ms: int) -> DispatchResult:
        """
        Sends row t of x to every rank r with in_rank[t, r] and returns what this rank received: rows ordered by source rank,
        then source token, at offer_offset (a multiple of 64) in my data region. Where they do not fit there, they pass through it in
        rounds and are gathered in memory that allocate(bytes) gives, an address that is a multiple of 64.

        x: [tokens, row_bytes] contiguous, anywhere, of element type x_type. scales (scale_bytes 0: none): [tokens, scale_bytes] of
        element type scales_type ('' without). in_rank: bool[tokens, R]. topk_idx (0: none): [tokens, topk] global ids of
        topk_index_bytes (4 or 8). topk_weights (0: none): f32[tokens, topk], needs topk_idx. counts_per_rank i32[R], counts_per_node
        i32[RR] and counts_per_expert i32[num_experts] (each 0: counted here, per expert only from topk_idx): checked against in_rank
        and topk_idx. expert_first: R + 1 entries. Nothing is read where tokens is 0, but all ranks must agree on whether there are
        weights: a tensor of no rows is any address but 0.
        rows_max (0: none): results have exactly so many rows, valid ones first, ids of the rest -1; needs topk_idx. A rank that would
        receive more keeps the first of them.
        handle: repeats that dispatch's routing and rows_max: in_rank, topk_idx, topk_weights and counts must be 0, topk and num_experts 0,
        expert_first empty; tokens must be the handle's.

        Raises InvalidArgumentError (nothing started), MismatchError (ranks disagree: on every rank, the exchange stays usable),
        CapacityError (an offered extent is too small for one row, or for rows_max rows: on every rank, stays usable; the message has rank, rows, bytes and capacity),
        PeerError, DeadlineError, TransferError; after one of these three, or an interrupt, every call raises StateError.
        """

    def combine(self, x: int, rows: int, row_bytes: int, weights: int, topk: int, bias0: int, bias1: int, out: int, out_weights: int, handle: ExchangeHandle, offer_offset: int, offer_capacity: int, timeout_ms: int) -> None:
        """
        Sends the bf16 rows x[rows, row_bytes / 2], in the order in which the handle's dispatch received them, back to their homes
        and writes their sums to out, bf16[tokens, row_bytes / 2] (tokens: the handle's). weights (topk 0: none): f32[rows, topk],
        summed into out_weights f32[tokens, topk]. bias0, bias1 (0: none): bf16[tokens, row_bytes / 2].

        x inside my data region is read in place (weights may then lie there or not); elsewhere x and weights are copied to the
        offered extent first, in rounds where it has fewer than extent_bytes('combine', …) bytes. Raises as dispatch.
        """

    def progress(self) -> list:
        """
        list[dict], one row per peer as of the last failed call: rank, notified, rows_expected, rows_arrived, chunks_to_send,
        chunks_sent, chunks_credited, missing (str).
        """

    def wake(self) -> None:
        """
        Rings this rank's own doorbell: a waiting call looks around once. Any thread.
        """

    @staticmethod
    def layout(rank: int, node_of: Sequence[int], local_experts_max: int, ring_slots: int, slot_bytes: int) -> dict:
        """
        {'control_bytes', 'staging_bytes'} of the rank's regions, before anything is created. staging_bytes is 0 with one node
        (create a region of 64 bytes then).
        """

    @staticmethod
    def layout_counts(topk_idx: int, index_bytes: int, tokens: int, topk: int, num_experts: int, expert_first: Sequence[int], node_of: Sequence[int], per_rank: int, per_node: int, per_expert: int, in_rank: int) -> None:
        """
        get_dispatch_layout's counting. topk_idx: address of contiguous [tokens, topk] ids of index_bytes (4 or 8) each. Writes
        i32[R] at per_rank, i32[RR] at per_node (0: leave out), i32[E] at per_expert and bool[tokens, R] at in_rank, every element.
        expert_first has R + 1 entries: rank r owns experts [first[r], first[r+1]). -1 is no expert. Raises InvalidArgumentError
        naming token, slot and value for any other id outside [0, E); outputs are then unspecified.
        """

    @staticmethod
    def extent_bytes(kind: str, rows: int, row_bytes: int, topk: int, index_bytes: int, has_weights: bool, scale_bytes: int = 0) -> int:
        """
        Bytes of the extent that a 'dispatch' receiving `rows` rows needs (topk 0: without ids), or that a 'combine' of `rows`
        rows needs where x and the weights are not in the data region.
        """

class LowLatencyCall:
    """A low-latency call that was sent; of a dispatch also its handle."""

    @property
    def epoch(self) -> int: ...

    @property
    def ended(self) -> bool: ...

class LowLatency:
    """
    One rank's low-latency exchange. The context has regions 'll_control' (control_bytes(), zeroed) and 'll_data' (the same size
    on every rank), mapped for all peers of the node and announced by the others. All ranks make the same calls in the same
    order; each has two parts, and the second one (receive) of at most two calls may be outstanding. Calls from several threads
    are serialised. shrink: a rank that is dead or does not answer until the deadline is masked, and the call goes on.
    """

    def __init__(self, context: Context, node_of: Sequence[int], local_experts_max: int, shrink: bool) -> None: ...

    def dispatch(self, x: int, tokens: int, hidden: int, topk_idx: int, index_bytes: int, topk: int, tokens_max: int, num_experts: int, expert_first: Sequence[int], format: int, out: int, scales: int, counts: int, src_info: int, layout_range: int, statistics: int, wait_ns: int, timeout_ms: int) -> LowLatencyCall:
        """
        Sends each row of x to the experts of its ids; returns when all rows are handed over. receive() fills the outputs.

        x: bf16 [tokens, hidden] contiguous. topk_idx: [tokens, topk] ids of index_bytes (4 or 8), -1 none. format: 0 bf16, 1 fp8 with
        scales f32, 2 with power-of-two scales, 3 with UE8M0 words. expert_first: R + 1 entries. Outputs, which must live until
        receive() has returned: out [E_l, R * M, hidden] of bf16 or fp8, scales 32-bit [E_l, S, R * M] (0 for bf16), counts i32[E_l],
        src_info i32[E_l, R * M], layout_range i64[E_l, R], statistics i32[E_l] and wait_ns i64[R] (each may be 0), both added to.

        Raises InvalidArgumentError, StateError (nothing was sent), DeadlineError, PeerError, TransferError. What does not fit is a
        CapacityError at receive(), where ranks that disagree get their MismatchError: everybody hears of it.
        """

    def combine(self, x: int, zero_copy: bool, topk_idx: int, index_bytes: int, weights: int, tokens: int, topk: int, hidden: int, dispatch: LowLatencyCall, out: int, wait_ns: int, timeout_ms: int) -> LowLatencyCall:
        """
        Sends rows back to where they came from; receive() writes the weighted sums to out, bf16 [tokens, hidden].

        x: bf16 [E_l, R * M, hidden] contiguous, unused with zero_copy: then the rows are in the combine buffer. topk_idx as in the
        dispatch; ids may have become -1, or stand in another order. weights f32[tokens, topk]; both are read at the call.
        """

    def receive(self, call: LowLatencyCall, timeout_ms: int) -> None:
        """The second part of a call, once; again it does nothing."""

    def combine_buffer(self, dispatch: LowLatencyCall, timeout_ms: int) -> int:
        """
        Byte offset in region 'll_data' where the rows of the next call, a zero-copy combine, are to be written.
        """

    def mask(self, rank: int, masked: bool) -> None:
        """From now on this rank leaves that one out, or no longer does. Local."""

    def masked(self) -> list[bool]:
        """list[bool], by rank: whom this rank leaves out."""

    @staticmethod
    def control_bytes(ranks: int, local_experts_max: int) -> int:
        """Bytes of region 'll_control'."""

    @staticmethod
    def needed_bytes(node_of: Sequence[int], tokens_max: int, hidden: int, num_experts: int, topk: int, format: int, expert_first: Sequence[int]) -> int:
        """
        Bytes of region 'll_data' with which a dispatch of that shape and its combine have room.
        """

def runtime_words(ranks: int, source: int) -> dict:
    """
    Where region 'runtime' has what `source` says: {word: byte offset}, and 'bytes' of it all; for tests.
    """

class LivenessProbe:
    """
    What a rank concludes from others' words at given times, by the heartbeat rules (no pidfd); for tests.
    """

    def __init__(self, rank: int, size: int) -> None: ...

    def beat(self, rank: int) -> None:
        """A heartbeat of that rank arrives."""

    def say(self, rank: int, verdict: int | None = None, leaving: bool = False, *, old_speaker: bool = False, old_accused: bool = False) -> None:
        """
        Words of that rank arrive; said by, or about, the process that had its name before, where old.
        """

    def fences(self, rank: int, whom: int) -> None:
        """The word of that rank that it has removed another."""

    def take_back(self, rank: int) -> None:
        """The verdict of that rank is no more."""

    def own_verdict(self) -> int | None:
        """Whom this rank holds dead before the others."""

    def farewell(self, rank: int) -> bool:
        """Whether who has that name now says that it leaves."""

    def add(self, rank: int, now_ms: int) -> None:
        """A process under that name; after its removal, another one."""

    def remove(self, rank: int) -> None:
        """Remove that rank here, as one that fell silent."""

    def lose_connection(self, rank: int, now_ms: int) -> None:
        """The provider reports that rank unreachable."""

    def take_deaths(self) -> list[int]:
        """Ranks whose work the engine is to end, since the last call."""

    def tick(self, now_ms: int) -> None:
        """Look around."""

    def fault(self) -> tuple[int, int, str] | None:
        """None, or (rank at fault, rank that told or -1, why)."""

    def state(self, rank: int) -> str: ...

    def undecided(self, rank: int, since_ms: int) -> bool: ...

class TokenProbe:
    """A progress token that no endpoint has; for tests."""

    def __init__(self) -> None: ...

    def take_within(self, timeout_ms: int) -> bool:
        """Whether it was taken by then."""

    def wanted(self) -> bool:
        """Whether somebody sleeps for it."""

    def give(self) -> None: ...

def memory_available() -> tuple[int, str]:
    """
    (bytes, where that is written): how much memory this process may still take. Allocating a region beyond it does not fail, the kernel kills somebody.
    """
