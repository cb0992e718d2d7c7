"""What callers import from `deep_ep.utils`."""

from __future__ import annotations

from expertwire.ep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


def check_nvlink_connections(group: object) -> None:
    """Nothing to check: which ranks share memory is proved when a Buffer is made, and nothing depends on NVLink on CPU tensors."""
