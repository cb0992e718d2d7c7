"""vLLM's own prepare and finalize classes of deepep_high_throughput and deepep_low_latency, on CPU, with our Buffer under `deep_ep`.

What a GPU is needed for in them (streams of dual-batch overlap, FP8 by vLLM's kernels, its experts in Triton) is not run here.
"""

from __future__ import annotations

import os
from typing import Any

from expertwire.cli.launch import Rank, launch

EXPERTS, TOPK, MOST, HIDDEN = 8, 2, 32, 2048  # the least hidden size that vLLM's low-latency class takes
LAYERS = 4
RANKS = 2


def drive(ranks: int = RANKS) -> list[dict[str, float]]:
    """Of each rank the number of wrong rows, by class."""
    return launch(_rank, (), ranks, timeout_s=570)


def _rank(rank: Rank) -> dict[str, float]:
    os.environ.update(EXPERTWIRE_VLLM="deep_ep", EXPERTWIRE_TIMEOUT_MS="30000")
    import vllm.plugins

    vllm.plugins.load_general_plugins()  # ours among them, as every process of vLLM does it
    return {"high_throughput": _high_throughput(rank), "low_latency": _low_latency(rank)}


def _given(rank: int, layer: int) -> tuple[Any, Any, Any]:
    """x bf16 [T, H], weights f32 [T, K], ids i64 [T, K] of one rank."""
    import torch

    chance = torch.Generator().manual_seed(1000 * layer + rank)
    tokens = MOST - 5 * rank - layer
    x = torch.randn((tokens, HIDDEN), generator=chance).bfloat16()
    ids = torch.rand((tokens, EXPERTS), generator=chance).argsort(1)[:, :TOPK].contiguous()
    return x, torch.rand((tokens, TOPK), generator=chance).softmax(1), ids


def _factor(experts: Any) -> Any:
    return 0.5 + experts.float() / 8


def _high_throughput(rank: Rank) -> float:
    """Experts multiply by a factor; partial sums of a rank are rounded to bf16, then summed in order of ranks, as the combine does."""
    import deep_ep
    import torch
    import torch.distributed as dist
    from vllm import envs
    from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    manager = DeepEPHTAll2AllManager.__new__(DeepEPHTAll2AllManager)  # its constructor asks for vLLM's own groups
    manager.cpu_group, manager.internode, manager.num_sms = dist.group.WORLD, False, 20
    envs.VLLM_DEEPEP_BUFFER_SIZE_MB = 32
    buffer = deep_ep.Buffer(**manager._make_all2all_kwargs())
    manager.set_num_sms(16)
    owned = EXPERTS // rank.size
    first = owned * rank.rank
    layer = DeepEPHTPrepareAndFinalize(buffer, num_dispatchers=rank.size, dp_size=rank.size, rank_expert_offset=first)
    wrong = 0.0
    for number in range(LAYERS):
        x, weights, ids = _given(rank.rank, number)
        rows, scales, counts, their_ids, their_weights = layer.prepare(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
        mine = (their_ids >= first) & (their_ids < first + owned)
        assert scales is None
        assert counts.expert_num_tokens_cpu.tolist() == [int((their_ids == first + expert).sum()) for expert in range(owned)]
        made = (rows.float() * (torch.where(mine, their_weights, 0.0) * _factor(their_ids)).sum(1, keepdim=True)).bfloat16()
        home = torch.full_like(x, float("nan"))
        if number % 2:
            layer.finalize_async(home, made, weights, ids, False, TopKWeightAndReduceNoOP())()
        else:
            layer.finalize(home, made, weights, ids, False, TopKWeightAndReduceNoOP())
        want = torch.zeros(x.shape)
        for other in range(rank.size):
            there = (ids >= owned * other) & (ids < owned * (other + 1))
            want += (x.float() * (torch.where(there, weights, 0.0) * _factor(ids)).sum(1, keepdim=True)).bfloat16().float()
        wrong += float((home != want.bfloat16()).any(1).sum())
    buffer.destroy()
    return wrong


def _low_latency(rank: Rank) -> float:
    """Outputs of each expert are rounded to bf16 as they travel; the combine weights and sums them in fp32, in top-k order."""
    import deep_ep
    import torch
    import torch.distributed as dist
    from vllm import envs
    from vllm.distributed.device_communicators.all2all import DeepEPLLAll2AllManager
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    manager = DeepEPLLAll2AllManager.__new__(DeepEPLLAll2AllManager)
    manager.cpu_group, manager.support_fault_tolerance = dist.group.WORLD, False
    envs.VLLM_DEEPEP_BUFFER_SIZE_MB = 32
    owned = EXPERTS // rank.size
    buffer = deep_ep.Buffer(**manager._make_all2all_kwargs(MOST, HIDDEN, rank.size, EXPERTS, owned))
    layer = DeepEPLLPrepareAndFinalize(buffer, max_tokens_per_rank=MOST, num_dispatchers=rank.size)
    wrong = 0.0
    for number in range(LAYERS):
        x, weights, ids = _given(rank.rank, number)
        rows, _, counts, _, _ = layer.prepare(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
        experts = torch.arange(owned * rank.rank, owned * (rank.rank + 1))
        made = (rows.float() * _factor(experts)[:, None, None]).bfloat16()
        for expert, count in enumerate(counts.expert_num_tokens.tolist()):
            made[expert, count:] = float("nan")  # nobody may read what is no row
        home = torch.full_like(x, float("nan"))
        if number % 2:
            hook, receive = layer.finalize_async(home, made, weights, ids, False, TopKWeightAndReduceDelegate())
            hook()
            receive()
        else:
            layer.finalize(home, made, weights, ids, False, TopKWeightAndReduceDelegate())
        want = torch.zeros(x.shape)
        for slot in range(TOPK):
            want += (x.float() * _factor(ids[:, slot, None])).bfloat16().float() * weights[:, slot, None]
        wrong += float((home != want.bfloat16()).any(1).sum())
    buffer.destroy()
    return wrong
