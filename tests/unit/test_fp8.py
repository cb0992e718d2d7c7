"""The low-latency mode's row kernels: every variant gives the bits of plain torch on a CPU."""

from __future__ import annotations

import pytest
import torch

from expertwire import _simulation
from expertwire.ep.low_latency_reference import dequantise, pack_ue8m0, quantise
from expertwire.ep.reference import round_bf16

ISAS = _simulation.rows_isas()
GUARD = 64


def quantised(isa: str, x: torch.Tensor, round_scale: bool, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of bf16 [T, H]; nothing around its outputs may be written."""
    tokens, hidden = x.shape
    blocks = -(-hidden // 128)
    out = torch.full((tokens, hidden + 2 * GUARD), 0x5A, dtype=torch.uint8)
    scales = torch.full((tokens, blocks + 2), -1.0)
    wide = torch.empty(hidden * 2 + shift, dtype=torch.uint8)  # a row may lie at any address
    for token in range(tokens):
        wide[shift:] = x[token].contiguous().view(torch.uint8)
        where = out[token].data_ptr() + GUARD
        _simulation.rows_quantise(isa, where, scales[token].data_ptr() + 4, wide.data_ptr() + shift, hidden, round_scale)
    assert (out[:, :GUARD] == 0x5A).all()
    assert (out[:, GUARD + hidden :] == 0x5A).all()
    assert (scales[:, [0, -1]] == -1.0).all()
    return out[:, GUARD : GUARD + hidden].contiguous().view(torch.float8_e4m3fn), scales[:, 1:-1].contiguous()


def check(isa: str, x: torch.Tensor) -> None:
    for round_scale in (False, True):
        rows, scales = quantised(isa, x, round_scale, shift=1 if round_scale else 0)
        want_rows, want_scales = quantise(x, round_scale)
        assert torch.equal(rows.view(torch.uint8), want_rows.view(torch.uint8))
        assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hidden", [1, 7, 127, 128, 129, 512, 2880, 3584])
def test_quantise_as_torch(isa: str, hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(6, hidden, generator=generator)
    x *= torch.tensor([[1.0], [1e-6], [1e30], [300.0], [0.0], [1e-3]])  # the clamp, the largest, zeros
    check(isa, x.bfloat16())


@pytest.mark.parametrize("isa", ISAS)
def test_every_bf16_against_every_kind_of_block(isa: str) -> None:
    """All 65,536 values, each beside others that make the block's scale small, middling and large."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    for peak in (1.0, 448.0, 3.0e38):
        block = torch.full((len(finite) // 127 + 1, 128), peak).bfloat16()
        for row, part in enumerate(finite.split(127)):
            block[row, : len(part)] = part
        check(isa, block)


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_as_torch_on_cpu(isa: str) -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).bfloat16()
    x[0, 5], x[1, 130], x[2, 299], x[3, 0], x[3, 1] = torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf
    x.view(torch.int16)[4, 7] = -1  # a NaN with its sign set
    check(isa, x)
    rows, scales = quantised(isa, x, False)
    assert rows[0, :128].float().isnan().all()
    assert scales[0, 0].isnan()
    assert rows[1, 130].float().isnan()
    assert (rows[1, 131:256].float() == 0).all()


def test_ue8m0_words() -> None:
    for blocks in (1, 3, 4, 5, 56):
        scales = torch.exp2(torch.randint(-22, 121, (3, blocks), generator=torch.Generator().manual_seed(blocks)).float())
        scales[0, 0] = torch.inf
        words = torch.full((3, -(-blocks // 4)), -1, dtype=torch.int32)
        for row in range(3):
            _simulation.rows_pack_ue8m0(words[row].data_ptr(), scales[row].data_ptr(), blocks)
        assert torch.equal(words, pack_ue8m0(scales))


def test_what_is_quantised_comes_back_within_the_format() -> None:
    x = torch.randn(40, 2880, generator=torch.Generator().manual_seed(1)).bfloat16()
    for round_scale in (False, True):
        rows, scales = quantise(x, round_scale)
        for given in (scales, pack_ue8m0(scales)) if round_scale else (scales,):
            back = dequantise(rows, given).double()
            product, squares = (x.double() * back).sum(), (x.double() ** 2 + back**2).sum()
            assert 1 - 2 * product / squares < 9e-4  # the tolerance of the contract
            assert (back - x.double()).abs().max() < x.abs().max() / 16


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hidden", [1, 33, 256, 257, 2880])
def test_weighted_sums_round_each_product(isa: str, hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    for count in (0, 1, 8, 22):
        rows = torch.randn(count, hidden, generator=generator).bfloat16()
        if count:
            rows[0, :: max(1, hidden // 3)] = torch.inf
            rows[-1, 0] = torch.nan
        weights = torch.randn(count, generator=generator)
        acc = torch.zeros(hidden)
        for row, weight in zip(rows, weights, strict=True):
            acc += weight * row.float()
        out = torch.full((hidden + 2,), -1, dtype=torch.bfloat16)
        _simulation.rows_reduce_weighted(isa, out.data_ptr() + 2, [row.data_ptr() for row in rows], weights.tolist(), hidden)
        assert torch.equal(out[1:-1].view(torch.int16), round_bf16(acc).view(torch.int16))
        assert (out[[0, -1]] == -1).all()
