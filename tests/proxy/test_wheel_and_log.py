"""Deadlines on a clock that is a number, and log lines without a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from expertwire.proxy.http.wheel import FAR_S, NEVER, TICK_S, Timed, Wheel
from expertwire.proxy.log import PIPE_BUF, WAITING_MAX, Log
from expertwire.proxy.seam import LogLine


class Clock:
    """A loop of nothing but timers."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.timers.append((self.now + seconds, call))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def run(self, until: float) -> None:
        while self.timers and min(self.timers)[0] <= until:
            self.timers.sort(key=lambda timer: timer[0])
            self.now, call = self.timers.pop(0)
            call()
        self.now = until


class Item(Timed):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.expired: list[float] = []

    def expire(self, now: float) -> None:
        self.expired.append(self.clock.now)


def test_nobody_expires_early_or_more_than_two_ticks_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    wheel = Wheel(clock)  # type: ignore[arg-type]
    items = [Item(clock) for _ in range(50)]
    for index, item in enumerate(items):
        item.due = clock.now + 0.05 + 0.17 * index
        wheel.watch(item, clock.now)
    moved, earlier, never = items[3], items[40], items[20]
    due = [item.due for item in items]
    moved.due = due[3] = clock.now + 6.0
    earlier.due = due[40] = clock.now + 0.3
    wheel.watch(earlier, clock.now)
    never.due = NEVER
    clock.run(1020.0)
    for item, at in zip(items, due, strict=True):
        if item is not never:
            assert len(item.expired) == 1
            assert at <= item.expired[0] <= at + 2 * TICK_S
            assert item.due == NEVER
    assert not never.expired
    assert not clock.timers, "nobody is left, so it turns no more"


def test_who_is_done_is_forgotten_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    wheel = Wheel(clock)  # type: ignore[arg-type]
    item = Item(clock)
    item.due = clock.now + 300.0
    wheel.watch(item, clock.now)
    item.due = NEVER
    clock.run(clock.now + FAR_S + 2 * TICK_S)
    assert item.looked_at == NEVER
    assert not wheel._slots
    assert not item.expired


def test_lines_below_the_level_are_not_made_and_pieces_are_whole_lines() -> None:
    written: list[bytes] = []
    log = Log(written.append, "warning", 3)
    log.event("info", "quiet")
    log.records("info", "request", [LogLine("a")])
    log.records("warning", "request", [LogLine(f"r{index}", path="/" + "x" * (index * 40)) for index in range(200)])
    log.event("error", "loud", why="x")
    log.close()
    lines = [orjson.loads(line) for line in b"".join(written).splitlines()]
    assert [line["event"] for line in lines] == ["request"] * 200 + ["loud"]
    assert {line["worker"] for line in lines} == {3}
    assert [line["request_id"] for line in lines[:3]] == ["r0", "r1", "r2"]
    assert all(piece.endswith(b"\n") for piece in written)
    assert all(len(piece) <= PIPE_BUF or piece.count(b"\n") == 1 for piece in written)


def test_a_reader_that_hangs_costs_lines_and_not_the_loop() -> None:
    written: list[bytes] = []
    gate = threading.Event()

    def write(data: bytes) -> None:
        gate.wait(20.0)
        written.append(data)

    log = Log(write, "info")
    for index in range(WAITING_MAX + 50):
        log.event("info", "one", index=index)
        log.flush()
    gate.set()
    while log._batches.qsize() >= WAITING_MAX:
        time.sleep(0.001)
    log.event("info", "last")
    log.close(10.0)
    lines = [orjson.loads(line) for line in b"".join(written).splitlines()]
    dropped = sum(line["count"] for line in lines if line["event"] == "log_lines_dropped")
    assert dropped > 0
    assert dropped + sum(line["event"] == "one" for line in lines) == WAITING_MAX + 50
    assert [line["event"] for line in lines[-2:]] == ["last", "log_lines_dropped"]
