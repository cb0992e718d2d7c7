"""The calls that vLLM, SGLang and Megatron-Core make, in the order and with the keywords that stand in their sources. Written anew.

Each runs one layer: tokens out to experts, which multiply by a factor of their own, and home again. What must come home is the oracle's,
bit for bit, from the same seeded tokens of all ranks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from expertwire.compat import deep_ep as ours
from expertwire.ep.plan import expert_first
from expertwire.ep.reference import reference_combine, reference_dispatch, reference_layout
from harness import Rank

HIDDEN, EXPERTS, TOPK = 256, 12, 3
BLOCK = 128  # elements that share a scale
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # bf16, or FP8 with scales
Batch = tuple[Rows, torch.Tensor, torch.Tensor]


def batch(rank: int, seed: int = 0, kind: str = "bf16") -> Batch:
    """x [T, H], ids int64 [T, K], weights f32 [T, K]. A rank in five has no tokens."""
    random = torch.Generator().manual_seed(1009 * seed + rank)
    tokens = 0 if rank % 5 == 2 else 7 + rank
    x = torch.randn((tokens, HIDDEN), generator=random).bfloat16()
    ids = torch.rand((tokens, EXPERTS), generator=random).argsort(1)[:, :TOPK]
    return packed(x, kind), ids, torch.rand((tokens, TOPK), generator=random).softmax(1)


def packed(x: torch.Tensor, kind: str) -> Rows:
    """As callers quantise: "bf16"; "fp8" with a float32 scale for each block, by columns; "ue8m0" with exponents of four in an int32."""
    if kind == "bf16":
        return x
    blocks = x.float().unflatten(1, (HIDDEN // BLOCK, BLOCK))
    exponents = (blocks.abs().amax(2).clamp(min=1e-4) / 448).log2().ceil()
    rows = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn).view_as(x)
    if kind == "fp8":
        return rows, exponents.exp2().t().contiguous().t()
    words = sum((exponents[:, block] + 127).int() << 8 * block for block in range(exponents.shape[1]))
    assert isinstance(words, torch.Tensor)
    return rows, words[:, None]


def unpacked(rows: Rows) -> torch.Tensor:
    """What was packed, in fp32."""
    if isinstance(rows, torch.Tensor):
        return rows.float()
    values, scales = rows
    if scales.dtype == torch.int32:
        shifts = torch.arange(HIDDEN // BLOCK, dtype=torch.int32) * 8
        scales = ((scales >> shifts & 255) - 127).float().exp2()
    return (values.float().unflatten(1, (HIDDEN // BLOCK, BLOCK)) * scales[..., None]).flatten(1)


def factor(experts: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies a row by."""
    return 0.5 + experts.float() / 8


def experts_of(rows: Rows, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted outputs of the experts of a row, summed. ids [N, K] are of all ranks' experts, −1: none."""
    share = torch.where(ids < 0, torch.zeros_like(weights), weights * factor(ids))
    return (unpacked(rows) * share.sum(1, keepdim=True)).bfloat16()


def expected(rank: Rank, node_of: Sequence[int], seed: int = 0, kind: str = "bf16") -> torch.Tensor:
    """What comes home to this rank."""
    batches = [batch(source, seed, kind) for source in range(rank.size)]
    in_ranks = [reference_layout(ids, EXPERTS, node_of).in_rank for _, ids, _ in batches]
    xs, ids, weights = ([one[place] for one in batches] for place in range(3))
    received = reference_dispatch([unpacked(x) for x in xs], in_ranks, ids, weights, EXPERTS)
    first = expert_first(EXPERTS, rank.size)
    ys = []
    for to, one in enumerate(received):
        assert one.topk_idx is not None
        assert one.topk_weights is not None
        ys.append(experts_of(one.x, torch.where(one.topk_idx < 0, -1, one.topk_idx + first[to]), one.topk_weights))
    return reference_combine(ys, in_ranks, node_of)[rank.rank][0]


@contextmanager
def deep_ep_on(node_of: Sequence[int]) -> Iterator[Any]:
    """The module, where ranks are nodes by the environment: a caller of DeepEP cannot say it. The rank is left as it was."""
    os.environ["EXPERTWIRE_NODE_OF"] = ",".join(map(str, node_of))
    os.environ["EXPERTWIRE_TIMEOUT_MS"] = "30000"
    module = ours.install()
    sms = module.Buffer.num_sms
    try:
        yield module
    finally:
        module.Buffer.set_num_sms(sms)
        del os.environ["EXPERTWIRE_NODE_OF"], os.environ["EXPERTWIRE_TIMEOUT_MS"]


# ---- vLLM, deepep_high_throughput


class VllmHighThroughput:
    """Its prepare and finalize, with two handles for its dual-batch overlap."""

    known_ranks = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)

    def __init__(self, buffer: Any, ranks: int, offset: int) -> None:
        self.buffer, self.ranks, self.offset = buffer, ranks, offset
        self.handles: list[Any] = [None, None]

    def config(self, of: Callable[[int], Any]) -> Any:
        return of(self.ranks) if self.ranks in self.known_ranks else None

    def prepare(self, given: Batch, number: int, overlapped: bool) -> Callable[[], tuple[Rows, torch.Tensor, torch.Tensor, Any]]:
        x, ids, weights = given
        previous = self.buffer.capture() if overlapped else None
        per_rank, per_node, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            topk_idx=ids, num_experts=EXPERTS, previous_event=previous, async_finish=False, allocate_on_comm_stream=False
        )
        assert event.event is None
        rows, local, share, counts, handle, event = self.buffer.dispatch(
            x=x,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=1,
            config=self.config(self.buffer.get_dispatch_config),
            previous_event=previous,
            async_finish=not overlapped,
            allocate_on_comm_stream=False,
        )
        self.handles[number] = handle

        def receive() -> tuple[Rows, torch.Tensor, torch.Tensor, Any]:
            assert (event.event is None) == overlapped, "what vLLM decides by"
            if event.event is not None:
                event.current_stream_wait()
            elsewhere = EXPERTS - 1 if self.offset == 0 else 0  # an expert of another rank, which its map turns into −1
            return rows, torch.where(local == -1, elsewhere, local + self.offset), share, torch.tensor(counts, dtype=torch.int32)

        return receive

    def finalize(self, output: torch.Tensor, rows: torch.Tensor, number: int, overlapped: bool) -> None:
        combined, weights, event = self.buffer.combine(
            x=rows,
            handle=self.handles[number],
            topk_weights=None,
            config=self.config(self.buffer.get_combine_config),
            previous_event=self.buffer.capture() if overlapped else None,
            async_finish=not overlapped,
            allocate_on_comm_stream=False,
        )
        assert weights is None
        if event.event is not None:
            event.current_stream_wait()
        output.copy_(combined, non_blocking=True)


def vllm_high_throughput(rank: Rank, node_of: Sequence[int]) -> int:
    first = expert_first(EXPERTS, rank.size)
    offset, end = first[rank.rank], first[rank.rank + 1]
    with deep_ep_on(node_of) as deep_ep:
        assert importlib.util.find_spec("deep_ep") is not None
        assert not hasattr(deep_ep, "ElasticBuffer")
        between = len(set(node_of)) > 1
        buffer = deep_ep.Buffer(
            group=rank.group,
            num_nvl_bytes=32 << 20,
            num_rdma_bytes=(32 << 20) if between else 0,
            low_latency_mode=False,
            num_qps_per_rank=10 if between else 1,
            explicitly_destroy=True,
        )
        deep_ep.Buffer.set_num_sms(16)
        layer = VllmHighThroughput(buffer, rank.size, offset)

        def run(receive: Callable[[], Any]) -> torch.Tensor:
            rows, ids, weights, counts = receive()
            mine = (ids >= offset) & (ids < end)
            assert counts.tolist() == [int((ids[mine] == expert).sum()) for expert in range(offset, end)]
            return experts_of(rows, torch.where(mine, ids, -1), weights)

        for seed, kind in enumerate(("bf16", "fp8")):
            given = batch(rank.rank, seed, kind)
            output = torch.empty((given[1].shape[0], HIDDEN), dtype=torch.bfloat16)
            layer.finalize(output, run(layer.prepare(given, 0, overlapped=False)), 0, overlapped=False)
            assert torch.equal(output, expected(rank, node_of, seed, kind))
        # dual-batch overlap: both dispatches before either combine
        both = [batch(rank.rank, seed) for seed in (2, 3)]
        receivers = [layer.prepare(given, number, overlapped=True) for number, given in enumerate(both)]
        for number, given in enumerate(both):
            output = torch.empty((given[1].shape[0], HIDDEN), dtype=torch.bfloat16)
            layer.finalize(output, run(receivers[number]), number, overlapped=True)
            assert torch.equal(output, expected(rank, node_of, 2 + number))
        buffer.destroy()
    return buffer.num_nodes


# ---- SGLang, deepep, normal mode


def sglang_normal(rank: Rank, node_of: Sequence[int], tuned: bool) -> list[int]:
    """`tuned`: a configuration from its JSON file and asynchronous calls with 128 aligned counts; else its defaults."""
    first = expert_first(EXPERTS, rank.size)[rank.rank]
    with deep_ep_on(node_of) as deep_ep:
        configs = [None, None]
        if tuned:
            parsed = {
                "num_sms": 8,
                "num_max_nvl_chunked_send_tokens": 16,
                "num_max_nvl_chunked_recv_tokens": 256,
                "num_max_rdma_chunked_send_tokens": 8,
                "num_max_rdma_chunked_recv_tokens": 128,
            }
            configs = [deep_ep.Config(**parsed), deep_ep.Config(**parsed)]
        nvl_bytes = rdma_bytes = 0
        for config, of in zip(configs, (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config), strict=True):
            used = config or of(rank.group.size())
            nvl_bytes = max(used.get_nvl_buffer_size_hint(2 * HIDDEN, rank.group.size()), nvl_bytes)
            rdma_bytes = max(used.get_rdma_buffer_size_hint(2 * HIDDEN, rank.group.size()), rdma_bytes)
        queue_pairs = parsed["num_sms"] if tuned else deep_ep.Buffer.num_sms
        more = {"use_fabric": True} if tuned else {}
        buffer = deep_ep.Buffer(
            rank.group, nvl_bytes, rdma_bytes, low_latency_mode=False, num_qps_per_rank=queue_pairs, allow_mnnvl=tuned, **more
        )
        assert not buffer.low_latency_mode, "then SGLang does not clean the low-latency buffer"
        counts: list[int] = []
        for seed, kind in enumerate(("bf16", "ue8m0" if tuned else "fp8")):
            x, ids, weights = batch(rank.rank, seed, kind)
            previous = deep_ep.Buffer.capture() if tuned else None
            per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
                ids.to(torch.int64), EXPERTS, previous_event=previous, async_finish=tuned, allocate_on_comm_stream=previous is not None
            )
            rows, local, share, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=previous,
                async_finish=tuned,
                allocate_on_comm_stream=(previous is not None) and tuned,
                expert_alignment=128 if tuned else 1,
                config=configs[0],
            )
            if tuned:
                event.current_stream_wait()
            output = experts_of(rows, torch.where(local < 0, -1, local + first), share)
            previous = deep_ep.Buffer.capture() if tuned else None
            home, _, event = buffer.combine(
                output,
                handle,
                async_finish=tuned,
                previous_event=previous,
                allocate_on_comm_stream=previous is not None,
                config=configs[1],
            )
            if tuned:
                event.current_stream_wait()
            assert torch.equal(home, expected(rank, node_of, seed, kind))
    return counts  # and never a destroy()


# ---- Megatron-Core, fused_a2a


def megatron_buffer(rank: Rank, hidden_bytes: int) -> Any:
    """One Buffer a process, made anew where its sizes are too small."""
    from deep_ep import Buffer

    nvl_bytes = rdma_bytes = 0
    for config in (Buffer.get_dispatch_config(rank.group.size()), Buffer.get_combine_config(rank.group.size())):
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, rank.group.size()), nvl_bytes)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, rank.group.size()), rdma_bytes)
    buffer = rank.kept.get("megatron")
    if buffer is None or buffer.group != rank.group or buffer.num_nvl_bytes < nvl_bytes or buffer.num_rdma_bytes < rdma_bytes:
        buffer = rank.kept["megatron"] = Buffer(rank.group, nvl_bytes, rdma_bytes)
    return buffer


class MegatronDispatch(torch.autograd.Function):
    """Backward of dispatch is combine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, rank: Rank, overlapped: bool) -> tuple[Any, ...]:
        from deep_ep.utils import EventHandle, EventOverlap

        previous = EventOverlap(EventHandle()) if overlapped else None
        buffer = megatron_buffer(rank, x.size(1) * max(x.element_size(), 2))
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            ids, EXPERTS, previous_event=previous, async_finish=overlapped, allocate_on_comm_stream=overlapped
        )
        rows, local, share, counts, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=overlapped,
            allocate_on_comm_stream=overlapped,
        )
        if overlapped:
            after.current_stream_wait()
        ctx.rank, ctx.handle, ctx.overlapped = rank, handle, overlapped
        return rows, local, share, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        from deep_ep.utils import EventHandle, EventOverlap

        grad_rows, _, grad_share, _, _ = grads
        buffer = megatron_buffer(ctx.rank, grad_rows.size(1) * max(grad_rows.element_size(), 2))
        grad_x, grad_probs, after = buffer.combine(
            grad_rows.contiguous(),
            ctx.handle,
            topk_weights=grad_share.float(),
            previous_event=EventOverlap(EventHandle()) if ctx.overlapped else None,
            async_finish=ctx.overlapped,
            allocate_on_comm_stream=ctx.overlapped,
        )
        if ctx.overlapped:
            after.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class MegatronCombine(torch.autograd.Function):
    """Backward of combine is dispatch, the same way again."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, rank: Rank, handle: Any, overlapped: bool) -> torch.Tensor:
        from deep_ep.utils import EventHandle, EventOverlap

        buffer = megatron_buffer(rank, rows.size(1) * max(rows.element_size(), 2))
        home, _, after = buffer.combine(
            rows,
            handle=handle,
            async_finish=overlapped,
            previous_event=EventOverlap(EventHandle()) if overlapped else None,
            allocate_on_comm_stream=overlapped,
        )
        if overlapped:
            after.current_stream_wait()
        ctx.rank, ctx.handle, ctx.overlapped = rank, handle, overlapped
        return home

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        from deep_ep.utils import EventHandle, EventOverlap

        buffer = megatron_buffer(ctx.rank, grads[0].size(1) * max(grads[0].element_size(), 2))
        grad_rows, _, _, _, _, after = buffer.dispatch(
            grads[0].contiguous(),
            handle=ctx.handle,
            previous_event=EventOverlap(EventHandle()) if ctx.overlapped else None,
            async_finish=ctx.overlapped,
            allocate_on_comm_stream=ctx.overlapped,
        )
        if ctx.overlapped:
            after.current_stream_wait()
        return grad_rows, None, None, None


def megatron(rank: Rank, node_of: Sequence[int]) -> list[float]:
    """`layer_with_gradients` with the replay of its calls."""
    with deep_ep_on(node_of):
        diffs: list[float] = []
        for overlapped in (False, True):

            def dispatch(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, overlapped: bool = overlapped) -> Any:
                return MegatronDispatch.apply(x, ids, probs, rank, overlapped)

            def combine(output: torch.Tensor, handle: Any, overlapped: bool = overlapped) -> Any:
                return MegatronCombine.apply(output, rank, handle, overlapped)

            diffs += layer_with_gradients(rank, node_of, dispatch, combine)
        rank.kept.pop("megatron").destroy()
    return diffs


def layer_with_gradients(
    rank: Rank, node_of: Sequence[int], dispatch: Callable[..., Any], combine: Callable[[torch.Tensor, Any], torch.Tensor]
) -> list[float]:
    """The layer forwards, bit for bit, and backwards: calc_diff of the gradient of x and of that of the probabilities against one process
    in fp32, from which they differ by rounding rows to bf16 on their way.

    `dispatch(x, ids, probs)` gives rows, local ids, shares, counts and what `combine(output, handle)` takes.
    """
    first = expert_first(EXPERTS, rank.size)[rank.rank]
    x, ids, probs = batch(rank.rank)
    assert isinstance(x, torch.Tensor)
    x.requires_grad_()
    probs.requires_grad_()
    rows, local, share, counts, handle = dispatch(x, ids, probs)
    assert counts.tolist() == [int((local == expert).sum()) for expert in range(len(counts))]
    home = combine(experts_of(rows, torch.where(local < 0, -1, local + first), share), handle)
    assert torch.equal(home, expected(rank, node_of))
    pull = torch.randn(home.shape, generator=torch.Generator().manual_seed(rank.rank)).bfloat16()
    home.backward(pull)
    assert x.grad is not None
    assert probs.grad is not None
    plain_x, plain_probs = x.detach().float().requires_grad_(), probs.detach().clone().requires_grad_()
    (plain_x * (plain_probs * factor(ids)).sum(1, keepdim=True)).backward(pull.float())
    return [calc_diff(x.grad, plain_x.grad), calc_diff(probs.grad, plain_probs.grad)]


def calc_diff(found: torch.Tensor, want: torch.Tensor | None) -> float:
    """DeepEP's measure of difference: 1 − 2·Σxy / Σ(x² + y²), in float64."""
    assert want is not None
    x, y = found.double(), want.double()
    total = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / total) if total > 0 else 0.0
