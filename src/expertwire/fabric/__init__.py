"""Transport: endpoints, regions, requests, records. Names are loaded when first used; importing this loads no native code."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertwire.fabric.endpoint import Endpoint
    from expertwire.fabric.region import Region
    from expertwire.fabric.request import Chunk, Request, Scope, Signal, Status
    from expertwire.fabric.stats import Statistics

__all__ = ["Chunk", "Endpoint", "Region", "Request", "Scope", "Signal", "Statistics", "Status"]

_HOME = {
    "Endpoint": "endpoint",
    "Region": "region",
    "Chunk": "request",
    "Request": "request",
    "Scope": "request",
    "Signal": "request",
    "Status": "request",
    "Statistics": "stats",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"expertwire.fabric.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
