"""The ways to move bytes that the provider tests go through."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from expertwire import _native
from expertwire.fabric import discover
from expertwire.fabric.config import Settings


@functools.cache
def shm_refused(library: str) -> str:
    """Why this libfabric's shm is not used; "" where it is."""
    rows = [row for row in _native.provider_facts([library], {}) if row["provider"] == "shm"]
    return next((str(row["why"]) for row in rows if not row["usable"]), "" if rows else f"no shm in {library}")


@dataclass(frozen=True)
class Setup:
    """One way to move bytes: the kind of provider and its options."""

    kind: str
    options: dict[str, Any]
    library: str = ""

    def require(self) -> None:
        """Skips the test where this machine lacks the library."""
        if self.library and not _native.library_facts([self.library])["found"]:
            pytest.skip(f"no libfabric at {self.library}")
        if self.options.get("provider") == "shm" and (why := shm_refused(self.library)):
            pytest.skip(why)


def _setups() -> dict[str, Setup]:
    found = {"local": Setup("local", {})}
    wheels = discover.wheel_libraries() or ["mpich/libfabric.so.1"]
    for version, library in (("system", discover.LIBRARY), ("wheel", wheels[0])):
        for path in ("atomic", "message"):
            options = {"libraries": [library], "interface": "lo", "signal_path": path}
            found[f"tcp-{version}-{path}"] = Setup("libfabric", options, library)
    # The system's may be older than 2.5, whose signals over shm were seen with a wrong operand (its row of capabilities_table.cpp).
    found["shm-wheel"] = Setup("libfabric", {"libraries": [wheels[0]], "provider": "shm"}, wheels[0])
    return found


SETUPS = _setups()


def on_library(settings: Settings, which: str) -> Settings:
    """These settings with one libfabric: the one that is "chosen" here, or the "system" one. Skips where that is missing or the same."""
    if which == "chosen":
        return settings
    system = _native.library_facts([discover.LIBRARY])
    if not system["found"] or system["path"] == discover.best_library(settings):
        pytest.skip("no second libfabric")
    path = Path(system["path"])
    if not (path.parent / discover.LIBRARY).exists():
        pytest.skip(f"{path} is not under its own name")
    return replace(settings, libfabric_home=str(path.parent))
