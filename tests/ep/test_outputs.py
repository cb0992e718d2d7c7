"""Memory of combine's results is used again, and never while a tensor over it lives."""

from __future__ import annotations

import gc
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from expertwire.ep.cpu.outputs import IDLE_BYTES_MAX, SMALL_BYTES, Outputs

ROW = 1 << 19


def test_memory_comes_back_when_the_last_view_has_died() -> None:
    outputs = Outputs()
    whole = outputs.empty((4, ROW), torch.bfloat16)
    address = whole.data_ptr()
    view = whole[1:]
    del whole
    other = outputs.empty((4, ROW), torch.bfloat16)
    assert other.data_ptr() != address
    del view
    gc.collect()
    assert outputs.idle_bytes == 4 << 20
    again = outputs.empty((3, ROW), torch.bfloat16)
    assert again.data_ptr() == address
    assert again.shape == (3, ROW)
    assert again.data_ptr() % 4096 == 0


def test_small_and_empty_results_leave_no_block_behind() -> None:
    outputs = Outputs()
    for shape in ((0, 7168), (3, 8), (1, SMALL_BYTES // 2 - 1)):
        assert outputs.empty(shape, torch.bfloat16).shape == shape
    assert outputs.idle_bytes == 0


def test_a_much_smaller_result_does_not_take_a_large_block() -> None:
    outputs = Outputs()
    large = outputs.empty((64, ROW), torch.bfloat16)
    del large
    small = outputs.empty((2, ROW), torch.bfloat16)
    assert small.untyped_storage().nbytes() == 2 << 20
    assert outputs.idle_bytes == 64 << 20


@given(st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=12))
def test_live_tensors_never_share_memory_and_idle_memory_is_bounded(steps: list[tuple[int, bool]]) -> None:
    outputs = Outputs()
    live: list[torch.Tensor] = []
    for mebibytes, dies in steps:
        if dies and live:
            live.pop(0)
        live.append(outputs.empty((mebibytes, ROW), torch.bfloat16))
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()) for tensor in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert outputs.idle_bytes <= IDLE_BYTES_MAX
