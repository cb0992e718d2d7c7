"""What ranks do in tests of arguments, failures, sharing and teardown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from expertwire.ep import Buffer, Config, EventOverlap
from expertwire.errors import ExpertwireError
from harness import Rank

EXPERTS, TOPK, HIDDEN = 8, 2, 32
Described = tuple[str, int, str]  # class, rank of a PeerError or -1, message


def described(error: BaseException) -> Described:
    return (type(error).__name__, getattr(error, "rank", -1), str(error))


def caught(work: Callable[[], object]) -> Described:
    """The error that `work` raises."""
    try:
        work()
    except (ExpertwireError, KeyboardInterrupt) as error:
        return described(error)
    raise AssertionError("nothing was raised")


def rows_of(rank: int, tokens: int = 5, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids that reach every rank of up to eight, weights."""
    x = (torch.arange(tokens * hidden).view(tokens, hidden) % 61 + rank).bfloat16()  # small enough for exact sums of two
    ids = (torch.arange(tokens * TOPK).view(tokens, TOPK) * 3 + rank) % EXPERTS
    return x, ids, torch.rand((tokens, TOPK), generator=torch.Generator().manual_seed(rank))


def dispatch(buffer: Any, rank: int, tokens: int = 5, hidden: int = HIDDEN) -> tuple[Any, ...]:
    """One dispatch with all that belongs to it."""
    x, ids, weights = rows_of(rank, tokens, hidden)
    return dispatch_rows(buffer, x, ids, weights)


def dispatch_rows(buffer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, experts: int = EXPERTS) -> tuple[Any, ...]:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    result: tuple[Any, ...] = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )
    return result


def round_trip(buffer: Any, rank: int, tokens: int = 5, hidden: int = HIDDEN) -> None:
    """A dispatch and a combine of what came; each token comes back once per rank that had it."""
    x, ids, weights = rows_of(rank, tokens, hidden)
    received, _, _, _, handle, _ = dispatch_rows(buffer, x, ids, weights)
    combined, _, _ = buffer.combine(received, handle)
    times = handle.is_token_in_rank.sum(1, keepdim=True)
    assert torch.equal(combined, (x.float() * times).bfloat16()), "a round trip brought other rows back"


# ---- arguments


def bad_arguments(rank: Rank, node_of: Sequence[int]) -> dict[str, Described]:
    """Every wrong call, by name; then a right one."""
    buffer = rank.buffer(node_of)
    other = rank.buffer(node_of, num_rdma_bytes=1 << 20)
    x, ids, weights = rows_of(rank.rank)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    received, _, received_weights, _, handle, _ = buffer.dispatch(x, **layout)
    foreign = dispatch(other, rank.rank)[4]
    wrong = per_rank.clone()
    wrong[0] += 1
    negative = per_expert.clone()
    negative[3] = -4
    beyond = ids.clone()
    beyond[2, 1] = EXPERTS
    below = ids.clone()
    below[4, 0] = -2

    def send(rows: Any = x, **changes: Any) -> Callable[[], object]:
        return lambda: buffer.dispatch(rows, **{**layout, **changes})

    def back(rows: Any = received, of: Any = handle, **changes: Any) -> Callable[[], object]:
        return lambda: buffer.combine(rows, of, **changes)

    def ask(*arguments: Any, **named: Any) -> Callable[[], object]:
        return lambda: buffer.get_dispatch_layout(*arguments, **named)

    tokens, hidden = x.shape
    calls = {
        "layout ids float": ask(ids.float(), EXPERTS),
        "layout ids 1-D": ask(ids[0], EXPERTS),
        "layout ids beyond": ask(beyond, EXPERTS),
        "layout ids below": ask(below, EXPERTS),
        "layout no top-k": ask(ids[:, :0], EXPERTS),
        "layout experts 0": ask(ids, 0),
        "layout experts float": ask(ids, 8.0),
        "layout experts beyond": ask(ids, 2048 * rank.size + 1),
        "layout experts huge": ask(ids, 1 << 62),
        "layout not a tensor": ask(ids.tolist(), EXPERTS),
        "layout event": ask(ids, EXPERTS, previous_event=3),
        "layout allocate": ask(ids, EXPERTS, allocate_on_comm_stream=True),
        "x float32": send(x.float()),
        "x 1-D": send(x[0]),
        "x no columns": send(x[:, :0]),
        "x bf16 with scales": send((x, weights)),
        "x fp8 alone": send(x.to(torch.float8_e4m3fn)),
        "x of three": send((x.to(torch.float8_e4m3fn), weights, weights)),
        "scales double": send((x.to(torch.float8_e4m3fn), weights.double())),
        "scales rows": send((x.to(torch.float8_e4m3fn), weights[1:])),
        "scales none": send((x.to(torch.float8_e4m3fn), weights[:, :0])),
        "x meta": send(x.to("meta")),
        "x sparse": send(x.float().to_sparse().bfloat16()),
        "x tokens": send(x[:-1]),
        "per rank missing": send(num_tokens_per_rank=None),
        "per rank int64": send(num_tokens_per_rank=per_rank.long()),
        "per rank length": send(num_tokens_per_rank=torch.zeros(rank.size + 1, dtype=torch.int32)),
        "per rank wrong": send(num_tokens_per_rank=wrong),
        "per expert negative": send(num_tokens_per_expert=negative),
        "per expert empty": send(num_tokens_per_expert=per_expert[:0]),
        "in rank shape": send(is_token_in_rank=in_rank[:, :1]),
        "in rank dtype": send(is_token_in_rank=in_rank.int()),
        "ids beyond": send(topk_idx=beyond),
        "ids length": send(topk_idx=ids[1:]),
        "weights double": send(topk_weights=weights.double()),
        "weights shape": send(topk_weights=weights[:, :1]),
        "weights alone": send(topk_idx=None),
        "alignment 0": send(expert_alignment=0),
        "worst tokens without ids": send(num_worst_tokens=64, topk_idx=None, topk_weights=None),
        "worst tokens huge": send(num_worst_tokens=1 << 40),
        "worst tokens of a handle": lambda: buffer.dispatch(x, handle=handle, num_worst_tokens=64),
        "worst tokens negative": send(num_worst_tokens=-1),
        "config": send(config=(20, 6)),
        "handle with layout": send(handle=handle),
        "handle with tokens": lambda: buffer.dispatch(x[1:], handle=handle),
        "handle type": lambda: buffer.dispatch(x, handle=(1, 2)),
        "handle foreign": lambda: buffer.dispatch(x, handle=foreign),
        "combine foreign": back(of=foreign),
        "combine no handle": back(of=None),
        "combine rows": back(torch.cat([received, received[:1]])),
        "combine dtype": back(received.half()),
        "combine weights shape": back(topk_weights=received_weights[1:]),
        "combine weights 0": back(topk_weights=received_weights[:, :0]),
        "combine bias rows": back(bias=x[1:]),
        "combine bias columns": back(bias=x[:, 1:]),
        "combine bias dtype": back(bias=(x, x.float())),
        "combine three": back(bias=(x, x, x)),
        "tensor dtype": lambda: buffer.get_local_buffer_tensor("int8"),
        "tensor offset": lambda: buffer.get_local_buffer_tensor(torch.int64, offset=4),
        "tensor beyond": lambda: buffer.get_local_buffer_tensor(torch.int8, size=(1 << 10, 1 << 20)),
        "tensor negative": lambda: buffer.get_local_buffer_tensor(torch.int8, size=(-1,)),
        "tensor rdma": lambda: buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True),
        "stream": buffer.get_comm_stream,
    }
    if len(set(node_of)) > 1:
        calls["per node missing"] = send(num_tokens_per_rdma_rank=None)
        calls["per node wrong"] = send(num_tokens_per_rdma_rank=per_node + 1)
    errors = {name: caught(call) for name, call in calls.items()}
    assert (tokens, hidden) == x.shape
    round_trip(buffer, rank.rank)
    return errors


def bad_construction(rank: Rank) -> dict[str, Described]:
    """Constructions that every rank refuses by itself."""

    def make(**options: Any) -> Callable[[], object]:
        return lambda: Buffer(rank.group, **options)

    return {
        name: caught(call)
        for name, call in {
            "nvl negative": make(num_nvl_bytes=-1),
            "nvl float": make(num_nvl_bytes=1e9),
            "rdma negative": make(num_rdma_bytes=-5),
            "unknown": make(use_fabrik=True),
            "low latency": make(low_latency_mode=True),
            "queue pairs": make(num_qps_per_rank=0),
            "timeout nan": make(timeout_ms=float("nan")),
            "timeout 0": make(timeout_ms=0),
            "experts": make(max_local_experts=0),
            "nvl huge": make(num_nvl_bytes=1 << 62),
            "rdma huge": make(num_rdma_bytes=1 << 70),
            "experts huge": make(max_local_experts=1 << 62),
            "timeout huge": make(timeout_ms=1 << 62),
            "nodes unhashable": make(node_of=[[0]] * rank.size),
            "nodes no list": make(node_of=7),
            "group": lambda: Buffer("world"),
            "nodes": make(node_of=[0] * (rank.size + 1)),
            "provider": make(provider=7),
            "rdma small": make(node_of=list(range(rank.size)), num_rdma_bytes=1000),
        }.items()
    }


def attributes(rank: Rank, node_of: Sequence[int]) -> dict[str, Any]:
    """What callers read from outside, and the keywords that they give, beside what a launcher may leave in every worker (SPEC E10)."""
    os.environ.update(LOCAL_RANK="0", RANK="99", WORLD_SIZE="1")
    buffer = Buffer(
        group=rank.group,
        num_nvl_bytes=4 << 20,
        num_rdma_bytes=8 << 20,
        low_latency_mode=False,
        num_qps_per_rank=10,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
        comm=None,
        use_fabric=True,
        allow_nvlink_for_normal_mode=True,
        is_intranode=False,
        node_of=node_of,
    )
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        del os.environ[name]
    names = ("rank", "group_size", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "explicitly_destroy", "enable_shrink", "num_sms")
    found = {name: getattr(buffer, name) for name in names}
    assert buffer.group is rank.group
    assert buffer.runtime is not None
    x, ids, weights = rows_of(rank.rank)
    _, _, _, _, handle, event = dispatch_rows(buffer, x, ids, weights)
    assert isinstance(event, EventOverlap)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, no_ids, no_weights, counts, without, _ = buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert)
    assert (no_ids, no_weights) == (None, None)
    assert counts == list(handle.num_recv_tokens_per_expert), "counts do not need top-k"
    assert torch.equal(buffer.combine(rows, without)[0], (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())
    found["handle"] = [None if entry is None else tuple(entry.shape) for entry in handle]
    found["prefix"] = (handle[0] if len(handle) == 6 else handle[-4]).tolist()
    first, *_, last = handle
    assert first is handle[0]
    assert last is handle[-1]
    buffer.combine(torch.zeros((handle.num_recv_tokens, HIDDEN), dtype=torch.bfloat16), handle, config=Config())
    region = buffer.get_local_buffer_tensor(dtype=torch.int8)
    found["region"] = region.numel()
    found["part"] = tuple(buffer.get_local_buffer_tensor(torch.bfloat16, size=torch.Size([3, 5]), offset=64).shape)
    region.zero_()  # as vLLM does: it is data only
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return found


def mismatched_construction(rank: Rank) -> Described:
    return caught(lambda: Buffer(rank.group, num_rdma_bytes=(8 + rank.rank // 2) << 20))


def bench_layout(rank: Rank) -> list[int]:
    """Bytes that the plan promised and the Buffer has."""
    node_of = [0] * (rank.size // 2) + [1] * (rank.size - rank.size // 2)
    plan = Buffer.memory_plan(node_of, num_max_recv_tokens=64, hidden=HIDDEN, num_topk=TOPK)[rank.rank]
    buffer = Buffer(rank.group, plan.data_bytes, node_of=node_of)
    received, _, _, _, handle, _ = dispatch(buffer, rank.rank, tokens=16)
    region = buffer.get_local_buffer_tensor(torch.uint8)
    assert region.data_ptr() <= received.data_ptr() < region.data_ptr() + region.numel(), "planned for a view"
    buffer.combine(received.clone(), handle)
    buffer.destroy()
    return [plan.control_bytes, plan.staging_bytes, plan.data_bytes, plan.total_bytes, region.numel()]


def allocated(rank: Rank, options: Sequence[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For each of these Buffers: what the plan says, and what its regions have."""
    node_of = [0] * (rank.size // 2) + [1] * (rank.size - rank.size // 2)
    found = []
    for one in options:
        plan = Buffer.memory_plan(node_of, **one)[rank.rank]
        buffer = Buffer(rank.group, node_of=node_of, **one)
        context = buffer.runtime._context
        names = {"control": plan.control_bytes, "staging": plan.staging_bytes, "data": plan.data_bytes}
        if one.get("low_latency_mode"):
            names |= {"ll_control": plan.low_latency_control_bytes, "ll_data": plan.low_latency_data_bytes}
        else:
            assert plan.low_latency_control_bytes == plan.low_latency_data_bytes == 0
        assert plan.total_bytes == sum(names.values())
        found.append((names, {name: context.region_bytes(context.region(name)) for name in names}))
        buffer.destroy()
    return found


def least_low_latency(rank: Rank) -> tuple[int, int]:
    """A dispatch and its combine of every format in the least memory for them; and what the hint would have taken."""
    node_of = [0] * (rank.size // 2) + [1] * (rank.size - rank.size // 2)
    tokens, hidden, experts, topk = 9, 257, 3 * rank.size + 1, 4
    plan = Buffer.memory_plan(
        node_of, low_latency_mode=True, num_max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_experts=experts, num_topk=topk
    )[rank.rank]
    buffer = Buffer(rank.group, num_rdma_bytes=plan.low_latency_data_bytes, low_latency_mode=True, node_of=node_of)
    x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.arange(tokens * topk).view(tokens, topk) % experts
    for use_fp8 in (False, True):
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, experts, use_fp8=use_fp8)
        y = torch.ones(*handle[0].shape, hidden, dtype=torch.bfloat16)
        combined, _, _ = buffer.low_latency_combine(y, ids, torch.ones(tokens, topk), handle)
        assert torch.equal(combined, torch.full_like(combined, topk))
    buffer.destroy()
    return plan.low_latency_data_bytes, Buffer.get_low_latency_rdma_size_hint(tokens, hidden, rank.size, experts)


# ---- failures


def held_results(rank: Rank, node_of: Sequence[int]) -> list[int]:
    """Results held while more come: first views, then copies, none overwritten, memory back when they die."""
    buffer = Buffer(rank.group, 256 << 10, node_of=node_of)
    region = buffer.get_local_buffer_tensor(torch.uint8)
    low, high = region.data_ptr(), region.data_ptr() + region.numel()
    held: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    views = 0
    for turn in range(12):
        x, ids, weights = rows_of(rank.rank + turn, tokens=40, hidden=256)
        received, received_ids, _, _, handle, _ = dispatch_rows(buffer, x, ids, weights)
        views += int(low <= received.data_ptr() < high)
        held.append((received, received.clone(), received_ids))
        assert all(torch.equal(one, before) for one, before, _ in held), "a held result was overwritten"
        buffer.combine(received.clone(), handle)
    copies = len(held) - views
    held.clear()
    del received, received_ids, handle
    round_trip(buffer, rank.rank)
    free = buffer.runtime._pool.free_bytes
    buffer.destroy()
    return [views, copies, free]


def two_batches(rank: Rank, node_of: Sequence[int]) -> int:
    """Two threads alternate on one Buffer, as dual-batch overlap does: both handles live, the order the same on every rank."""
    buffer = rank.buffer(node_of)
    turn = threading.Condition()
    order: list[int] = []
    failures: list[BaseException] = []

    def batch(number: int) -> None:
        try:
            x, ids, weights = rows_of(rank.rank + 10 * number, tokens=17)
            for step in range(6):
                with turn:
                    assert turn.wait_for(lambda step=step: len(order) == 4 * step + number or bool(failures), timeout=20)
                    received, _, _, _, handle, _ = dispatch_rows(buffer, x, ids, weights)
                    order.append(number)
                    turn.notify_all()
                with turn:
                    assert turn.wait_for(lambda step=step: len(order) == 4 * step + 2 + number or bool(failures), timeout=20)
                    combined, _, _ = buffer.combine(received, handle)
                    order.append(number)
                    turn.notify_all()
                times = handle.is_token_in_rank.sum(1, keepdim=True)
                assert torch.equal(combined, (x.float() * times).bfloat16())
        except BaseException as error:
            failures.append(error)
            with turn:
                turn.notify_all()

    threads = [threading.Thread(target=batch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(order)


def crowd(rank: Rank) -> int:
    """Threads that know nothing of each other, on one rank's Buffer."""
    buffer = rank.buffer([0])
    done: list[int] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(25):
                round_trip(buffer, number, tokens=number)
            done.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(done)


def forked(rank: Rank, node_of: Sequence[int]) -> tuple[int, str]:
    """A forked child's calls raise, its exit closes nothing of the parent's."""
    buffer = rank.buffer(node_of)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, ("\n".join(caught(call)[2] for call in (lambda: dispatch(buffer, 0), buffer.destroy))).encode())
            rank.kept.clear()  # destructors in the child do nothing
            del buffer
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    _, status = os.waitpid(child, 0)
    round_trip(buffer, rank.rank)
    return status, said


def crossed_teardown(rank: Rank, node_of: Sequence[int]) -> float:
    """Two Buffers, destroyed in another order on each rank, twice; results outlive them."""
    one = Buffer(rank.group, 4 << 20, node_of=node_of)
    other = Buffer(rank.group, 4 << 20, node_of=node_of, explicitly_destroy=True)
    round_trip(one, rank.rank)
    received = dispatch(other, rank.rank)[0]
    before = received.clone()
    begin = time.monotonic()
    for buffer in (one, other) if rank.rank % 2 else (other, one):
        buffer.destroy()
        buffer.destroy()
    took_s = time.monotonic() - begin
    assert torch.equal(received, before)
    received += 1  # still this process's memory, to read and to write
    assert caught(lambda: round_trip(one, rank.rank))[0] == "StateError"
    return took_s
