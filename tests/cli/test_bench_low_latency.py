"""The oracle of `bench ep --mode ll`: right by the slow reference, and able to see what it is there to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from expertwire.cli.bench.ep import Setup, make_inputs
from expertwire.cli.bench.ep_low_latency import LowLatencyArm, Wanted, want
from expertwire.cli.bench.paired import Inputs, expert_rows, plain, sent, turn, turn_sent
from expertwire.ep.low_latency_reference import quantise, reference_low_latency_combine, reference_low_latency_dispatch

NODES = (0, 0, 1, 1, 1)


def made(setup: Setup) -> tuple[list[Inputs], list[Wanted]]:
    inputs = [make_inputs(setup, rank) for rank in range(setup.ranks)]
    return inputs, [want(setup, rank, lambda source: inputs[source]) for rank in range(setup.ranks)]


@pytest.mark.parametrize("routing", ["uniform", "holes", "none"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("experts", [11, 4])
def test_what_is_wanted_is_what_the_reference_says(routing: str, dtype: str, experts: int) -> None:
    setup = Setup(NODES, (7, 0, 5, 16, 1), 140, experts, 3, routing, None, (), 1, 0, 5, mode="ll", dtype=dtype)
    inputs, wanted = made(setup)
    received = reference_low_latency_dispatch([one.topk_idx for one in inputs], experts)
    packed = [sent(one.x, dtype) for one in inputs]
    ys = []
    for rank, (one, its) in enumerate(zip(wanted, received, strict=True)):
        assert one.counts == its.counts
        places = [(source, token) for rows in its.rows for source, token, _ in rows]
        assert one.rows.shape == (len(places), 140)
        if places:
            assert torch.equal(one.rows, torch.stack([packed[source][0][token] for source, token in places]))
        if dtype == "fp8" and places:
            assert torch.equal(one.scales, torch.stack([packed[source][1][token] for source, token in places]))
        ys.append(list(expert_rows(plain(one.rows, one.scales), rank).split(one.counts)))
    sums = reference_low_latency_combine(ys, received, [one.topk_weights for one in inputs], 140)
    for one, its in zip(wanted, sums, strict=True):
        assert torch.equal(one.sums, its)


def test_quantised_rows_turn_as_their_source_does() -> None:
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3, 7] = 0.0
    rows, scales = quantise(x)
    before = 0
    for number in (1, 4, 3, 31, 0):
        turn(x, before, number)
        turn_sent(rows, scales, before, number)
        wanted, factors = quantise(x)
        assert torch.equal(rows.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, factors)
        before = number


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_wrong_byte_scale_or_count_is_seen(dtype: str) -> None:
    setup = Setup(NODES, (7, 3, 5, 16, 1), 140, 11, 3, "uniform", None, (), 1, 0, 5, mode="ll", dtype=dtype)
    wanted = made(setup)[1][0]
    arm = LowLatencyArm.__new__(LowLatencyArm)
    vars(arm).update(SimpleNamespace(wanted=wanted).__dict__)
    most, counts = max(wanted.counts), torch.tensor(wanted.counts)
    rows = torch.zeros(len(wanted.counts), most, 140, dtype=wanted.rows.dtype)
    scales = None if wanted.scales is None else torch.zeros(len(wanted.counts), most, 2)
    for expert, (count, end) in enumerate(arm._segments()):
        rows[expert, :count] = wanted.rows[end - count : end]
        if scales is not None and wanted.scales is not None:
            scales[expert, :count] = wanted.scales[end - count : end]
    assert arm._check(rows, scales, counts) == []
    rows.view(torch.uint8)[1, 0, -1] ^= 1
    assert arm._check(rows, scales, counts) == ["dispatch: rows of local expert 1 differ"]
    rows.view(torch.uint8)[1, 0, -1] ^= 1
    if scales is not None:
        scales[2, 0, 1] *= 2
        assert arm._check(rows, scales, counts) == ["dispatch: scales of local expert 2 differ"]
    counts[0] += 1
    assert "dispatch gave counts" in arm._check(rows, scales, counts)[0]
