"""Wrong arguments: an error that names the argument, its value and the limit, before anything is sent; the Buffer works afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ep import odd, work
from expertwire.ep import Buffer
from expertwire.ep.layout import check_node_table
from expertwire.errors import InvalidArgumentError
from harness import World

INVALID, TYPE, UNAVAILABLE = "InvalidArgumentError", "InvalidTypeError", "UnavailableError"
# The methods that callers of DeepEP's Buffer use.
DEEP_EP_NAMES = [
    "capture",
    "clean_low_latency_buffer",
    "combine",
    "destroy",
    "dispatch",
    "get_combine_config",
    "get_comm_stream",
    "get_dispatch_config",
    "get_dispatch_layout",
    "get_local_buffer_tensor",
    "get_low_latency_rdma_size_hint",
    "get_next_low_latency_combine_buffer",
    "is_sm90_compiled",
    "low_latency_clean_mask_buffer",
    "low_latency_combine",
    "low_latency_dispatch",
    "low_latency_query_mask_buffer",
    "low_latency_update_mask_buffer",
    "set_num_sms",
]
# What each wrong call of work.bad_arguments says.
CALLS = {
    "layout ids float": (TYPE, r"topk_idx has dtype torch\.float32; it must be torch\.int64 or torch\.int32"),
    "layout ids 1-D": (INVALID, r"topk_idx has shape \[2\]; it must be \[tokens, top-k\]"),
    "layout ids beyond": (INVALID, r"topk_idx\[2, 1\] is 8\W.* \[0, 8\)"),
    "layout ids below": (INVALID, r"topk_idx\[4, 0\] is -2\W.* \[0, 8\)"),
    "layout no top-k": (INVALID, r"topk_idx has shape \[5, 0\]; top-k must be at least 1"),
    "layout experts 0": (INVALID, "num_experts is 0; it must be at least 1"),
    "layout experts float": (TYPE, r"num_experts must be an int, got 8\.0"),
    "layout experts beyond": (INVALID, r"num_experts is 4097; it must be at most 4096: 2 ranks of max_local_experts=2048"),
    "layout experts huge": (INVALID, "num_experts is 4611686018427387904; it must be at most 4096"),
    "layout not a tensor": (TYPE, r"topk_idx must be a torch\.Tensor, got list"),
    "layout event": (TYPE, "previous_event must be an EventOverlap or None, got int"),
    "layout allocate": (INVALID, "allocate_on_comm_stream is True with previous_event=None and async_finish=False; it needs both"),
    "x float32": (TYPE, r"x has dtype torch\.float32; it must be torch\.bfloat16"),
    "x 1-D": (INVALID, r"x has shape \[32\]; it must be \[tokens, hidden\]"),
    "x no columns": (INVALID, r"x has shape \[5, 0\]; a row needs at least 1 element"),
    "x bf16 with scales": (TYPE, r"x\[0\] has dtype torch\.bfloat16; it must be torch\.float8_e4m3fn or torch\.float8_e4m3fnuz"),
    "x fp8 alone": (TYPE, r"x has dtype torch\.float8_e4m3fn and no scales; FP8 rows are given as a tuple \(x, scales\)"),
    "x of three": (INVALID, "x is a tuple of 3; it must be a tensor or a tuple of FP8 rows and their scales"),
    "scales double": (TYPE, r"x\[1\], the scales, has dtype torch\.float64; it must be torch\.float32 or torch\.int32"),
    "scales rows": (INVALID, r"x\[1\], the scales, has shape \[4, 2\]; it must be \[5, scales\]"),
    "scales none": (INVALID, r"x\[1\], the scales, has shape \[5, 0\]; a row needs at least 1 scale"),
    "x meta": (UNAVAILABLE, "x is on device meta; it must be a CPU or a CUDA tensor"),
    "x sparse": (INVALID, r"x has layout torch\.sparse_coo; it must be strided"),
    "x tokens": (INVALID, r"is_token_in_rank has shape \[5, \d\]; it must be \[4, \d\]"),
    "per rank missing": (INVALID, "num_tokens_per_rank is None; it must be given when handle is not"),
    "per rank int64": (TYPE, r"num_tokens_per_rank has dtype torch\.int64; it must be torch\.int32"),
    "per rank length": (INVALID, r"num_tokens_per_rank has shape \[\d\]; it must be \[\d\]"),
    "per rank wrong": (INVALID, r"num_tokens_per_rank\[0\] is \d\W.*is_token_in_rank.* \d"),
    "per expert negative": (INVALID, r"num_tokens_per_expert\[3\] is -4; a count must be at least 0"),
    "per expert empty": (INVALID, r"num_tokens_per_expert\.shape\[0\], the number of experts, is 0; it must be at least 1"),
    "in rank shape": (INVALID, r"is_token_in_rank has shape \[5, 1\]; it must be \[5, 2\]"),
    "in rank dtype": (TYPE, r"is_token_in_rank has dtype torch\.int32; it must be torch\.bool"),
    "ids beyond": (INVALID, r"topk_idx\[2, 1\] is 8\W.* \[0, 8\)"),
    "ids length": (INVALID, r"topk_idx has shape \[4, 2\]; it must be \[5, top-k\]"),
    "weights double": (TYPE, r"topk_weights has dtype torch\.float64; it must be torch\.float32"),
    "weights shape": (INVALID, r"topk_weights has shape \[5, 1\]; it must be \[5, 2\]"),
    "weights alone": (INVALID, "topk_idx is None; it must be given when topk_weights is"),
    "alignment 0": (INVALID, "expert_alignment is 0; it must be at least 1"),
    "worst tokens without ids": (INVALID, "topk_idx is None; it must be given when num_worst_tokens is 64"),
    "worst tokens huge": (INVALID, "num_worst_tokens is 1099511627776; it must be at most 268435455"),
    "worst tokens of a handle": (INVALID, "num_worst_tokens is 64 and handle's dispatch had 0; it must be the same, or 0"),
    "worst tokens negative": (INVALID, "num_worst_tokens is -1; it must be at least 0"),
    "config": (TYPE, r"config must be an expertwire\.ep\.Config or None, got tuple"),
    "handle with layout": (INVALID, "num_tokens_per_rank is given .* must be None when handle is given"),
    "handle with tokens": (INVALID, r"x has shape \[4, 32\]; it must be \[5, hidden\]"),
    "handle type": (TYPE, "handle must be the Handle that a dispatch returned, got tuple"),
    "handle foreign": (INVALID, "handle was made by another Buffer"),
    "combine foreign": (INVALID, "handle was made by another Buffer"),
    "combine no handle": (TYPE, "handle must be the Handle that a dispatch returned, got NoneType"),
    "combine rows": (INVALID, r"x has shape \[\d+, 32\]; it must be \[\d+, hidden\]"),
    "combine dtype": (TYPE, r"x has dtype torch\.float16; it must be torch\.bfloat16"),
    "combine weights shape": (INVALID, r"topk_weights has shape \[\d+, 2\]; it must be \[\d+, top-k\]"),
    "combine weights 0": (INVALID, r"topk_weights\.shape\[1\] is 0; it must be at least 1"),
    "combine bias rows": (INVALID, r"bias has shape \[4, 32\]; it must be \[5, 32\]"),
    "combine bias columns": (INVALID, r"bias has shape \[5, 31\]; it must be \[5, 32\]"),
    "combine bias dtype": (TYPE, r"bias\[1\] has dtype torch\.float32; it must be torch\.bfloat16"),
    "combine three": (INVALID, "bias has 3 tensors; it must be one tensor or a tuple of two"),
    "tensor dtype": (TYPE, r"dtype must be a torch\.dtype, got 'int8'"),
    "tensor offset": (INVALID, r"offset is 4; it must be a multiple of 8, the bytes of torch\.int64"),
    "tensor beyond": (INVALID, r"size is \[1024, 1048576\]: 1073741824 bytes from offset 0; the region has \d+ bytes"),
    "tensor negative": (INVALID, r"size\[0\] is -1; it must be at least 0"),
    "tensor rdma": ("StateError", "get_local_buffer_tensor with use_rdma_buffer on a Buffer without the low-latency mode"),
    "stream": (UNAVAILABLE, "no streams"),
    "per node missing": (INVALID, "num_tokens_per_rdma_rank is None; it must be given when handle is not"),
    "per node wrong": (INVALID, r"num_tokens_per_rdma_rank\[[01]\] is \d\W.*is_token_in_rank.* \d"),
}
CONSTRUCTIONS = {
    "nvl negative": (INVALID, "num_nvl_bytes is -1; it must be at least 0"),
    "nvl float": (TYPE, r"num_nvl_bytes must be an int, got 1000000000\.0"),
    "rdma negative": (INVALID, "num_rdma_bytes is -5; it must be at least 0"),
    "unknown": (TYPE, "Buffer has no argument 'use_fabrik'; .* use_fabric"),
    "low latency": (INVALID, "num_rdma_bytes is 0; low_latency_mode needs what get_low_latency_rdma_size_hint says"),
    "queue pairs": (INVALID, "num_qps_per_rank is 0; it must be at least 1"),
    "timeout nan": (TYPE, "timeout_ms must be an int, got nan"),
    "timeout 0": (INVALID, "timeout_ms is 0; it must be at least 1"),
    "experts": (INVALID, "max_local_experts is 0; it must be at least 1"),
    "nvl huge": (INVALID, "num_nvl_bytes is 4611686018427387904; it must be at most 281474976710656"),
    "rdma huge": (INVALID, "num_rdma_bytes is 1180591620717411303424; it must be at most 281474976710656"),
    "experts huge": (INVALID, "max_local_experts is 4611686018427387904; it must be at most 1048576"),
    "timeout huge": (INVALID, "timeout_ms is 4611686018427387904; it must be at most 86400000"),
    "nodes unhashable": (TYPE, r"node_of is \[\[0\], \[0\]\]; it must list hashable names of nodes"),
    "nodes no list": (TYPE, "node_of is 7; it must list hashable names of nodes"),
    "group": (TYPE, r"group is a str; it must be a torch\.distributed ProcessGroup"),
    "nodes": (INVALID, r"node_of has 3 entries \(\[0, 0, 0\]\); the group has 2 ranks"),
    "provider": (TYPE, "provider must be a str, got 7"),
    "rdma small": ("CapacityError", r"num_rdma_bytes is 1000; the rings of 2 ranks on 2 nodes need at least \d+ bytes"),
}


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_wrong_arguments_are_named(world: World, node_of: tuple[int, ...]) -> None:
    for errors in world.run(2, work.bad_arguments, node_of):
        for name, (kind, _, message) in errors.items():
            assert kind == CALLS[name][0], f"{name}: {kind}: {message}"
            assert re.search(CALLS[name][1], message), f"{name}: {message}"
        assert errors.keys() == {name for name in CALLS if len(set(node_of)) > 1 or not name.startswith("per node")}


def test_wrong_constructions_are_named(world: World) -> None:
    for errors in world.run(2, work.bad_construction):
        assert errors.keys() == CONSTRUCTIONS.keys()
        for name, (kind, _, message) in errors.items():
            assert kind == CONSTRUCTIONS[name][0], f"{name}: {kind}: {message}"
            assert re.search(CONSTRUCTIONS[name][1], message), f"{name}: {message}"


def test_a_plan_that_nothing_could_hold_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_max_recv_tokens is 4611686018427387904; it must be at most 2147483647"):
        Buffer.memory_plan([0, 1], num_max_recv_tokens=1 << 62, hidden=7168)
    with pytest.raises(InvalidArgumentError, match="hidden is 1099511627776; it must be at most 16777216"):
        Buffer.memory_plan([0, 1], num_max_recv_tokens=1, hidden=1 << 40)
    with pytest.raises(InvalidArgumentError, match="node_of has no entries"):
        Buffer.memory_plan([])
    largest = Buffer.memory_plan([0, 1], num_max_recv_tokens=(1 << 31) - 1, hidden=1 << 24, num_topk=1 << 16)[0]
    assert largest.data_bytes > 2 << 55, "64 bits do not wrap within the limits"
    shape = {"num_max_dispatch_tokens_per_rank": 1 << 27, "hidden": 1 << 24, "num_experts": 4096, "num_topk": 2048}
    largest = Buffer.memory_plan([0, 0], low_latency_mode=True, **shape)[0]
    assert largest.low_latency_data_bytes > 1 << 59, "nor do they beyond: 2 × 2^27 tokens × 2048 × 2^25 bytes are no bytes in 64 bits"


def test_nodes_may_be_a_tensor_and_count_by_value() -> None:
    assert check_node_table("node_of", torch.tensor([0, 1, 1, 0]), 4) == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("node_of", "message"),
    [
        ([-1, -1], r"node_of\[0\] is -1; a node's number is at least 0"),
        (torch.tensor([0, -2]), r"node_of\[1\] is -2"),
        ("ab", "node_of is 'ab'; it must be a list with one node for each rank"),
        ({0: 1, 1: 1}, "it must be a list"),
        ({0, 1}, "it must be a list"),
    ],
    ids=str,
)
def test_what_is_no_node_table_is_refused(node_of: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_node_table("node_of", node_of, 2)


def test_every_name_of_deep_ep_is_there() -> None:
    for name in DEEP_EP_NAMES:
        assert callable(getattr(Buffer, name))


def test_a_combine_may_have_another_hidden_size(world: World) -> None:
    assert world.run(3, odd.other_hidden, (0, 0, 1)) == [True, True, True]


def test_lazily_negated_weights_arrive_negated(world: World) -> None:
    assert world.run(2, odd.negated_weights) == [[-2.0], [-2.0]]


def test_torchs_default_device_is_not_ours(world: World) -> None:
    assert world.run(3, odd.default_device, (0, 0, 1)) == [True, True, True]


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_what_is_sent_may_lie_in_the_region(world: World, node_of: tuple[int, ...]) -> None:
    assert world.run(2, odd.rows_in_the_region, node_of) == [[], []]


def test_a_rank_without_descriptors_is_named_by_all_and_splits_no_node() -> None:
    own = World(2)
    try:
        (short, nodes), (others, theirs) = own.run(2, odd.few_files)
    finally:
        own.close()
    assert nodes == theirs == (0, 0)
    assert short
    for (_, _, message), (_, _, other_message) in zip(short, others, strict=True):
        assert "Too many open files" in message or "ulimit -n" in message, message
        assert "rank 0" in other_message, other_message


def test_destroy_waits_for_another_thread_by_a_deadline(world: World) -> None:
    (kind, _, message), took_s = world.run(1, odd.a_call_that_does_not_end)[0]
    assert kind == "DeadlineError"
    assert "destroy waited 400 ms for the call of another thread to end" in message
    assert took_s < 10


def test_construction_compares_ranks(world: World) -> None:
    for kind, _, message in world.run(3, work.mismatched_construction):
        assert kind == "MismatchError"
        assert "disagree on num_rdma_bytes: rank 0 has '8388608', rank 2 has '9437184'" in message


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 0, 1)], ids=str)
def test_what_callers_read(world: World, node_of: tuple[int, ...]) -> None:
    for rank, found in enumerate(world.run(3, work.attributes, node_of)):
        assert (found["rank"], found["group_size"], found["num_nvl_bytes"], found["num_rdma_bytes"]) == (rank, 3, 4 << 20, 8 << 20)
        assert (found["low_latency_mode"], found["explicitly_destroy"], found["enable_shrink"], found["num_sms"]) == (
            False,
            True,
            True,
            20,
        )
        assert found["region"] == 4 << 20
        assert found["part"] == (3, 5)
        if max(node_of) == 0:
            received = found["prefix"][-1][rank]
            assert found["handle"] == [(3, 3), (3, 1), (3, 1), (received,), (5, 3), (5, 3)]
        else:
            assert found["handle"] == [(5, 3), (2, 1), (3, 1), None, (2,), None, (3,), None, (5, 2), None]
            assert found["prefix"] == sorted(found["prefix"])


def test_the_plan_is_what_is_allocated(world: World) -> None:
    for control, staging, data, total, region in world.run(4, work.bench_layout):
        assert region == data
        assert total == control + staging + data
        assert min(control, staging) > 0


def test_every_region_is_as_large_as_planned(world: World) -> None:
    options = [
        {"num_nvl_bytes": 1 << 20},
        {"num_nvl_bytes": 100_001, "num_rdma_bytes": 4 << 20, "max_local_experts": 7},
        {"low_latency_mode": True, "num_rdma_bytes": 100_001},
        {"low_latency_mode": True, "num_rdma_bytes": 1 << 20, "num_nvl_bytes": 3 << 20, "max_local_experts": 7},
    ]
    for found in world.run(4, work.allocated, options):
        for planned, has in found:
            assert planned == has


def test_the_least_memory_for_a_low_latency_shape_is_enough(world: World) -> None:
    for least, hint in world.run(4, work.least_low_latency):
        assert 0 < least < hint


def test_a_low_latency_plan_needs_a_size_or_a_shape() -> None:
    with pytest.raises(InvalidArgumentError, match="num_rdma_bytes is 0 with low_latency_mode"):
        Buffer.memory_plan([0, 1], low_latency_mode=True)
    with pytest.raises(InvalidArgumentError, match="num_experts is 0"):
        Buffer.memory_plan([0, 1], low_latency_mode=True, num_max_dispatch_tokens_per_rank=8, hidden=16)
