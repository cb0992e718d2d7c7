"""What tests share: a world of real ranks, open for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Twelve ranks in processes of their own; a test runs its functions on the first n of them."""
    shared = World()
    try:
        yield shared
    finally:
        shared.close()
