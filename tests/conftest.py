"""What tests share: a world of real ranks, open for the whole session."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import World
from leftovers import forget_what_was_imported, held, left_over

WATCHED = {"fabric", "ep", "sim", "transfer"}
# What pytest-timeout (`timeout`) ends by a signal to Python code is over before this. A call into a library that never comes back heeds no
# signal, and one such once kept a whole run until it was killed: as long after that, a thread of C ends the process and writes every stack.
END_S = 120
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="also tests that take gigabytes of memory")
    parser.addoption("--long", action="store_true", help="also variants marked long: faults and shapes once more, in other combinations")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: a variant of what other tests do, run with --long alone")
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)  # before a test's output is captured
    # Where the run was begun in the background of a script, or by nohup, these are ignored, and would be in all that tests begin.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="a variant: --long"))


def pytest_collection_finish() -> None:
    forget_what_was_imported()


def end_within(config: pytest.Config, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    end_within(item.config, float(item.config.getoption("timeout") or item.config.getini("timeout")) + END_S)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session: pytest.Session) -> None:
    end_within(session.config, END_S)  # what ends the session's ranks may hang, too
    gc.unfreeze()  # what is still frozen when the interpreter ends, its modules call leaked


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
