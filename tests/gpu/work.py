"""What a rank does with a Buffer on CUDA tensors in tests that need a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from ep.cases import Case, expert_output, inputs
from expertwire.ep import Buffer
from expertwire.errors import DeadlineError, StateError, WorstTokensError
from harness import Rank


def plain(value: Any) -> Any:
    if value is None:
        return None
    bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
    return value.contiguous().view(bits).cpu().numpy()


def gpu(value: Any) -> Any:
    """The same, strides included, on the current GPU."""
    if isinstance(value, tuple):
        return tuple(gpu(one) for one in value)
    return None if value is None else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda").copy_(value)


def buffer_of(rank: Rank, **options: Any) -> Buffer:
    """Made once for each number of ranks and options."""
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    key = ("buffer", rank.size, *sorted(options.items()))
    if key not in rank.kept:
        rank.kept[key] = Buffer(rank.group, **{"num_nvl_bytes": 64 << 20, "timeout_ms": 30_000, "device": "cuda", **options})
    return rank.kept[key]


def layout_of(buffer: Buffer, ids: torch.Tensor, experts: int) -> dict[str, Any]:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }


def run_case(rank: Rank, case: Case, worst: int = 0, asynchronous: bool = False, buffer: Buffer | None = None) -> dict[str, Any]:
    """The case of tests/ep, by the names of its oracle; of worst-token results the rows that count."""
    buffer = buffer_of(rank) if buffer is None else buffer
    given = inputs(case, rank.rank)
    ids, weights = gpu(given.topk_idx), gpu(given.topk_weights)
    layout = layout_of(buffer, ids, case.experts)
    out: dict[str, Any] = {
        "per_rank": plain(layout["num_tokens_per_rank"]),
        "per_expert": plain(layout["num_tokens_per_expert"]),
        "in_rank": plain(layout["is_token_in_rank"]),
    }
    options: dict[str, Any] = {"num_worst_tokens": worst} if worst else {}
    received, got_ids, got_weights, counts, handle, event = buffer.dispatch(
        gpu(given.sent()), topk_idx=ids, topk_weights=weights, expert_alignment=8, async_finish=asynchronous, **layout, **options
    )
    assert (event.event is not None) == asynchronous
    event.current_stream_wait()
    x, scales = received if isinstance(received, tuple) else (received, None)
    if worst:
        assert isinstance(counts, torch.Tensor)
        assert counts.is_cuda
        assert len(x) == worst
        out |= {"counts": counts.tolist(), "real_counts": handle.real_counts.tolist()}
        rows = int(handle.num_tokens_matrix[:, rank.rank].sum())
        assert bool((got_ids[rows:] == -1).all()), "ids behind the last row"
    else:
        rows = len(x)
        out |= {"counts": counts, "real_counts": list(handle.num_recv_tokens_per_expert), "src_idx": plain(handle.recv_src_idx)}
    out |= {"x": plain(x[:rows]), "scales": plain(None if scales is None else scales[:rows])}
    out |= {"topk_idx": plain(got_ids[:rows]), "topk_weights": plain(None if got_weights is None else got_weights[:rows])}
    y = expert_output(x, rank.rank)
    bias = gpu(given.biases) if len(given.biases) == 2 else gpu(next(iter(given.biases), None))
    combined, combined_weights, event = buffer.combine(y, handle, topk_weights=got_weights, bias=bias, async_finish=asynchronous)
    event.current_stream_wait()
    out |= {"combined": plain(combined), "combined_weights": plain(combined_weights)}
    again, *_, event = buffer.dispatch(gpu(given.sent(again=True)), handle=handle, **options)
    x, scales = again if isinstance(again, tuple) else (again, None)
    out |= {"again": plain(x[:rows]), "again_scales": plain(None if scales is None else scales[:rows])}
    if scales is None:  # where it lies already
        out["again_combined"] = plain(buffer.combine(x, handle)[0])
    torch.cuda.synchronize()
    buffer.check()
    return out


def replays(rank: Rank, case: Case, worst: int, steps: int) -> list[dict[str, Any]]:
    """A captured layout, dispatch, experts and combine, replayed with other rows and routing each time, eager calls between."""
    buffer = buffer_of(rank)

    def step_inputs(step: int) -> Any:
        return inputs(replace(case, seed=case.seed + step), rank.rank)

    first = step_inputs(0)
    x, ids, weights = gpu(first.x), gpu(first.topk_idx), gpu(first.topk_weights)
    made: dict[str, Any] = {}

    def layer() -> None:
        layout = layout_of(buffer, ids, case.experts)
        received, _, got_weights, counts, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_worst_tokens=worst, **layout
        )
        combined, combined_weights, _ = buffer.combine(expert_output(received, rank.rank), handle, topk_weights=got_weights)
        made.update(combined=combined, combined_weights=combined_weights, real_counts=handle.real_counts, counts=counts)

    layer()  # eager, so that all kernels are there
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    kept = dict(made)
    results = []
    for step in range(steps):
        given = step_inputs(step)
        x.copy_(given.x)
        ids.copy_(given.topk_idx)
        weights.copy_(given.topk_weights)
        graph.replay()
        if step % 5 == 4:  # eager traffic behind a replay, nothing waited for
            eager = run_case(rank, replace(case, seed=case.seed + step))
            assert len(eager["combined"]) == len(given.x)
        torch.cuda.synchronize()
        results.append(
            {name: plain(kept[name]) for name in ("combined", "combined_weights")} | {"real_counts": kept["real_counts"].tolist()}
        )
    buffer.check()
    del graph
    return results


def overflow(rank: Rank, case: Case, worst: int) -> tuple[str, bool]:
    """What the call after one with more rows than `worst` says, and whether the Buffer works on."""
    buffer = buffer_of(rank)
    given = inputs(case, rank.rank)
    ids = gpu(given.topk_idx)
    layout = layout_of(buffer, ids, case.experts)
    buffer.dispatch(gpu(given.x), topk_idx=ids, topk_weights=gpu(given.topk_weights), num_worst_tokens=worst, **layout)
    torch.cuda.synchronize()
    try:
        buffer.get_dispatch_layout(ids, case.experts)
    except WorstTokensError as error:
        return str(error), run_case(rank, case)["combined"] is not None
    return "", False


def uncaptured(rank: Rank) -> str:
    """What a capture without num_worst_tokens says."""
    buffer = buffer_of(rank)
    case = Case((0,) * rank.size, (4,) * rank.size)
    given = inputs(case, rank.rank)
    x, ids = gpu(given.x), gpu(given.topk_idx)
    layout = layout_of(buffer, ids, case.experts)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            buffer.dispatch(x, topk_idx=ids, **layout)
    except StateError as error:
        return str(error)
    return ""


def one_stays_away(rank: Rank) -> tuple[str, str, float]:
    """A dispatch that the last rank does not come to: what the others are told, what a later call says, and a sum on the GPU after it."""
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    buffer = Buffer(rank.group, num_nvl_bytes=8 << 20, timeout_ms=2_000, device="cuda")
    case = Case((0,) * rank.size, (4,) * rank.size)
    said = later = ""
    try:
        if rank.rank < rank.size - 1:
            given = inputs(case, rank.rank)
            ids = gpu(given.topk_idx)
            layout = layout_of(buffer, ids, case.experts)
            try:
                buffer.dispatch(gpu(given.x), topk_idx=ids, **layout)
            except DeadlineError as error:
                said = str(error)
            try:
                buffer.dispatch(gpu(given.x), topk_idx=ids, **layout)
            except StateError as error:
                later = str(error)
    finally:
        buffer.destroy()
    return said, later, float(torch.ones(1024, device="cuda").sum())


class Microbatch:
    """Rows that experts multiply on a stream of their own, so that two such overlap: one is dispatched while the other's experts work."""

    def __init__(self, rank: Rank, buffer: Buffer, number: int) -> None:
        self.buffer, self.number, self.scale = buffer, number, 1 + rank.rank / 8
        self.case = Case((0,) * rank.size, (40 + 8 * number,) * rank.size, hidden=1024, experts=32, seed=60 + number)
        self.given = [inputs(self.case, one) for one in range(rank.size)]
        mine = self.given[rank.rank]
        self.x, self.ids, self.weights = gpu(mine.x), gpu(mine.topk_idx), gpu(mine.topk_weights)
        self.stream = torch.cuda.Stream()
        self.rank = rank
        self.handle: Any = None
        self.rows: Any = None
        self.sums: Any = None
        self.event: Any = None

    def dispatch(self) -> None:
        with torch.cuda.stream(self.stream):
            layout = layout_of(self.buffer, self.ids, self.case.experts)
            self.rows, _, _, _, self.handle, self.event = self.buffer.dispatch(
                self.x,
                topk_idx=self.ids,
                topk_weights=self.weights,
                num_worst_tokens=sum(self.case.tokens),
                previous_event=Buffer.capture() if not torch.cuda.is_current_stream_capturing() else None,
                async_finish=True,
                **layout,
            )

    def experts(self) -> None:
        """In place, many small kernels of its own stream."""
        with torch.cuda.stream(self.stream):
            self.event.current_stream_wait()
            for _ in range(8):
                self.rows.mul_(1)
            self.rows.mul_(self.scale)

    def combine(self) -> None:
        with torch.cuda.stream(self.stream):
            self.sums, _, self.event = self.buffer.combine(self.rows, self.handle, async_finish=True)

    def finish(self) -> None:
        with torch.cuda.stream(self.stream):
            self.event.current_stream_wait()

    def right(self, where: str) -> None:
        torch.cuda.synchronize()
        self.buffer.check()
        mine = self.given[self.rank.rank]
        owner = mine.topk_idx // (self.case.experts // self.rank.size)
        total = torch.zeros(mine.x.shape)
        for one in range(self.rank.size):
            y = (mine.x.float() * (1 + one / 8)).bfloat16().float()
            total += torch.where((owner == one).any(1, keepdim=True), y, 0.0)
        assert torch.equal(self.sums.cpu(), total.bfloat16()), f"sums of microbatch {self.number} {where}"


def _overlapped(both: list[Microbatch]) -> None:
    first, second = both
    first.dispatch()
    second.dispatch()
    first.experts()
    first.combine()
    second.experts()
    second.combine()
    for one in both:
        one.finish()


def microbatches(rank: Rank, recorded: bool) -> None:
    """Two at once, each on its stream, both handles live; the same recorded into one graph and replayed."""
    buffer = buffer_of(rank)
    both = [Microbatch(rank, buffer, number) for number in range(2)]
    for step in range(5):
        _overlapped(both)
        for one in both:
            one.right(f"in step {step}")
    if not recorded:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for one in both:
            one.stream.wait_stream(here)
        _overlapped(both)
        for one in both:
            here.wait_stream(one.stream)
    for step in range(10):
        for one in both:
            one.sums.fill_(-1)
        graph.replay()
        for one in both:
            one.right(f"in replay {step}")


def two_threads(rank: Rank) -> None:
    """A thread for each microbatch, as dual-batch overlap has them: they hand the turn over between calls, in the same order everywhere."""
    buffer = buffer_of(rank)
    both = [Microbatch(rank, buffer, number) for number in range(2)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        torch.cuda.set_device(buffer.runtime.device)
        try:
            for _ in range(6):
                for call in (both[number].dispatch, both[number].experts, both[number].combine, both[number].finish):
                    assert turns[number].acquire(timeout=30), "the other thread has not handed over"
                    call()
                    turns[1 - number].release()
        except BaseException as error:
            failures.append(error)
            turns[1 - number].release()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for one in both:
        one.right("of a thread")
