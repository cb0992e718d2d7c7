"""Transfers between registered memories of agents that know each other by name. Names are loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertwire.transfer.agent import Agent
    from expertwire.transfer.card import Area, Card, Door
    from expertwire.transfer.descriptors import Descriptors
    from expertwire.transfer.directory import Directory
    from expertwire.transfer.listener import Listener
    from expertwire.transfer.requests import Prepared, Transfer
    from expertwire.transfer.states import TransferState
    from expertwire.transfer.store import MetadataStore
    from expertwire.transfer.telemetry import Telemetry
    from expertwire.transfer.textfile import TextFile

__all__ = [
    "Agent",
    "Area",
    "Card",
    "Descriptors",
    "Directory",
    "Door",
    "Listener",
    "MetadataStore",
    "Prepared",
    "Telemetry",
    "TextFile",
    "Transfer",
    "TransferState",
]

_HOME = {
    "Agent": "agent",
    "Area": "card",
    "Card": "card",
    "Descriptors": "descriptors",
    "Directory": "directory",
    "Door": "card",
    "Listener": "listener",
    "MetadataStore": "store",
    "Telemetry": "telemetry",
    "TextFile": "textfile",
    "Prepared": "requests",
    "Transfer": "requests",
    "TransferState": "states",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"expertwire.transfer.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
