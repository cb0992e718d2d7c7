"""The ways to move bytes that the provider tests go through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from expertwire import _native
from expertwire.fabric import discover


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


def _setups() -> dict[str, Setup]:
    found = {"local": Setup("local", {})}
    wheels = discover.wheel_libraries() or ["mpich/libfabric.so.1"]
    for version, library in (("system", discover.LIBRARY), ("wheel", wheels[0])):
        for path in ("atomic", "message"):
            options = {"libraries": [library], "interface": "lo", "signal_path": path}
            found[f"tcp-{version}-{path}"] = Setup("libfabric", options, library)
        found[f"shm-{version}"] = Setup("libfabric", {"libraries": [library], "provider": "shm"}, library)
    return found


SETUPS = _setups()
