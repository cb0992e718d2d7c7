"""Row kernels: every variant gives the same bits as plain torch arithmetic, in the order of sums that DESIGN fixes."""

from __future__ import annotations

import pytest
import torch

from expertwire import _simulation
from expertwire.ep.reference import round_bf16

ISAS = _simulation.rows_isas()
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0001, 0x8001, 0x7F7F, 0xFF7F]


def random_rows(count: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, columns, generator=generator).to(torch.bfloat16)
    special = torch.tensor(SPECIAL, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    strange = torch.rand(count, columns, generator=generator) < 0.02
    rows[strange] = special[torch.randint(len(SPECIAL), (int(strange.sum()),), generator=generator)]
    return rows


def expected_sum(rows: torch.Tensor, ends: list[int], biases: list[torch.Tensor]) -> torch.Tensor:
    acc = torch.zeros(rows.shape[1])
    for bias in biases:
        acc = acc + bias.float()
    begin = 0
    for end in ends:
        p = torch.zeros(rows.shape[1])
        for row in rows[begin:end]:
            p = p + row.float()
        acc = acc + p
        begin = end
    return round_bf16(acc)


def reduce(isa: str, rows: torch.Tensor, ends: list[int], biases: list[torch.Tensor], misaligned: int = 0) -> torch.Tensor:
    columns = rows.shape[1]
    buffer = torch.full((columns + 64 + misaligned,), -1, dtype=torch.bfloat16)
    begin = (-buffer.data_ptr() // 2) % 32 + misaligned
    out = buffer[begin : begin + columns]
    addresses = [row.data_ptr() for row in rows]
    bias = [b.data_ptr() for b in biases] + [0, 0]
    _simulation.rows_reduce(isa, out.data_ptr(), addresses, ends, bias[0], bias[1], columns)
    assert (buffer[:begin] == -1).all()
    assert (buffer[begin + columns :] == -1).all()
    return out.clone()


@pytest.mark.parametrize("isa", [*ISAS, "best"])
@pytest.mark.parametrize("columns", [1, 7, 31, 32, 33, 64, 100, 2880, 7168])
@pytest.mark.parametrize("ends", [[], [1], [3], [1, 2, 3], [2, 5], [4, 5, 8]])
def test_reduce(isa: str, columns: int, ends: list[int]) -> None:
    for biases in range(3):
        rows = random_rows((ends or [0])[-1], columns, seed=columns + biases)
        bias = list(random_rows(biases, columns, seed=columns + 99))
        got = reduce(isa, rows, ends, bias, misaligned=biases)
        assert torch.equal(got.view(torch.int16), expected_sum(rows, ends, bias).view(torch.int16))


@pytest.mark.parametrize("isa", ISAS)
def test_round_to_nearest_even_over_every_kind_of_value(isa: str) -> None:
    high = torch.arange(0, 1 << 16, dtype=torch.int64)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (high << 16) | low
        values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
        out = torch.empty(len(values), dtype=torch.bfloat16)
        _simulation.rows_round(isa, out.data_ptr(), values.data_ptr(), len(values))
        assert torch.equal(out.view(torch.int16), round_bf16(values).view(torch.int16))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 255, 256, 257, 1000, 14336, 14337])
def test_copy_writes_exactly_its_bytes(streaming: bool, count: int) -> None:
    source = torch.randint(0, 255, (count + 64,), dtype=torch.uint8)
    for shift in (0, 1, 15, 33, 63):
        target = torch.full((count + 256,), 255, dtype=torch.uint8)
        _simulation.rows_copy(target.data_ptr() + 64 + shift, source.data_ptr() + shift % 7, count, streaming)
        assert torch.equal(target[64 + shift : 64 + shift + count], source[shift % 7 : shift % 7 + count])
        assert (target[: 64 + shift] == 255).all()
        assert (target[64 + shift + count :] == 255).all()
