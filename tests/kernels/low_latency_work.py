"""What a rank does in tests of low-latency kernels: cases of tests/ep through the Buffer's own surface, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ep.low_latency_work import Case, check_received, expert_output, inputs, run_case, same
from expertwire.ep.event import in_calling_thread
from expertwire.ep.low_latency import LowLatencyOperations
from expertwire.ep.low_latency_reference import reference_low_latency_combine, reference_low_latency_dispatch
from expertwire.errors import DeadlineError, ExpertwireError, StateError
from harness import Rank
from kernels.interpreted import EXPERTS_MAX, shared

DATA_BYTES = 8 << 20


class Stand(LowLatencyOperations):
    """The low-latency half of a Buffer, over memory that processes share."""

    def __init__(self, rank: Rank, timeout_ms: int, shrink: bool) -> None:
        from expertwire.ep.cuda.low_latency import CudaLowLatency
        from expertwire.ep.cuda.low_latency_exchange import LowLatencyExchange, LowLatencyTuning, low_latency_control_bytes

        self.rank, self.group_size = rank.rank, rank.size
        self.low_latency_mode, self.enable_shrink, self._identity = True, shrink, self
        control = shared(rank, "ll_control", low_latency_control_bytes(rank.size, EXPERTS_MAX))
        data = shared(rank, "ll_data", DATA_BYTES)
        tuning = LowLatencyTuning(send_programs=2, pack_programs=2, sum_programs=2, sum_block=512)
        self.exchange = LowLatencyExchange(control, data, EXPERTS_MAX, timeout_ms, shrink, tuning)
        self.runtime: Any = SimpleNamespace(
            low_latency=CudaLowLatency(self.exchange, EXPERTS_MAX, lambda: False),
            ordered=in_calling_thread,
            device=torch.device("cpu"),
        )

    @contextmanager
    def _calling(self, operation: str) -> Iterator[None]:
        yield

    _holding = _calling


def stand(rank: Rank, timeout_ms: int = 20_000, shrink: bool = False) -> Stand:
    key = ("low latency", rank.size, timeout_ms, shrink)
    if key not in rank.kept:
        rank.kept[key] = Stand(rank, timeout_ms, shrink)
    return rank.kept[key]


def run_cases(rank: Rank, cases: Sequence[Case]) -> list[int]:
    buffer = stand(rank)
    for case in cases:
        try:
            run_case(rank, buffer, case)
        except AssertionError as error:
            raise AssertionError(f"{error} of {case}") from error
    return buffer.exchange.record.tolist()


# ---- two calls at a time


def run_overlapped(rank: Rank, rounds: int) -> str:
    """Two dispatches, then their hooks, in another order on each rank and in each round; the combines likewise.

    Returns what a third is told.
    """
    buffer = stand(rank)
    case = Case(tokens_max=3, hidden=40, experts=4 * rank.size, topk=2)
    refused = ""
    for step in range(rounds):
        cases = [Case(**{**vars(case), "seed": 100 * step + number}) for number in range(2)]
        sent = []
        for one in cases:
            x, ids, _ = inputs(one, rank.rank)
            sent.append(buffer.low_latency_dispatch(x, ids, one.tokens_max, one.experts, use_fp8=False, return_recv_hook=True))
        if step == 0:
            try:
                x, ids, _ = inputs(case, rank.rank)
                buffer.low_latency_dispatch(x, ids, case.tokens_max, case.experts, use_fp8=False, return_recv_hook=True)
            except StateError as error:
                refused = str(error)
        order = [0, 1] if (rank.rank + step) % 2 else [1, 0]
        for number in order:
            sent[number][4]()
        back = [return_rows(rank, buffer, one, made) for one, made in zip(cases, sent, strict=True)]
        for number in reversed(order):
            back[number][1]()
        for one, (combined, _) in zip(cases, back, strict=True):
            assert same(combined, sums(rank, one, None)), f"sums of step {step}"
    return refused


def return_rows(rank: Rank, buffer: Any, case: Case, made: Any, masked: Any = None) -> tuple[torch.Tensor, Any]:
    """Check what came with a dispatch and send it back; the sums-to-be and their hook."""
    received, counts, handle, _, _ = made
    want = reference_low_latency_dispatch([inputs(case, one)[1] for one in range(rank.size)], case.experts, masked)[rank.rank]
    rows = check_received(case, rank, want, (received, counts, handle, counts))
    y = torch.zeros((len(rows), rank.size * case.tokens_max, case.hidden), dtype=torch.bfloat16)
    for expert, part in enumerate(rows):
        y[expert, : len(part)] = expert_output(part, rank.rank, expert)
    _, ids, weights = inputs(case, rank.rank)
    combined, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=True)
    return combined, hook


def sums(rank: Rank, case: Case, masked: Any) -> torch.Tensor:
    """What the oracle gives this rank for a case in bf16."""
    given = [inputs(case, one) for one in range(rank.size)]
    wants = reference_low_latency_dispatch([one[1] for one in given], case.experts, masked)
    ys = []
    for source, want in enumerate(wants):
        parts = [
            torch.stack([given[of][0][token] for of, token, _ in rows]) if rows else torch.empty((0, case.hidden)) for rows in want.rows
        ]
        ys.append([expert_output(part, source, expert) for expert, part in enumerate(parts)])
    return reference_low_latency_combine(ys, wants, [one[2] for one in given], case.hidden, masked)[rank.rank]


# ---- masks and what goes wrong


def one_case(rank: Rank, buffer: Any, case: Case, masked: Any) -> None:
    x, ids, _ = inputs(case, rank.rank)
    made = buffer.low_latency_dispatch(x, ids, case.tokens_max, case.experts, use_fp8=False, return_recv_hook=True)
    made[4]()
    combined, hook = return_rows(rank, buffer, case, made, masked)
    hook()
    assert same(combined, sums(rank, case, masked)), "sums"


def run_masked(rank: Rank) -> None:
    """The last rank is left out, and leaves out the others, for some calls; then all are together again."""
    buffer, last = stand(rank, shrink=True), rank.size - 1
    masked = [[last] if one != last else list(range(last)) for one in range(rank.size)]
    case = Case(tokens_max=2, hidden=24, experts=rank.size + 1, topk=2, seed=50)
    one_case(rank, buffer, case, None)
    for other in masked[rank.rank]:
        buffer.low_latency_update_mask_buffer(other, True)
    status = torch.empty(rank.size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(one in masked[rank.rank]) for one in range(rank.size)]
    for _ in range(2):
        one_case(rank, buffer, case, masked)
    buffer.low_latency_clean_mask_buffer()
    one_case(rank, buffer, case, None)
    assert not any(buffer.exchange.record.tolist())


def run_absent(rank: Rank, shrink: bool) -> str:
    """The last rank does not come. With `shrink` it is masked; else the next call raises, with these words."""
    buffer, last = stand(rank, 250, shrink), rank.size - 1
    if rank.rank == last:
        return ""
    case = Case(tokens_max=2, hidden=16, experts=rank.size, topk=2, seed=60)
    masked = [[last] if one != last else [] for one in range(rank.size)]
    if shrink:
        one_case(rank, buffer, case, masked)
        assert buffer.runtime.low_latency.masked() == [one == last for one in range(rank.size)]
        return ""
    x, ids, _ = inputs(case, rank.rank)
    buffer.low_latency_dispatch(x, ids, case.tokens_max, case.experts)
    try:
        buffer.runtime.low_latency.check()
    except DeadlineError as error:
        return str(error)
    raise AssertionError("nothing was said")


def run_wrong(rank: Rank) -> list[str]:
    """What the call after each mistake says; the Buffer works on."""
    buffer = stand(rank)
    said = []
    case = Case(tokens_max=2, hidden=16, experts=rank.size, topk=2, seed=70)
    x, ids, _ = inputs(case, rank.rank)
    wrong = ids.clone()
    wrong[0, 0] = 99
    twice = torch.zeros_like(ids)
    for tokens_max, given in ((2 + rank.rank, ids), (2, wrong), (2, twice)):
        buffer.low_latency_dispatch(x, given, tokens_max, case.experts)
        try:
            buffer.runtime.low_latency.check()
        except ExpertwireError as error:
            said.append(f"{type(error).__name__}: {error}")
    one_case(rank, buffer, case, None)
    return said
