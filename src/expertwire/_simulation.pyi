"""
Expertwire's deterministic simulation. Use expertwire.testing; this module's names may change.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def lead_at(address: int) -> int: ...

def run_engine(seeds: Sequence[int], ranks: int = 0, requests_per_rank: int = 0, check_engine: bool = True, faults: object | None = None, stop_at_failure: bool = False, trace_lines: int = 0, squeeze: bool = False, counted: bool = False) -> list:
    """
    Run the engine's simulation once per seed, with the GIL released. One dict per run; `failure` is empty where everything held. 0 lets the seed decide. `faults`: probabilities instead of the seed's choice. `trace`: the last `trace_lines` events in words. `squeeze`: back-pressure from everywhere at once. `counted`: ordering class C; `counting`: immediates, signals added, those that had to wait, aborted ones, strays, dropped messages.
    """

def run_engine_nth(seed: int, how: str, ranks: int = 2, requests_per_rank: int = 6, counted: bool = False) -> dict:
    """
    The n-th operation of the run fails (`how`: one of nth_faults()), and nothing else, for n = 1, 2, … until there is no n-th one. {'struck': how many there were, 'failures': [(n, text)]}.
    """

def nth_faults() -> list[str]:
    """What may become of the n-th operation."""

def set_mutant(name: str) -> None:
    """
    Switch one kept fault on for the whole process ('none' switches it off). ValueError for another name.
    """

def mutants() -> list[str]:
    """Names for set_mutant()."""

def transitions() -> list[str]:
    """Every transition of a request that the table allows, as 'FROM->TO'."""

class EngineProbe:
    """One engine whose provider is the caller (unit tests)."""

    def __init__(self, outstanding_max: int = 8, peers: int = 2, lanes: int = 2, ordered: bool = False, hard_timeout_ns: int = 1000000, queued_max: int = 64, bulk_window: int = 0, bulk_hold_ns: int = 0, bulk_chunk_bytes: int = 0, bulk_post_bytes: int = 0) -> None: ...

    def submit(self, peer: int, chunk_lanes: Sequence[int], controls: Sequence[tuple[int, int]] = [], reads: bool = False, lead: int = 0) -> tuple[str, int]: ...

    def post(self, most: int = 64, outcomes: Sequence[str] = []) -> list[tuple[int, str]]: ...

    def posted_bytes(self) -> list[int]: ...

    def complete(self, ticket: int, status: str = 'ok', delivered: bool = True) -> None: ...

    def advance(self, ns: int) -> None: ...

    def status(self, request: int) -> str: ...

    def first_error(self, request: int) -> str: ...

    def cancel(self, request: int) -> str: ...

    def withhold(self, request: int) -> str: ...

    def release(self, request: int) -> str: ...

    def peer_dead(self, peer: int) -> None: ...

    def peer_closed(self, peer: int) -> None: ...

    def mark_stalled(self, request: int) -> None: ...

    def turn_after_pause(self, ns: int, waiting: Sequence[int]) -> list[int]: ...

    def endpoint_to_replace(self) -> int: ...

    def replace_endpoint(self, old: int, fresh: int) -> None: ...

    def drained(self, endpoint: int) -> bool: ...

    def endpoint_closed(self, endpoint: int) -> None: ...

    def close_peer(self, peer: int) -> str: ...

    def quiet_mark(self) -> int: ...

    def quiet(self, mark: int) -> str: ...

    def region_uses(self) -> int: ...

    def idle(self) -> bool: ...

    def invariants(self) -> str: ...

    def lane(self, peer: int, lane: int) -> dict: ...

    def statistics(self) -> dict: ...

def run_exchange_seeds(first: int, count: int, mutant: str = 'none', stop: bool = False, trace_lines: int = 0, fail_at: int = 0, fail_how: str = 'operation') -> dict:
    """
    Runs seeds first … first + count - 1. {'failures': [(seed, text)], 'trace_hashes': [int], 'coverage': {name: count}, 'trace': the last run's last `trace_lines` events in words}. `stop`: end at the first failure.
    """

def run_exchange_nth(seed: int, how: str, stride: int = 1) -> dict:
    """
    The n-th operation of the run fails (`how`: one of nth_faults()), and nothing else, for n = 1, 1 + stride, … until there is no n-th one. {'struck': how many there were, 'failures': [(n, text)], 'coverage': …}.
    """

def run_exchange_timed(options: dict) -> dict:
    """
    One dispatch (and `combine`) of every rank in virtual time, each byte checked against the oracle. Options by name: ranks, ranks_per_node, tokens, row_bytes, experts, topk, chunk_rows, ring_slots, combine; latency_ns, bytes_per_ns, operation_ns, rendezvous_bytes, transmit_queue; synchronous, gate, seed, row_bytes_on_wire, setup_ns, pack_bytes_per_ns, proxies, outstanding. {'error', 'call_ns', 'chunks', 'wire_bytes', 'trace_hash'}.
    """

def exchange_layout(rank: int, node_of: Sequence[int], local_experts_max: int, ring_slots: int, slot_bytes: int) -> dict:
    """
    Sizes of a rank's regions and its entry rank in every node, as the core computes them.
    """

def exchange_chunk_rows(slot_bytes: int, row_bytes: int, mask_words: int, topk: int, index_bytes: int, has_weights: bool, scale_bytes: int) -> int:
    """Rows that fit a ring slot."""

def exchange_extent(rows: int, row_bytes: int, topk: int, index_bytes: int, has_weights: bool, scale_bytes: int) -> tuple:
    """Offsets inside a dispatch's extent."""

def rows_isas() -> list[str]:
    """Instruction sets of the row kernels that this machine has."""

def rows_reduce(isa: str, out: int, rows: Sequence[int], ends: Sequence[int], bias0: int, bias1: int, columns: int) -> None:
    """
    One row of a combine. Addresses of bf16 rows, grouped by `ends`. 'best': what the core uses, streaming.
    """

def rows_round(isa: str, out: int, values: int, columns: int) -> None:
    """f32[columns] rounded to bf16."""

def rows_copy(to: int, source: int, bytes: int, streaming: bool) -> None:
    """One row's copy."""

def run_rails(rails: Sequence[tuple[float, int]], bytes: int, chunk_bytes: int = 65536, failing: int = -1, fail_ns: int = 0, seed: int = 0) -> dict:
    """
    One request over rails of (bytes_per_ns, latency_ns), its signal gated over all of them; rail `failing` is lost at `fail_ns`. {'error', 'ns', 'carried': bytes over each rail, 'attempts', 'records': terminal ones}.
    """

def rows_quantise(isa: str, out: int, scales: int, row: int, columns: int, power_of_two: bool) -> None:
    """bf16[columns] as e4m3fn[columns] and f32[ceil(columns / 128)]."""

def rows_pack_ue8m0(words: int, scales: int, blocks: int) -> None:
    """f32[blocks] as i32[ceil(blocks / 4)]."""

def rows_reduce_weighted(isa: str, out: int, rows: Sequence[int], weights: Sequence[float], columns: int) -> None:
    """One row of a low-latency combine."""

def run_low_latency_seeds(first: int, count: int, mutant: str = 'none', stop: bool = False, trace_lines: int = 0, fail_at: int = 0, fail_how: str = 'operation') -> dict:
    """Runs seeds of the low-latency mode; as run_exchange_seeds."""

def run_low_latency_nth(seed: int, how: str, stride: int = 1) -> dict:
    """
    The n-th operation of a run of the low-latency mode fails; as run_exchange_nth.
    """

class TransferNetwork:
    """Endpoints of agents over one simulated network."""

    def __init__(self, seed: int, places: int, peers_max: int, operations_max: int, regions_max: int, faults: dict) -> None: ...

    def register_region(self, place: int, region: int, address: int, bytes: int) -> bool: ...

    def deregister_region(self, place: int, region: int) -> bool:
        """False while a request of this place uses it."""

    def region_key(self, place: int, region: int) -> bytes: ...

    def add_peer(self, place: int, number: int, there: int) -> bool: ...

    def remove_peer(self, place: int, number: int) -> bool: ...

    def declare_dead(self, place: int, number: int) -> None: ...

    def announce(self, place: int, number: int, remote: int, key: bytes) -> bool: ...

    def submit(self, place: int, number: int, read: bool, locals: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], remotes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], remote_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], notification: bytes, lane: int) -> tuple:
        """(status, ticket)."""

    def status(self, place: int, ticket: int) -> int: ...

    def error_code(self, place: int, ticket: int) -> int: ...

    def cancel(self, place: int, ticket: int) -> bool: ...

    def release(self, place: int, ticket: int) -> bool: ...

    def take_notifications(self, place: int) -> list:
        """[(place of its sender, bytes)]."""

    def step(self) -> str:
        """One turn; what of the engine's rules does not hold, or ""."""

    def heal(self) -> None:
        """No faults from here on."""

    def kill(self, place: int, reported: bool) -> None: ...

    @property
    def now(self) -> int:
        """Virtual ns."""

    @property
    def trace_hash(self) -> int: ...

    @property
    def posts(self) -> int: ...

    @property
    def faults(self) -> dict:
        """How often each kind has struck."""
