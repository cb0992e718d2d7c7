"""Expertwire: expert-parallel and KV transport. Importing it loads neither torch nor the native core."""

from __future__ import annotations

__version__ = "0.1.0"
