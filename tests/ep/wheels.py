"""Callers' own Python, driven on ranks of the tests. Nothing of theirs is here: their wheels must be installed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep.callers import EXPERTS, HIDDEN, batch, deep_ep_on, expected, experts_of, layer_with_gradients
from expertwire.ep.plan import expert_first
from harness import Rank


def megatron_core(rank: Rank, node_of: Sequence[int]) -> list[float]:
    """`fused_dispatch` and `fused_combine` of Megatron-Core, with gradients."""
    with deep_ep_on(node_of), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what it has to do without
        from megatron.core.transformer.moe import fused_a2a

        dist.barrier(rank.group)  # importing takes some ranks longer than a Buffer waits
        assert fused_a2a.HAVE_DEEP_EP
        assert not fused_a2a.HAVE_HYBRIDEP
        fused_a2a.set_deepep_num_sms(16)
        diffs: list[float] = []
        for overlapped in (False, True):

            def dispatch(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, overlapped: bool = overlapped) -> Any:
                return fused_a2a.fused_dispatch(x, ids, probs, EXPERTS, rank.group, overlapped, overlapped)

            def combine(output: torch.Tensor, handle: Any, overlapped: bool = overlapped) -> Any:
                return fused_a2a.fused_combine(output, rank.group, handle, overlapped, overlapped)[0]

            diffs += layer_with_gradients(rank, node_of, dispatch, combine)
        fused_a2a._buffer.destroy()
        fused_a2a._buffer = None
    return diffs


def vllm(rank: Rank, node_of: Sequence[int]) -> int:
    """`DeepEPHTPrepareAndFinalize` of vLLM."""
    first = expert_first(EXPERTS, rank.size)
    offset, end = first[rank.rank], first[rank.rank + 1]
    with deep_ep_on(node_of) as deep_ep, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.model_executor.layers.fused_moe import modular_kernel
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
        from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
        from vllm.utils.import_utils import has_deep_ep, has_deep_ep_v2

        dist.barrier(rank.group)
        modular_kernel.PIN_MEMORY = False  # True where it finds no platform; pinning needs a device
        assert has_deep_ep()
        assert not has_deep_ep_v2()
        buffer = deep_ep.Buffer(group=rank.group, num_nvl_bytes=32 << 20, num_qps_per_rank=1, explicitly_destroy=True)
        layer = DeepEPHTPrepareAndFinalize(buffer, rank.size, 1, offset)
        for seed in range(2):
            x, ids, weights = batch(rank.rank, seed)
            prepared = layer.prepare(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
            rows, scales, counts, received, share = prepared
            assert scales is None
            mine = (received >= offset) & (received < end)
            assert counts.expert_num_tokens_cpu.tolist() == [int((received[mine] == expert).sum()) for expert in range(offset, end)]
            output = torch.empty((ids.shape[0], HIDDEN), dtype=torch.bfloat16)
            mixed = experts_of(rows, torch.where(mine, received, -1), share)
            layer.finalize(output, mixed, share, received, False, TopKWeightAndReduceNoOP())
            assert torch.equal(output, expected(rank, node_of, seed))
        buffer.destroy()
    return buffer.num_nodes
