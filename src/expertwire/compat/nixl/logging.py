"""What callers import from `nixl.logging`."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """The standard library's logger of that name; nothing is set on it."""
    return logging.getLogger(name)
