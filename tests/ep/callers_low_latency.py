"""The low-latency calls of vLLM and SGLang, in the order and with the keywords that stand in their sources. Written anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep.callers import EXPERTS, HIDDEN, TOPK, batch, calc_diff, deep_ep_on, expected, experts_of, factor
from expertwire.ep.layout import expert_bounds
from harness import Rank

MOST = 12  # tokens of a rank; batch() has fewer
FP8_DIFF = 9e-4  # what DeepEP's own tests allow


def plain_expected(rank: int) -> torch.Tensor:
    """Outputs of each token's experts, rounded to bf16 as they travel, times their weights, summed in top-k order in fp32."""
    x, ids, weights = batch(rank)
    assert isinstance(x, torch.Tensor)
    home = torch.zeros(x.shape, dtype=torch.float32)
    for slot in range(TOPK):
        home += (x.float() * factor(ids[:, slot, None])).bfloat16().float() * weights[:, slot, None]
    return home.bfloat16()


def unscaled(received: Any) -> torch.Tensor:
    """What was received, in fp32. Scales are float32 for blocks of 128, or the exponents of four of them in an int32."""
    if isinstance(received, torch.Tensor):
        return received.float()
    rows, scales = received
    if scales.dtype == torch.int32:
        shifts = torch.arange(4, dtype=torch.int32) * 8
        scales = ((scales[..., None] >> shifts & 255) - 127).float().exp2().flatten(2)
    blocks = -(-rows.shape[2] // 128)
    return (rows.float().unflatten(2, (blocks, -1)) * scales[:, :, :blocks, None]).flatten(2)


def experts_over(received: Any, counts: torch.Tensor, first: int) -> torch.Tensor:
    """What a rank's experts make of the valid rows; the rest stays as garbage, which nobody may read."""
    rows = unscaled(received)
    output = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        output[expert, :count] = (rows[expert, :count] * factor(torch.tensor(first + expert))).bfloat16()
    return output


def check(rank: Rank, home: torch.Tensor, fp8: bool) -> None:
    want = plain_expected(rank.rank)
    if fp8:
        assert calc_diff(home, want) < FP8_DIFF
    else:
        assert torch.equal(home, want)


def vllm_low_latency(rank: Rank, node_of: Sequence[int], fp8: bool, ue8m0: bool) -> bool:
    bounds = expert_bounds(EXPERTS, rank.size)
    first, owned = bounds[rank.rank], bounds[rank.rank + 1] - bounds[rank.rank]
    with deep_ep_on(node_of) as deep_ep:
        bytes_needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=rank.size, num_experts=EXPERTS
        )
        buffer = deep_ep.Buffer(
            group=rank.group,
            num_nvl_bytes=4 << 20,
            num_rdma_bytes=bytes_needed,
            low_latency_mode=True,
            num_qps_per_rank=owned,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=True,
            enable_shrink=True,
        )
        handles: list[Any] = [None, None]
        for step in range(4):
            if step == 2:
                clean_buffers(rank, buffer)
            x, ids, weights = batch(rank.rank)
            received, counts, handles[step % 2], _, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=fp8, round_scale=ue8m0, use_ue8m0=ue8m0, async_finish=False, return_recv_hook=True
            )
            hook()
            output = torch.empty((ids.shape[0], HIDDEN), dtype=torch.bfloat16)
            _, _, hook = buffer.low_latency_combine(
                experts_over(received, counts, first),
                ids,
                weights,
                handles[step % 2],
                async_finish=False,
                zero_copy=False,
                return_recv_hook=True,
                out=output,
            )
            hook()
            check(rank, output, fp8)
        mask = torch.zeros(rank.size, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(mask)
        assert not mask.any()
        dist.barrier(rank.group)  # a rank that is gone would be masked
        buffer.destroy()
    return True


def clean_buffers(rank: Rank, buffer: Any) -> None:
    """What vLLM does when it recovers, which all of its ranks do together."""
    dist.barrier(rank.group)
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    dist.barrier(rank.group)


def sglang_auto(rank: Rank, node_of: Sequence[int], hooks: bool) -> bool:
    """Both modes on one Buffer, as SGLang's mode "auto" has them: prefill, then decoding, then prefill again."""
    bounds = expert_bounds(EXPERTS, rank.size)
    first, owned = bounds[rank.rank], bounds[rank.rank + 1] - bounds[rank.rank]
    with deep_ep_on(node_of) as deep_ep:
        nvl_bytes = rdma_bytes = 0
        for config in (deep_ep.Buffer.get_dispatch_config(rank.size), deep_ep.Buffer.get_combine_config(rank.size)):
            nvl_bytes = max(config.get_nvl_buffer_size_hint(2 * HIDDEN, rank.size), nvl_bytes)
            rdma_bytes = max(config.get_rdma_buffer_size_hint(2 * HIDDEN, rank.size), rdma_bytes)
        rdma_bytes = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, rank.size, EXPERTS), rdma_bytes)
        queue_pairs = max(deep_ep.Buffer.num_sms, owned)
        buffer = deep_ep.Buffer(rank.group, nvl_bytes, rdma_bytes, low_latency_mode=True, num_qps_per_rank=queue_pairs, allow_mnnvl=False)
        for _ in range(2):
            prefill(rank, node_of, buffer, first)
            assert buffer.low_latency_mode
            buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
            decode(rank, buffer, first, hooks)
        buffer.destroy()  # SGLang itself never does; these ranks go on
    return True


def prefill(rank: Rank, node_of: Sequence[int], buffer: Any, first: int) -> None:
    x, ids, weights = batch(rank.rank)
    per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        ids, EXPERTS, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    )
    rows, local, share, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
        expert_alignment=1,
        config=None,
    )
    output = experts_of(rows, torch.where(local < 0, -1, local + first), share)
    home, _, _ = buffer.combine(output, handle, async_finish=False, previous_event=None, allocate_on_comm_stream=False, config=None)
    assert torch.equal(home, expected(rank, node_of))


def decode(rank: Rank, buffer: Any, first: int, hooks: bool) -> None:
    x, ids, weights = batch(rank.rank)
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, MOST, EXPERTS, use_fp8=True, async_finish=not hooks, return_recv_hook=hooks, round_scale=False, use_ue8m0=False
    )
    hook() if hooks else event.current_stream_wait()
    signals: dict[str, Any] = {"packed_recv_count": counts, "comp_signal": None, "block_m": 64, "threshold": 0, "num_sms": 3}
    more = {"overlap": False, **signals} if hooks else {}
    home, event, hook = buffer.low_latency_combine(
        x=experts_over(received, counts, first),
        topk_idx=ids,
        topk_weights=weights,
        handle=handle,
        async_finish=not hooks,
        return_recv_hook=hooks,
        **more,
    )
    hook() if hooks else event.current_stream_wait()
    check(rank, home, fp8=True)
