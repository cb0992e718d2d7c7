"""Networks that the simulation can stand in for, as data: what was published, what is assumed, what was fitted.

The real exchange runs over the real engine in virtual time; only what a profile names costs time. Congestion is not modelled: a link is
busy where it sends, never where it receives.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from expertwire.errors import InvalidArgumentError
from expertwire.testing.cluster import simulation

Kind = Literal["dispatch", "combine"]
ROW_BYTES_IN_MEMORY = 64  # rows are small in memory and count in full on the wire: every byte is checked all the same
RANKS_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """What one kind of call costs besides the wire. Fitted to the published figures of 8 ranks."""

    setup_ns: int  # from the call to the first chunk
    pack_bytes_per_ns: float  # at which chunks are filled
    chunk_rows: int
    ring_slots: int  # chunks under way to one peer


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A figure of the source: GB/s of received payload a rank, self-node traffic included."""

    kind: Kind
    dtype: str
    ranks: int
    mode: str  # async, sync
    gigabytes_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """One kind of NIC. `fitted_ranks`: the published figures of so many ranks were fitted to; all others are predictions."""

    name: str
    bytes_per_ns: float  # one NIC, one direction
    latency_ns: int  # one way
    operation_ns: int  # of the link, at least, for each operation
    rendezvous_bytes: int  # writes from here on are pulled by the target
    proxies: int  # threads that post for one rank
    hidden: int
    experts: int
    topk: int
    ranks_per_node: int
    dispatch: Phase
    combine: Phase
    published: tuple[Published, ...]
    fitted_ranks: int

    def phase(self, kind: Kind) -> Phase:
        """The costs of that kind of call."""
        return self.dispatch if kind == "dispatch" else self.combine

    def row_bytes(self, dtype: str) -> int:
        """One token on the wire. FP8 rows carry an fp32 scale for each 128 columns.

        Raises `InvalidArgumentError` for another dtype than bf16 and fp8.
        """
        if dtype == "bf16":
            return 2 * self.hidden
        if dtype == "fp8":
            return self.hidden + self.hidden // 128 * 4
        raise InvalidArgumentError(f"dtype is {dtype!r}, but it must be bf16 or fp8")

    def figure(self, kind: Kind, dtype: str, ranks: int, mode: str) -> float | None:
        """What the source published for it, in GB/s, if it did."""
        for row in self.published:
            if (row.kind, row.dtype, row.ranks, row.mode) == (kind, dtype, ranks, mode):
                return row.gigabytes_per_s
        return None


# "ep/cxi: async write path with completion-gated control atomics": GH200, Slingshot-11, nodes of four, 4,096 tokens a rank.
# Published: the figures, and 24.27 GB/s of a raw write loop. Assumed: 2 µs one way, one posting thread a rank.
# Fitted: everything in Phase, and operation_ns. The synchronous figures are those of the change before it, the same night.
SLINGSHOT = Network(
    name="slingshot",
    bytes_per_ns=24.27,
    latency_ns=2_000,
    operation_ns=300,
    rendezvous_bytes=0,  # FI_CXI_RDZV_THRESHOLD=0
    proxies=1,
    hidden=7168,
    experts=288,
    topk=8,
    ranks_per_node=4,
    dispatch=Phase(setup_ns=80_000, pack_bytes_per_ns=100, chunk_rows=16, ring_slots=15),
    combine=Phase(setup_ns=150_000, pack_bytes_per_ns=200, chunk_rows=32, ring_slots=10),
    published=(
        Published("dispatch", "fp8", 8, "async", 38.2),
        Published("dispatch", "fp8", 8, "sync", 32.0),
        Published("dispatch", "bf16", 8, "async", 41.4),
        Published("dispatch", "bf16", 8, "sync", 35.6),
        Published("combine", "bf16", 8, "async", 43.0),
        Published("combine", "bf16", 8, "sync", 40.7),
        Published("dispatch", "fp8", 16, "async", 21.8),
        Published("dispatch", "bf16", 16, "async", 22.4),
        Published("combine", "bf16", 16, "async", 23.8),
    ),
    fitted_ranks=8,
)
NETWORKS = {SLINGSHOT.name: SLINGSHOT}


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """One call of all ranks. `error` is empty where every byte was right."""

    error: str
    microseconds: float
    gigabytes_per_s: float  # received payload a rank over the call's time: tokens times the nodes that each of them goes to
    chunks: int


def _nodes_of_a_token(nodes: int, topk: int) -> float:
    """How many of `nodes` a token goes to, on average, with experts drawn evenly."""
    return float(nodes * (1 - (1 - 1 / nodes) ** topk))


def simulate(network: Network, kind: Kind, dtype: str, ranks: int, tokens: int, mode: str, gate: bool = True, seed: int = 0) -> Timing:
    """One dispatch or combine of `tokens` tokens a rank, in virtual time, with every byte checked.

    `mode`: async or sync (post, wait for all, then signal). `gate=False`: signals trust the order of posts.
    Raises `InvalidArgumentError` where the ranks are no whole nodes, or a number is out of range.
    """
    if not 0 < ranks <= RANKS_MAX or ranks % network.ranks_per_node != 0:
        raise InvalidArgumentError(f"ranks is {ranks}, but it must be a multiple of {network.ranks_per_node}, at most {RANKS_MAX}")
    if not 0 < tokens <= 1 << 16:
        raise InvalidArgumentError(f"tokens is {tokens}, but it must be between 1 and {1 << 16}")
    if mode not in ("async", "sync"):
        raise InvalidArgumentError(f"mode is {mode!r}, but it must be async or sync")
    phase = network.phase(kind)
    row_bytes = network.row_bytes(dtype)
    options = {
        "ranks": ranks,
        "ranks_per_node": network.ranks_per_node,
        "tokens": tokens,
        "row_bytes": ROW_BYTES_IN_MEMORY,
        "experts": network.experts,
        "topk": network.topk,
        "chunk_rows": phase.chunk_rows,
        "ring_slots": phase.ring_slots,
        "combine": kind == "combine",
        "latency_ns": network.latency_ns,
        "bytes_per_ns": network.bytes_per_ns,
        "operation_ns": network.operation_ns,
        "rendezvous_bytes": network.rendezvous_bytes,
        "transmit_queue": 512,
        "synchronous": mode == "sync",
        "gate": gate,
        "seed": seed,
        "row_bytes_on_wire": row_bytes,
        "setup_ns": phase.setup_ns,
        "pack_bytes_per_ns": phase.pack_bytes_per_ns,
        "proxies": network.proxies,
    }
    result: dict[str, Any] = simulation().run_exchange_timed(options)
    nanoseconds = result["call_ns"][-1]
    payload = tokens * _nodes_of_a_token(ranks // network.ranks_per_node, network.topk) * row_bytes
    return Timing(result["error"], nanoseconds / 1000, payload / nanoseconds, result["chunks"])
