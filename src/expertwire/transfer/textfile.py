"""An agent's counters as a file, for whoever collects such files: whole at any time, written once a second while they change."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from expertwire.errors import InvalidArgumentError

__all__ = ["TextFile"]

PERIOD_S = 1.0
NAME_BYTES_MAX = 200  # of the agent's name within the file's: 255 are allowed


class TextFile:
    """Writes what `text()` gives to `folder`/expertwire_NAME_PID.prom, from a thread of its own, until `close()`.

    A file that cannot be written any more is told once, by a warning, and tried again: transfers go on.
    """

    def __init__(self, folder: str, name: str, text: Callable[[], str], period_s: float = PERIOD_S) -> None:
        """Raises `InvalidArgumentError` where the first cannot be written."""
        self.path = Path(folder) / f"expertwire_{quote(name, safe='')[:NAME_BYTES_MAX]}_{os.getpid()}.prom"
        self._text = text
        self._written = ""
        self._failed = False
        self._closed = threading.Event()
        try:
            self._write()
        except OSError as error:
            raise InvalidArgumentError(
                f"EXPERTWIRE_TELEMETRY_FOLDER={folder!r} takes no file ({error.strerror}): give a folder that is there and writable"
            ) from error
        self._thread = threading.Thread(target=self._run, args=(period_s,), name="expertwire-telemetry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write it a last time, and end. The file stays. Again, and in a forked child: nothing."""
        if not self._closed.is_set():
            self._closed.set()
            if self._thread.is_alive():
                self._thread.join()

    def _run(self, period_s: float) -> None:
        last = False
        while not last:
            last = self._closed.wait(period_s)
            try:
                self._write()
            except OSError as error:
                if not self._failed:
                    logging.getLogger(__name__).warning("%s cannot be written: %s", self.path, error)
                self._failed = True

    def _write(self) -> None:
        text = self._text()
        if text == self._written:
            return
        beside = self.path.with_suffix(".tmp")
        try:
            beside.write_text(text)
            beside.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        self._written, self._failed = text, False
