"""What a rank does in tests of CUDA graphs: layers whose experts change nothing, so that their sums are known on the device.

A sum is then a small multiple of one bf16 row: exact in fp32 in any order, and rounded once. (`work.replays` has experts that do something,
and the oracle.)
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from expertwire.ep import Buffer
from expertwire.ep.layout import expert_bounds
from expertwire.errors import CapacityError, DeadlineError, StateError, WorstTokensError
from gpu.work import buffer_of, layout_of
from harness import Rank


class Layer:
    """Layout, dispatch with num_worst_tokens and combine of these inputs, `calls` times in a row."""

    def __init__(self, rank: Rank, buffer: Any, tokens: int, hidden: int = 512, experts: int = 32, topk: int = 4, calls: int = 1) -> None:
        self.rank, self.buffer, self.experts, self.calls = rank, buffer, experts, calls
        self.x = torch.zeros((tokens, hidden), dtype=torch.bfloat16, device="cuda")
        self.ids = torch.full((tokens, topk), -1, device="cuda")
        self.weights = torch.ones((tokens, topk), device="cuda")
        totals: list[Any] = [None] * rank.size
        dist.all_gather_object(totals, tokens, group=rank.group)
        self.worst = max(sum(totals), 1)
        self.bounds = torch.tensor(expert_bounds(experts, rank.size)[1:], device="cuda")
        self.sums: list[torch.Tensor] = []
        self.counts: Any = None
        self.graph: Any = None

    def fill(self, seed: int, ids: str = "random") -> None:
        """Other rows and routing, in place."""
        random = torch.Generator("cuda").manual_seed(seed * 64 + self.rank.rank)
        self.x.copy_(torch.randn(self.x.shape, generator=random, device="cuda"))
        if ids == "none":
            self.ids.fill_(-1)
            return
        self.ids.copy_(torch.rand((len(self.ids), self.experts), generator=random, device="cuda").topk(self.ids.shape[1], dim=1).indices)
        if ids == "sparse":
            self.ids.masked_fill_(torch.rand(self.ids.shape, generator=random, device="cuda") < 0.5, -1)

    def run(self) -> None:
        self.sums = []
        for _ in range(self.calls):
            layout = layout_of(self.buffer, self.ids, self.experts)
            rows, _, _, counts, handle, _ = self.buffer.dispatch(
                self.x, topk_idx=self.ids, topk_weights=self.weights, num_worst_tokens=self.worst, **layout
            )
            self.sums.append(self.buffer.combine(rows, handle)[0])
            self.counts = counts, handle.real_counts

    def capture(self) -> Layer:
        """Called once, so that its kernels are there, then recorded."""
        self.run()
        for _ in range(2):  # what that call received is given back, and nobody uses it any more
            torch.cuda.synchronize()
            self.buffer.statistics()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        return self

    def wanted(self) -> torch.Tensor:
        owner = torch.where(self.ids >= 0, torch.bucketize(self.ids, self.bounds, right=True), self.rank.size)
        times = torch.zeros((len(self.ids), self.rank.size + 1), device="cuda").scatter_(1, owner, 1.0)[:, :-1].sum(1, keepdim=True)
        return (self.x.float() * times).bfloat16()

    def right(self, where: str) -> None:
        torch.cuda.synchronize()
        self.buffer.check()
        wanted = self.wanted()
        for number, sums in enumerate(self.sums):
            assert torch.equal(sums, wanted), f"sums of call {number} on rank {self.rank.rank} {where}"


def dead(*layers: Layer) -> None:
    """Their graphs and tensors are gone."""
    for layer in layers:
        layer.graph, layer.sums, layer.counts = None, [], None
    gc.collect()
    torch.cuda.synchronize()


def two_shapes(rank: Rank) -> None:
    """Two shapes captured on one Buffer, without tokens on some ranks and at T = 0 on all, replayed with eager calls between, behind which
    nothing is waited for; eager results that live are not touched by replays. Ranks enter the captures at different times."""
    buffer = buffer_of(rank)
    ragged = (0, 33, 7, 0, 64, 1, 12, 5)[rank.rank]
    layers = [Layer(rank, buffer, 24, 512), Layer(rank, buffer, ragged, 1040, experts=8 * rank.size + 3, topk=3), Layer(rank, buffer, 0)]
    for layer in layers:
        for _ in range(30 * rank.rank):  # who comes later to it than others
            layer.buffer.get_dispatch_layout(layer.ids, layer.experts)
        layer.fill(1)
        layer.capture()
    eager = Layer(rank, buffer, 24, 512)
    for step in range(20):
        for layer in layers:
            layer.fill(100 + step, ("random", "sparse", "none")[step % 3])
        eager.fill(500 + step)
        layout = layout_of(buffer, eager.ids, eager.experts)
        kept = buffer.dispatch(eager.x, topk_idx=eager.ids, topk_weights=eager.weights, **layout)
        before = kept[0].clone()
        for layer in layers if step % 2 else layers[::-1]:
            layer.graph.replay()
        eager.run()
        layers[0].graph.replay()
        for number, layer in enumerate((*layers, eager)):
            layer.right(f"of layer {number} in step {step}")
        assert torch.equal(kept[0], before), f"what an eager dispatch received, on rank {rank.rank} in step {step}"
    dead(*layers, eager)


def many_calls(rank: Rank) -> tuple[int, int, int]:
    """58 dispatches in one graph, three such, and eager traffic: bytes of one result, and of the graphs' part of the data region after one
    graph and after three."""
    buffer = buffer_of(rank, num_nvl_bytes=32 << 20)  # that no other test captures on
    layers = [Layer(rank, buffer, 32, 1024, calls=58) for _ in range(3)]
    held = []
    for number, layer in enumerate(layers):
        layer.fill(number)
        layer.capture()
        held.append(buffer.statistics()["graph_bytes"])
    for step in range(3):
        for number, layer in enumerate(layers):
            layer.fill(10 * step + number)
            layer.graph.replay()
        eager = Layer(rank, buffer, 32, 1024)
        eager.fill(step)
        eager.run()
        for number, layer in enumerate((*layers, eager)):
            layer.right(f"of graph {number} in step {step}")
    result = layers[0].worst * (2 * 1024 + 4 * 8 + 4 * 4 + 4)
    dead(*layers)
    return result, held[0], held[2]


def largest(rank: Rank) -> str:
    """A batch that no longer fits is refused with numbers; the largest that does is replayed 100 times."""
    buffer = buffer_of(rank, num_nvl_bytes=16 << 20)
    row = 2 * 1024 + 4 * 8 + 4 * 4 + 4
    most = (16 << 20) * 3 // 4 // row // rank.size  # tokens of a rank: a quarter of the region stays eager
    said, layer = "", None
    for tokens in (most + most // 8, most - 2 * 4096 // row - 64):
        layer = Layer(rank, buffer, tokens, 1024)
        layer.fill(tokens)
        try:
            layer.capture()
        except CapacityError as error:
            said = str(error)
            torch.cuda.synchronize()
    assert layer is not None
    for step in range(100):
        layer.fill(step)
        layer.graph.replay()
        if step % 25 == 24:
            layer.right(f"in replay {step} of the largest batch")
    dead(layer)
    return said


def overflow(rank: Rank) -> list[str]:
    """Replays with more rows than num_worst_tokens: what the next call says, and sums of the replay after it, which fits."""
    buffer = buffer_of(rank)
    layer = Layer(rank, buffer, 16)
    layer.worst = 3 * rank.size
    layer.fill(1, "none")
    layer.capture()
    said = []
    for step in range(3):
        layer.fill(step)  # 16 tokens with four of 32 experts each
        layer.graph.replay()
        torch.cuda.synchronize()
        try:
            buffer.check()
        except WorstTokensError as error:
            said.append(str(error))
        layer.fill(step, "none")
        layer.ids[:2].copy_(torch.arange(4, device="cuda"))
        layer.graph.replay()
        layer.right(f"behind an overflow in step {step}")
    dead(layer)
    return said


def poisoned_counts(rank: Rank) -> None:
    """Every slot of the counts is written by each replay."""
    buffer = buffer_of(rank)
    for local in (1, 3, 37, 257, 1025):
        experts = local * rank.size
        topk = min(4, experts)
        layer = Layer(rank, buffer, 9, 64, experts, topk)
        layer.fill(local)
        layer.capture()
        for step in range(2):
            layer.fill(10 * local + step, ("random", "none")[step])
            everyone: list[Any] = [None] * rank.size
            dist.all_gather_object(everyone, layer.ids.cpu(), group=rank.group)
            ids = torch.cat(everyone)
            wanted = torch.bincount(ids[ids >= 0], minlength=experts)[local * rank.rank : local * (rank.rank + 1)].int()
            for counts in layer.counts:
                counts.fill_(-7)
            layer.graph.replay()
            torch.cuda.synchronize()
            for counts in layer.counts:  # rounded up to 1
                assert torch.equal(counts.cpu(), wanted), f"{local} local experts, step {step}, rank {rank.rank}"
        dead(layer)


def _fails(buffer: Any) -> str:
    try:
        buffer.check()
    except (DeadlineError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _hasty_buffer(rank: Rank, *shape: int) -> Any:
    """One whose deadlines are short, made when kernels for the shape (tokens, hidden) have been compiled: to compile takes longer."""
    Layer(rank, buffer_of(rank), *shape).run()
    return Buffer(rank.group, num_nvl_bytes=16 << 20, timeout_ms=1_500, device="cuda")


def left_out(rank: Rank) -> tuple[str, str]:
    """A replay that the last rank does not come to: what the others are told, what a later call says, and then reset() and replays that are
    right, of the graph of before."""
    buffer = _hasty_buffer(rank, 12, 512)
    try:
        layer = Layer(rank, buffer, 12, 512)
        layer.fill(1)
        layer.capture()
        layer.graph.replay()
        layer.right("before")
        said = later = ""
        if rank.rank < rank.size - 1:
            layer.graph.replay()
            torch.cuda.synchronize()
            said = _fails(buffer)
            later = _fails(buffer)
        buffer.reset(20_000)  # who was left out comes to it early
        for step in range(5):
            layer.fill(step)
            layer.graph.replay()
            layer.right(f"in replay {step} behind a reset")
        layer.run()
        layer.right("eagerly behind a reset")
        dead(layer)
        return said, later
    finally:
        buffer.destroy()


def at_the_same_time(rank: Rank) -> str:
    """Two graphs replayed on two streams, which nobody may do: what the next call says where it was seen (not where each rank ran them one
    after the other, in an order of its own), and after reset() all is well."""
    buffer = _hasty_buffer(rank, 64, 2048)
    try:
        layers = [Layer(rank, buffer, 64, 2048, calls=20) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in layers]
        for number, layer in enumerate(layers):
            layer.fill(number)
            layer.capture()
        torch.cuda.synchronize()
        for _ in range(3):
            for stream, layer in zip(streams, layers, strict=True):
                with torch.cuda.stream(stream):
                    layer.graph.replay()
        torch.cuda.synchronize()
        said = _fails(buffer)
        everyone: list[Any] = [None] * rank.size
        dist.all_gather_object(everyone, said, group=rank.group)
        buffer.reset(20_000)  # who was left out comes to it early
        for number, layer in enumerate(layers):
            layer.fill(7 + number)
            layer.graph.replay()
            layer.right("behind a reset")
        dead(*layers)
        return next((one for one in everyone if one), "")
    finally:
        buffer.destroy()
