"""What tests of the command line share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary directory whose name is short: sockets live in it, and the path of one has 108 bytes at most (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="ew-") as name:
        yield Path(name)
