"""For tests of modules that stand under another project's name: a process without that name, and another package of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


def taken(name: str) -> dict[str, ModuleType]:
    """What of that package is imported."""
    return {each: module for each, module in sys.modules.items() if each.split(".")[0] == name}


@contextmanager
def without(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It begins, and leaves, without the package. One that is installed here is put out of the way."""
    before = taken(name)
    for each in before:
        del sys.modules[each]
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / name / "__init__.py").exists()])
    yield
    for each in taken(name):
        del sys.modules[each]
    sys.modules.update(before)


def other(folder: Path, name: str) -> Path:
    """A folder with another package of that name in it, which may not even be imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('it needs what is not here')\n")
    return folder
