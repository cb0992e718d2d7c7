"""The progress token, alone: its deadline, and what a pause of the whole process does to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

from expertwire._native import TokenProbe
from harness import server

TIMEOUT_MS = 1000
PAUSE_S = 1.2 * TIMEOUT_MS / 1000


def wait_while_it_is_held(connection: Connection) -> None:
    """One thread holds it, one waits for it; it is given back when the parent says so. Sends what the waiting one got."""
    token = TokenProbe()
    assert token.take_within(0)
    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(token.take_within(TIMEOUT_MS)))
    waiter.start()
    while not token.wanted():
        os.sched_yield()
    connection.send("waits")
    connection.recv()
    waiter.join(0.1)  # by then it has given up, if it means to
    token.give()
    waiter.join()
    connection.send(got[0])


def test_it_is_not_taken_after_its_deadline() -> None:
    token = TokenProbe()
    assert token.take_within(0)
    before = time.monotonic()
    assert not token.take_within(120)
    assert time.monotonic() - before >= 0.12
    token.give()
    assert token.take_within(0)


def test_a_pause_of_the_process_is_not_held_against_who_has_it() -> None:
    """Stopped for longer than the deadline, and given back right after: as when a debugger or a busy host holds a process."""
    context = server()
    ours, theirs = context.Pipe()
    process = context.Process(target=wait_while_it_is_held, args=(theirs,))
    process.start()
    try:
        assert ours.poll(30)
        assert ours.recv() == "waits"
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(PAUSE_S)  # the pause itself
        ours.send("give it back")
        os.kill(process.pid or 0, signal.SIGCONT)
        assert ours.poll(30)
        assert ours.recv() is True
    finally:
        process.kill()
        process.join()
