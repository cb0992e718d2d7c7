"""What tests of the command line share."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import server


@pytest.fixture(autouse=True, scope="session")
def signals_that_end_a_process() -> None:
    """A run that was begun in the background, or under nohup, ignores some of them, and so would the commands that tests send them to."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def ranks_from_the_server_of_all_tests() -> None:
    """Before a launcher begins one of its own, which lacks what other tests' ranks need."""
    server()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary directory whose name is short: sockets live in it, and the path of one has 108 bytes at most (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="ew-") as name:
        yield Path(name)
