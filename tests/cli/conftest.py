"""What tests of the command line share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import server


@pytest.fixture(autouse=True)
def ranks_from_the_server_of_all_tests() -> None:
    """Before a launcher begins one of its own, which lacks what other tests' ranks need."""
    server()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary directory whose name is short: sockets live in it, and the path of one has 108 bytes at most (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="ew-") as name:
        yield Path(name)
