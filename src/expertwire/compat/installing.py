"""How a module of another project's name is put among the imported ones, or is refused where the real one is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from expertwire.errors import StateError


def install(name: str, mark: str, is_ours: Callable[[ModuleType], bool], put: Callable[[], ModuleType], *, replace: bool) -> ModuleType:
    """Module `name`: ours where it is imported, our shim (a folder with `mark`) where installed, else what `put` makes.

    Raises `StateError`: another one is there, and `replace` is not True.
    """
    present = sys.modules.get(name)
    if present is not None and is_ours(present):
        return present
    spec = _installed(name) if present is None else None
    if spec is not None and spec.origin is not None and (Path(spec.origin).parent / mark).exists():
        return importlib.import_module(name)
    if not replace and (present is not None or spec is not None):
        found = getattr(present, "__spec__", None) if spec is None else spec
        where = getattr(found, "origin", None) or "an unknown place"
        raise StateError(
            f"another {name} is {'imported' if spec is None else 'installed'} already, from {where}: uninstall it, "
            "or call install(replace=True) before anything takes names from it"
        )
    for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[each]
    return put()


def _installed(name: str) -> ModuleSpec | None:
    """What an import would find. A folder without code (a namespace, such as a checkout beside the caller) is nothing."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.loader is None or spec.origin is None else spec
