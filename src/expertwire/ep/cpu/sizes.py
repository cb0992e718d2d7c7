"""How many bytes a Buffer takes, by region: pure arithmetic, the same for what is planned and for what is allocated."""

from __future__ import annotations

from expertwire.ep.config import align_up
from expertwire.ep.cpu.low_latency import BF16, FP8, control_bytes, data_bytes_for, region_bytes
from expertwire.ep.cpu.pool import EXTENT_ALIGNMENT
from expertwire.errors import CapacityError

DATA_BYTES = 256 << 20
STAGING_BYTES = 64 << 20
STAGING_BYTES_LEAST = 64  # a region is never empty
# (slots, slot bytes) of a ring, best first. Those after the smallest unasked one are taken only for a small `num_rdma_bytes`.
_GEOMETRIES = ((8, 1 << 20), (4, 1 << 20), (4, 512 << 10), (4, 256 << 10), (4, 128 << 10), (4, 64 << 10), (2, 64 << 10))
_SMALLEST_UNASKED = (4, 256 << 10)


def ring_geometry(node_of: tuple[int, ...], local_experts_max: int, staging_bytes_max: int) -> tuple[int, int]:
    """(slots, bytes of a slot) of the rings, the same on every rank: the largest with which no rank's staging exceeds the limit.

    Raises `CapacityError` with both numbers when a limit that the caller gave is too small for any.
    """
    from expertwire.fabric.native import Exchange

    limit = staging_bytes_max or STAGING_BYTES
    least = 0
    for slots, slot_bytes in _GEOMETRIES:
        least = max(
            Exchange.layout(rank, list(node_of), local_experts_max, slots, slot_bytes)["staging_bytes"] for rank in range(len(node_of))
        )
        if least <= limit or (not staging_bytes_max and (slots, slot_bytes) == _SMALLEST_UNASKED):
            return slots, slot_bytes
    raise CapacityError(
        f"num_rdma_bytes is {staging_bytes_max}; the rings of {len(node_of)} ranks on {max(node_of) + 1} nodes need at least {least} bytes"
    )


def geometry_of(
    node_of: tuple[int, ...], *, data_bytes: int, rdma_bytes: int, local_experts_max: int, low_latency: bool
) -> tuple[int, int]:
    """`ring_geometry` of a Buffer. With `low_latency`, `rdma_bytes` is that mode's, and without `data_bytes` the rings are the least."""
    if low_latency and not data_bytes:
        return _GEOMETRIES[-1]
    return ring_geometry(node_of, local_experts_max, 0 if low_latency else rdma_bytes)


def region_sizes(
    rank: int, node_of: tuple[int, ...], *, data_bytes: int, rdma_bytes: int, local_experts_max: int, low_latency: bool
) -> dict[str, int]:
    """Bytes of each region that `rank` allocates, by name."""
    from expertwire.fabric.native import Exchange

    slots, slot_bytes = geometry_of(
        node_of, data_bytes=data_bytes, rdma_bytes=rdma_bytes, local_experts_max=local_experts_max, low_latency=low_latency
    )
    layout = Exchange.layout(rank, list(node_of), local_experts_max, slots, slot_bytes)
    sizes = {
        "control": int(layout["control_bytes"]),
        "staging": max(int(layout["staging_bytes"]), STAGING_BYTES_LEAST),
        "data": align_up(data_bytes or (EXTENT_ALIGNMENT if low_latency else DATA_BYTES), EXTENT_ALIGNMENT),
    }
    if low_latency:
        sizes["ll_control"] = control_bytes(len(node_of), local_experts_max)
        sizes["ll_data"] = region_bytes(rdma_bytes)
    return sizes


def data_bytes_of_rows(rows: int, row_bytes: int, topk: int) -> int:
    """Bytes of a data region in which a dispatch that receives so many rows is returned as views, and its combine input fits too."""
    from expertwire.fabric.native import Exchange

    received = align_up(Exchange.extent_bytes("dispatch", rows, row_bytes, topk, 8, topk > 0), EXTENT_ALIGNMENT)
    returned = align_up(Exchange.extent_bytes("combine", rows, row_bytes, topk, 8, topk > 0), EXTENT_ALIGNMENT)
    return align_up(received + max(returned, -(-received // 3)), EXTENT_ALIGNMENT)


def low_latency_bytes_least(node_of: tuple[int, ...], tokens_max: int, hidden: int, num_experts: int, topk: int) -> int:
    """The least `num_rdma_bytes` with which every rank has room for a dispatch of that shape, in any format, and its combine."""
    return max(data_bytes_for(node_of, tokens_max, hidden, num_experts, topk, kind) for kind in (BF16, FP8))
