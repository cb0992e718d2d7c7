"""What tests share: a world of real ranks, open for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import World


@pytest.fixture(scope="session")
def ranks_of_session() -> Iterator[World]:
    """Twelve ranks in processes of their own, begun once."""
    shared = World()
    try:
        yield shared
    finally:
        shared.close()


@pytest.fixture
def world(ranks_of_session: World) -> Iterator[World]:
    """The session's ranks; a test runs its functions on the first n of them, and leaves them without Buffers."""
    yield ranks_of_session
    ranks_of_session.forget()
