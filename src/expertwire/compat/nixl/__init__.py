"""The package that callers of NIXL import: `install()` makes `import nixl` and its modules give it, in this process.

`shims/nixl` is the same as a distribution, for processes that nobody can call `install()` in.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from expertwire.compat import installing
from expertwire.compat.nixl import _api, _bindings, _utils, logging
from expertwire.compat.nixl._api import nixl_agent, nixl_agent_config, nixl_prepped_dlist_handle, nixl_thread_sync_t, nixl_xfer_handle
from expertwire.compat.nixl._bindings import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

__all__ = [
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

NAME = "nixl"
SHIM_MARK = "_expertwire.py"  # the file by which the shim's folder is told from another nixl, without importing it
MODULES = {"_api": _api, "_bindings": _bindings, "_utils": _utils, "logging": logging}


def install(*, replace: bool = False) -> ModuleType:
    """Let `import nixl` give Expertwire's names in this process, and return that package. Again: the same one.

    It holds for this process alone: one that is spawned does not inherit it, and calls `install()` itself or has the shim. Call it before
    what imports `nixl`; a module that has taken names from another one keeps them.

    Args:
        replace: also where another `nixl` is installed or imported, which then is out of reach for later imports.

    Raises:
        StateError: another `nixl` is there, and `replace` is not True.
    """
    return installing.install(NAME, SHIM_MARK, _is_ours, _put, replace=replace)


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "nixl_agent", None) is nixl_agent


def _put() -> ModuleType:
    """Package `nixl` and its modules, with specs, since callers ask `importlib.util.find_spec` whether it is installed."""
    package = _made(NAME, sys.modules[__name__], is_package=True)
    package.__path__ = []  # a package: `import nixl._api` looks here
    package.__dict__["__getattr__"] = missing
    for short, source in MODULES.items():
        package.__dict__[short] = _made(f"{NAME}.{short}", source, is_package=False)
    return package


def _made(name: str, source: ModuleType, *, is_package: bool) -> ModuleType:
    made = ModuleType(name, source.__doc__)
    made.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
    made.__file__ = source.__file__
    names = source.__dict__["__all__"]
    made.__dict__.update({each: getattr(source, each) for each in names}, __all__=list(names))
    sys.modules[name] = made
    return made


def missing(name: str) -> NoReturn:
    """What `nixl` says of a name that it lacks: an `AttributeError`, which makes `hasattr` False and an import an `ImportError`."""
    raise AttributeError(
        f"module {NAME!r}, which is Expertwire's, has no attribute {name!r}; it has {', '.join(sorted((*__all__, *MODULES)))}"
    )
