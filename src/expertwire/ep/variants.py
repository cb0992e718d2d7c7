"""Keywords that callers give beside DeepEP's own: known variants are taken where they ask for nothing, the rest is refused by name.

Callers probe for features by calling and catching `TypeError`, so an unknown name must be one, and must never be swallowed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from expertwire.errors import InvalidTypeError, UnavailableError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Variant:
    """A keyword of some variant of DeepEP. With one of the `neutral` values it asks for nothing; None: it never does by itself."""

    neutral: tuple[object, ...] | None
    instead: str = ""  # what to do where the value is another

    def asks(self, value: object) -> bool:
        """Whether the value asks for something. Compared by identity: a tensor's == is a tensor."""
        return self.neutral is not None and not any(value is one for one in self.neutral)


# SGLang's overlap of combine with the matrix product before it. Its other arguments describe the signals of that product and are not looked
# at without `overlap`: SGLang gives them with overlap=False too.
_SIGNALS = ("block_m", "comp_signal", "num_sms", "packed_recv_count", "src_signal_expect_value", "src_signals", "threshold")
LOW_LATENCY_COMBINE: Mapping[str, Variant] = MappingProxyType(
    {
        "overlap": Variant((False, None), "call combine when the experts' output is complete: give overlap=False"),
        **dict.fromkeys(_SIGNALS, Variant(None)),
    }
)
LOW_LATENCY_DISPATCH: Mapping[str, Variant] = MappingProxyType(
    {
        "use_nvfp4": Variant((False, None), "dispatch bf16 or fp8 (use_fp8) and quantise what was received"),
        "x_global_scale": Variant((None,), "it scales an NVFP4 dispatch, which is not there: quantise what was received"),
    }
)


def keywords(
    known: Mapping[str, Variant] = MappingProxyType({}),
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorates a function of the surface: an unknown keyword raises `InvalidTypeError`, which names it and what there is; a known variant
    is taken away where it asks for nothing, else raises `UnavailableError`, which says what to do. The signature stays as it is."""

    def around(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        own = tuple(name for name in inspect.signature(function).parameters if name != "self")

        @functools.wraps(function)
        def checked(*values: Parameters.args, **named: Parameters.kwargs) -> Result:
            for name in [name for name in named if name not in own]:
                if name not in known:
                    takes = ", ".join((*own, *sorted(known))) or "none"
                    raise InvalidTypeError(f"{function.__qualname__} has no argument {name!r}; it takes {takes}")
                value = named.pop(name)
                if known[name].asks(value):
                    said = value if value is True or value is None else f"a {type(value).__name__}"
                    raise UnavailableError(f"{function.__qualname__}: {name} is {said}, which is not there; {known[name].instead}")
            return function(*values, **named)

        return checked

    return around
