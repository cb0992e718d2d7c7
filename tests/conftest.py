"""What tests share: a world of real ranks, open for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import World
from leftovers import held, left_over

WATCHED = {"fabric", "ep", "sim"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="also tests that take gigabytes of memory")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of these rooms leaves no endpoint, region, request, handle, descriptor or thread behind, here or in a rank."""
    if Path(request.path).parent.name not in WATCHED:
        yield
        return
    before = held()
    yield
    (getattr(request.node, "funcargs", None) or {}).clear()  # pytest would keep them a little longer
    more = left_over(before)
    assert not more, f"left behind: {dict(more)}"


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
