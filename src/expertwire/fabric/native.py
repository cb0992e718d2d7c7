"""The native core's classes under one name. Only this room imports the core; importing this module loads it."""

from __future__ import annotations

from expertwire._native import (
    Context,
    DispatchResult,
    Exchange,
    ExchangeHandle,
    LowLatency,
    LowLatencyCall,
    PreparedRequest,
    Request,
    memory_available,
    status_name,
)

__all__ = [
    "Context",
    "DispatchResult",
    "Exchange",
    "ExchangeHandle",
    "LowLatency",
    "LowLatencyCall",
    "PreparedRequest",
    "Request",
    "memory_available",
    "status_name",
]
