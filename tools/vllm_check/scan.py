"""Signs of an error in servers' logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

SIGNATURES = re.compile(
    r"Traceback \(most recent call last\)|EngineDead|EngineCore encountered|OutOfMemory|out of memory|MemoryError"
    r"|[Tt]imed? ?out\b|TimeoutError|Segmentation fault|SIGSEGV|SIGABRT|SIGILL|core dumped"
    r"|Aborted|died unexpectedly|[Ww]orker .*(?:died|exited)|terminate called"
    r"|\b(?:ERROR|CRITICAL)\b|\"level\":\"error\"|AddressSanitizer|double free|NIXL_ERR|RuntimeError"
)
# Names of settings, which are no such sign themselves.
HARMLESS = re.compile(r"\w*timeout(?!Error)[\w.']*\s*[=:]|\w+[_-]timeout\w*", re.IGNORECASE)


def signs(lines: Iterable[str]) -> list[str]:
    """Lines with a signature."""
    return [line.rstrip() for line in lines if SIGNATURES.search(HARMLESS.sub("", line))]


def of_logs(paths: Iterable[Path], since: dict[Path, int] | None = None) -> list[str]:
    """The same of files, each from where `since` says, with the files' names."""
    found = []
    for path in paths:
        with path.open("rb") as file:
            file.seek((since or {}).get(path, 0))
            found += [f"{path.name}: {line}" for line in signs(file.read().decode(errors="replace").splitlines())]
    return found


def ends(paths: Iterable[Path]) -> dict[Path, int]:
    """How long they are now."""
    return {path: path.stat().st_size for path in paths if path.exists()}
