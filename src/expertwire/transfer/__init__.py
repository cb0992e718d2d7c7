"""Transfers between registered memories of agents that know each other by name. Names are loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertwire.transfer.card import Area, Card, Door
    from expertwire.transfer.descriptors import Descriptors
    from expertwire.transfer.listener import Listener
    from expertwire.transfer.states import TransferState
    from expertwire.transfer.store import MetadataStore
    from expertwire.transfer.telemetry import Telemetry

__all__ = ["Area", "Card", "Descriptors", "Door", "Listener", "MetadataStore", "Telemetry", "TransferState"]

_HOME = {
    "Area": "card",
    "Card": "card",
    "Descriptors": "descriptors",
    "Door": "card",
    "Listener": "listener",
    "MetadataStore": "store",
    "Telemetry": "telemetry",
    "TransferState": "states",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"expertwire.transfer.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
