"""Expert parallelism with DeepEP's `Buffer` API.

Importing this loads neither torch nor the native core; touching a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertwire.ep.buffer import Buffer, MemoryPlan, topk_idx_t
    from expertwire.ep.config import Config
    from expertwire.ep.event import EventHandle, EventOverlap
    from expertwire.ep.handle import Handle

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "Handle", "MemoryPlan", "topk_idx_t"]

_HOMES = {
    "Buffer": "buffer",
    "Config": "config",
    "EventHandle": "event",
    "EventOverlap": "event",
    "Handle": "handle",
    "MemoryPlan": "buffer",
    "topk_idx_t": "buffer",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
