"""SIGTERM and SIGHUP as an exception, so that whoever started ranks ends them, and whoever made files removes them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(KeyboardInterrupt):
    """A signal asked for the end: everything that cleans up after Ctrl-C cleans up after it too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.word = "terminated" if number == signal.SIGTERM else "hung up"
        self.status = 128 + number  # as a shell reports it


@contextmanager
def ends_by_exception() -> Iterator[None]:
    """Raise `Ended` here for the first such signal, and take no notice of more: the clean-up has its own limits.

    A signal that whoever started us ignores (nohup) or handles stays as it is.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
