"""What `bench ep --device cuda` calls: a Buffer of ours, or of any module shaped like DeepEP's, by the same calls."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from expertwire.cli.bench.ep_device import OURS, DeviceSetup
from expertwire.ep.low_latency_reference import dequantise, quantise
from expertwire.ep.plan import combine_extent, dispatch_extent

TIMEOUT_MS = 20_000
SHARES = 8  # of the largest result, in our data region: two results, a copied combine input, three graphs, and what the pool keeps back
LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")


@dataclass(frozen=True)
class Given:
    """What a rank sends: x bf16 [T, H], topk_idx i64 [T, K], topk_weights f32 [T, K]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.x.shape[0]


def make(setup: DeviceSetup, tokens: int, rank: int, device: torch.device) -> Given:
    """A function of the seed, so that every rank on such a device can make what another sends."""
    random = torch.Generator(device).manual_seed(setup.seed * 1_000_003 + tokens * 64 + rank)
    x = torch.randn((tokens, setup.hidden), generator=random, device=device).bfloat16()
    ids = torch.rand((tokens, setup.experts), generator=random, device=device).topk(setup.topk, dim=1).indices
    return Given(x, ids, torch.rand((tokens, setup.topk), generator=random, device=device))


def open_buffer(name: str, setup: DeviceSetup, group: Any) -> Any:
    """A Buffer of that module on the current device. Collective. Raises `ImportError`, or whatever the module raises."""
    most = max(setup.sizes)
    if name == OURS:
        from expertwire.ep import Buffer

        if setup.sms is not None:
            Buffer.set_num_sms(setup.sms)
        if setup.mode == "ll":
            return Buffer(group, 2 << 20, **_low_latency(Buffer, setup, most), device=setup.device, timeout_ms=TIMEOUT_MS)
        worst = most * setup.ranks
        needed = dispatch_extent(worst, 2 * setup.hidden, setup.topk, 8, True, 0).total
        needed = max(needed, combine_extent(worst, 2 * setup.hidden, setup.topk, True).total)
        return Buffer(group, SHARES * needed, device=setup.device, timeout_ms=TIMEOUT_MS)
    module = importlib.import_module(name)
    if setup.sms is not None:
        module.Buffer.set_num_sms(setup.sms)
    if setup.mode == "ll":
        return module.Buffer(group, 0, **_low_latency(module.Buffer, setup, most))
    configs = module.Buffer.get_dispatch_config(setup.ranks), module.Buffer.get_combine_config(setup.ranks)
    return module.Buffer(group, max(one.get_nvl_buffer_size_hint(2 * setup.hidden, setup.ranks) for one in configs), 0)


def _low_latency(kind: Any, setup: DeviceSetup, most: int) -> dict[str, Any]:
    local = max(1, -(-setup.experts // setup.ranks))
    hint = kind.get_low_latency_rdma_size_hint(most, setup.hidden, setup.ranks, local * setup.ranks)
    return {"num_rdma_bytes": hint, "low_latency_mode": True, "num_qps_per_rank": local}


def close_buffer(name: str, buffer: Any) -> None:
    """Ours is destroyed; another's ends as it dies, since its constructor was told nothing else."""
    if name == OURS:
        buffer.destroy()


class Throughput:
    """High-throughput calls of one engine on one set of inputs. What the latest dispatches gave lives until the next of their kind."""

    def __init__(self, name: str, buffer: Any, given: Given, setup: DeviceSetup) -> None:
        self.name, self.buffer, self.given, self.setup = name, buffer, given, setup
        rows, scales = quantise(given.x.cpu())
        self.fp8 = rows.to(given.x.device), scales.to(given.x.device)
        self.layout()
        self.latest: Any = None
        self.kept: Any = None  # of a dispatch whose handle and rows others use
        self.combined: Any = None
        self.elsewhere = torch.empty(0)

    def layout(self) -> None:
        """Who gets what."""
        found = self.buffer.get_dispatch_layout(self.given.topk_idx, self.setup.experts)
        self.routing = dict(zip(LAYOUT, found[:4], strict=True))

    def dispatch(self, dtype: str, worst: int = 0) -> Any:
        """A dispatch by the layout made before. Rows and handle stand first and fifth in what it returns."""
        self.latest = None
        options = {"num_worst_tokens": worst} if worst else {}
        x = self.given.x if dtype == "bf16" else self.fp8
        self.latest = self.buffer.dispatch(x, topk_idx=self.given.topk_idx, topk_weights=self.given.topk_weights, **self.routing, **options)
        return self.latest

    def keep(self, worst: int = 0) -> None:
        """Have one whose rows and handle the works below use."""
        self.kept = None
        self.kept, self.latest = self.dispatch("bf16", worst), None
        self.elsewhere = self.kept[0].clone()

    def again(self, dtype: str) -> None:
        """By the kept handle."""
        self.latest = None
        self.latest = self.buffer.dispatch(self.given.x if dtype == "bf16" else self.fp8, handle=self.kept[4])

    def combine(self, place: str) -> None:
        """The kept rows, where they were received or elsewhere."""
        self.combined = self.buffer.combine(self.kept[0] if place == "received" else self.elsewhere, self.kept[4])[0]

    def step(self, worst: int) -> None:
        """Dispatch and combine of rows as they came."""
        rows, _, _, _, handle, _ = self.dispatch("bf16", worst)
        self.combined = self.buffer.combine(rows, handle)[0]

    def forget(self) -> None:
        """Nothing of this lives on."""
        self.latest = self.kept = self.combined = None


class LowLatency:
    """Low-latency calls of one engine on one set of inputs."""

    def __init__(self, name: str, buffer: Any, given: Given, setup: DeviceSetup) -> None:
        self.name, self.buffer, self.given, self.setup = name, buffer, given, setup
        self.most = max(setup.sizes)
        self.kept: Any = None
        self.combined: Any = None
        self.y = torch.empty(0)

    def dispatch(self, dtype: str, hook: bool = False) -> Any:
        """A dispatch, and its hook called at once."""
        given = self.given
        made = self.buffer.low_latency_dispatch(
            given.x, given.topk_idx, self.most, self.setup.experts, use_fp8=dtype == "fp8", return_recv_hook=hook
        )
        if hook:
            made[4]()
        return made

    def keep(self, dtype: str) -> None:
        """Have one whose handle and rows, as bf16, the works below use."""
        self.kept = made = self.dispatch(dtype)
        if dtype == "bf16":
            self.y = made[0]
            return
        rows, scales = made[0]
        flat = dequantise(rows.flatten(0, 1), scales.contiguous().flatten(0, 1))
        self.y = flat.view(rows.shape).bfloat16()

    def combine(self, hook: bool = False) -> None:
        """The kept rows, weighted and summed."""
        given = self.given
        made = self.buffer.low_latency_combine(self.y, given.topk_idx, given.topk_weights, self.kept[2], return_recv_hook=hook)
        self.combined = made[0]
        if hook:
            made[2]()

    def step(self, dtype: str) -> None:
        """Dispatch and combine, the latter of rows that lie ready."""
        given = self.given
        made = self.dispatch(dtype)
        y = made[0] if dtype == "bf16" else self.y
        self.combined = self.buffer.low_latency_combine(y, given.topk_idx, given.topk_weights, made[2])[0]

    def forget(self) -> None:
        """Nothing of this lives on."""
        self.kept = self.combined = None
