"""Keywords of DeepEP's variants: taken where they ask for nothing, refused by name where they do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from expertwire.ep.variants import LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH, keywords
from expertwire.errors import InvalidTypeError, UnavailableError

SIGNALS = torch.zeros(2, dtype=torch.int32)


@keywords(LOW_LATENCY_COMBINE)
def combine(x: int, out: int = 0) -> tuple[int, int]:
    return x, out


@keywords(LOW_LATENCY_DISPATCH)
def dispatch(x: int, use_fp8: bool = True) -> tuple[int, bool]:
    return x, use_fp8


def test_what_asks_for_nothing_is_taken_away() -> None:
    assert combine(1, out=2) == (1, 2)
    assert combine(x=1, out=2, overlap=False) == (1, 2)
    # as SGLang gives them when its overlap is of another kind
    signals: dict[str, Any] = {"packed_recv_count": SIGNALS, "comp_signal": SIGNALS, "block_m": 64, "threshold": 8, "num_sms": 3}
    assert combine(1, overlap=False, **signals) == (1, 0)
    assert combine(1, overlap=False, src_signals=None, src_signal_expect_value=8) == (1, 0)
    assert dispatch(1, use_nvfp4=False, x_global_scale=None, use_fp8=False) == (1, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: combine(1, overlap=True, src_signals=SIGNALS), "combine: overlap is True, which is not there; .* give overlap=False"),
        (lambda: combine(1, overlap=SIGNALS), "combine: overlap is a Tensor"),
        (lambda: dispatch(1, use_nvfp4=True), "dispatch: use_nvfp4 is True, which is not there; dispatch bf16 or fp8"),
        (lambda: dispatch(1, x_global_scale=SIGNALS), "dispatch: x_global_scale is a Tensor, which is not there; .*quantise"),
    ],
    ids=["overlap", "overlap tensor", "nvfp4", "scale"],
)
def test_what_asks_for_something_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        call()


def test_unknown_names_are_a_type_error_that_says_what_there_is() -> None:
    with pytest.raises(InvalidTypeError, match="dispatch has no argument 'use_fp4'; it takes x, use_fp8, use_nvfp4, x_global_scale"):
        dispatch(1, use_fp4=True)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        dispatch(use_fp8=True)


def test_probes_of_the_signature_see_its_own_names_alone() -> None:
    """SGLang passes more to a function that takes any keyword."""
    assert list(inspect.signature(combine).parameters) == ["x", "out"]
