"""Cases of dispatch and combine: seeded inputs that any process can make again, and what a rank does with them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.ep.cpu import backend
from harness import Rank

GUARD = 64  # elements on either side of each output that is allocated here
POISON = 0x5A
BEHIND_BYTES = 4096
POISONED_BYTES = 4 << 20  # of the data region


@dataclass(frozen=True)
class Case:
    """One dispatch and its combine. `tokens` by rank."""

    node_of: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: int = 64
    experts: int = 16
    topk: int = 4
    ids: str = "random"  # random, none (all −1), sparse (half −1), same (one id in all places), skewed
    index: str = "int64"
    weights: bool = True
    biases: int = 0
    strided: bool = False
    seed: int = 0
    staging: int = 0  # num_rdma_bytes: small rings make credits turn round
    provider: str | None = None
    data: int = 0  # num_nvl_bytes: a small region makes rounds
    scales: str = ""  # FP8 rows with scales of this dtype

    @property
    def ranks(self) -> int:
        return len(self.node_of)


@dataclass
class Inputs:
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    scales: torch.Tensor | None = None

    def sent(self, again: bool = False) -> Any:
        """What is given as x; `again`: other rows, and scales, of the same shape."""
        x = -self.x if self.scales is None else (-self.x.float()).to(self.x.dtype)
        if not again:
            x = self.x
        return x if self.scales is None else (x, self.scales + 1 if again else self.scales)


def _strided(values: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor whose rows are neither adjacent nor dense."""
    wide = torch.full((values.shape[0] * 2 + 1, values.shape[1] * 2 + 1), -7).to(values.dtype)
    view = wide[1::2, 1::2]
    view.copy_(values)
    assert values.numel() == 0 or not view.is_contiguous() or values.shape == (1, 1)
    return view


def inputs(case: Case, rank: int) -> Inputs:
    """What `rank` gives to the case."""
    random = torch.Generator().manual_seed(case.seed * 1009 + rank)
    tokens, topk, experts = case.tokens[rank], case.topk, case.experts
    x = torch.randn((tokens, case.hidden), generator=random).bfloat16()
    # distinct ids while there are enough experts, as a router gives them
    ids = torch.rand((tokens, max(experts, topk)), generator=random).argsort(1)[:, :topk] % experts
    if case.ids == "none":
        ids = torch.full_like(ids, -1)
    elif case.ids == "sparse":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.5, -1)
    elif case.ids == "same":
        ids = ids[:, :1].expand(-1, topk).contiguous()
    elif case.ids == "skewed":
        ids = (torch.rand(ids.shape, generator=random) ** 4 * experts).long()
    weights = torch.rand((tokens, topk), generator=random) if case.weights else None
    biases = tuple(torch.randn((tokens, case.hidden), generator=random).bfloat16() for _ in range(case.biases))
    ids = ids.to(getattr(torch, case.index))
    scales = None
    if case.scales:
        x = (x * 16).to(torch.float8_e4m3fn)
        width = -(-case.hidden // (128 if case.scales == "float32" else 512))
        scales = (torch.rand((tokens, width), generator=random) * 1000).to(getattr(torch, case.scales))
        scales = scales.t().contiguous().t()  # column-major, as quantisation leaves them
    if case.strided:
        x, ids = _strided(x), _strided(ids)
        scales = _strided(scales) if scales is not None else None
        weights = _strided(weights) if weights is not None else None
        biases = tuple(_strided(bias) for bias in biases)
    return Inputs(x, ids, weights, biases, scales)


def expert_output(received: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank's experts make of the rows: another value on each rank."""
    return (received.float() * (1 + rank / 8) + 0.25).bfloat16()


class Guarded:
    """torch with an `empty` whose results lie between guard elements, poisoned all over."""

    def __init__(self) -> None:
        self._around: list[tuple[torch.Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cpu"
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = 1
        for length in shape:
            count *= length
        size = dtype.itemsize
        around = torch.full(((count + 2 * GUARD) * size,), POISON, dtype=torch.uint8)
        self._around.append((around, count * size))
        inside = around[GUARD * size : (GUARD + count) * size]
        return inside.view(dtype).view(shape)

    def check(self) -> None:
        for around, inside in self._around:
            guard = (around.numel() - inside) // 2
            assert bool((around[:guard] == POISON).all()), "written before an output"
            assert bool((around[guard + inside :] == POISON).all()), "written behind an output"
        self._around.clear()


def _plain(value: torch.Tensor | None) -> Any:
    """As a numpy array: pickled by value."""
    if value is None:
        return None
    bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
    return value.view(bits).numpy().copy()


def _rows(received: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales of what a dispatch returned."""
    if isinstance(received, torch.Tensor):
        return received, None
    rows, scales = received
    assert scales.is_contiguous(), "received scales are row-major"
    return rows, scales


def run_case(rank: Rank, case: Case) -> dict[str, Any]:
    """The case on this rank; everything that came out."""
    guarded = Guarded()
    backend.torch = guarded  # type: ignore[attr-defined]
    try:
        out = _run_case(rank, case)
        guarded.check()
    finally:
        backend.torch = torch
    return out


def _run_case(rank: Rank, case: Case) -> dict[str, Any]:
    given = inputs(case, rank.rank)
    sizes = {"num_rdma_bytes": case.staging, **({"num_nvl_bytes": case.data} if case.data else {})}
    buffer = rank.buffer(case.node_of, provider=case.provider, **sizes)
    region = buffer.get_local_buffer_tensor(torch.uint8)
    region[:POISONED_BYTES].fill_(POISON)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(given.topk_idx, case.experts)
    assert event.event is None
    out: dict[str, Any] = {
        "per_rank": _plain(per_rank),
        "per_node": _plain(per_node),
        "per_expert": _plain(per_expert),
        "in_rank": _plain(in_rank),
    }
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    received, ids, weights, counts, handle, event = buffer.dispatch(
        given.sent(), topk_idx=given.topk_idx, topk_weights=given.topk_weights, expert_alignment=8, **layout
    )
    assert event.event is None
    received, scales = _rows(received)
    if received.numel():
        _check_region(region, received, buffer.runtime, given)
    out |= {"x": _plain(received), "scales": _plain(scales), "topk_idx": _plain(ids), "topk_weights": _plain(weights), "counts": counts}
    out |= {"real_counts": list(handle.num_recv_tokens_per_expert), "src_idx": _plain(handle.recv_src_idx)}
    out["prefix"] = _plain(handle.rank_prefix_matrix)
    out["handle"] = [_plain(entry) for entry in handle]
    y = expert_output(received, rank.rank)
    if case.strided:
        y = _strided(y)
    bias = given.biases if len(given.biases) == 2 else next(iter(given.biases), None)
    combined, combined_weights, event = buffer.combine(y, handle, topk_weights=weights, bias=bias, async_finish=True)
    assert event.event is not None
    out |= {"combined": _plain(combined), "combined_weights": _plain(combined_weights)}
    # The same routing again, other rows; and a combine whose input lies in the data region already.
    again, *rest, event = buffer.dispatch(
        given.sent(again=True), handle=handle, previous_event=event, async_finish=True, allocate_on_comm_stream=True
    )
    assert rest == [None, None, None, None]
    again, scales = _rows(again)
    out |= {"again": _plain(again), "again_scales": _plain(scales)}
    if scales is not None:
        again = again.bfloat16()
    out["again_combined"] = _plain(buffer.combine(again, handle)[0])
    # Zeros of either sign and any NaN: the same bits from rows that are summed on their way and from rows that are not.
    again.view(torch.int16)[::2, ::3] = -0x8000
    again.view(torch.int16)[1::2, ::5] = 0x7FA5
    here, elsewhere = (buffer.combine(rows, handle, topk_weights=weights) for rows in (again, again.clone()))
    assert torch.equal(here[0].view(torch.int16), elsewhere[0].view(torch.int16))
    assert weights is None or torch.equal(here[1], elsewhere[1])
    return out


def _check_region(region: torch.Tensor, received: torch.Tensor, runtime: Any, given: Inputs) -> None:
    """Nothing may be written behind what the dispatch needs: the rest of the offered extent still has its poison."""
    start = received.data_ptr() - region.data_ptr()
    topk = given.topk_idx.shape[1]
    row_bytes = received.shape[1] * received.element_size()
    used = runtime._exchange.extent_bytes(
        "dispatch",
        received.shape[0],
        row_bytes,
        topk,
        given.topk_idx.element_size(),
        given.topk_weights is not None,
        0 if given.scales is None else given.scales.shape[1] * given.scales.element_size(),
    )
    # Behind a region smaller than that, as rounds have, anybody's memory may lie: a pooled result above all.
    if not 0 <= start < min(POISONED_BYTES, region.numel()) - used - BEHIND_BYTES:
        return  # a copy, or larger than what was poisoned
    behind = (ctypes.c_uint8 * BEHIND_BYTES).from_address(region.data_ptr() + start + used)
    assert set(behind) == {POISON}, "written behind the rows received"
