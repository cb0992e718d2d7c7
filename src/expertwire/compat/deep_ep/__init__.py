"""The module that callers of DeepEP import: `install()` makes `import deep_ep` give it, in this process.

`shims/deep_ep` is the same as a distribution, for processes that nobody can call `install()` in. `ElasticBuffer` and `HybridEPBuffer` are
not here: callers probe for these names, and fall back to `Buffer`.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from expertwire.compat import installing
from expertwire.compat.deep_ep import utils
from expertwire.ep import Buffer, Config, EventOverlap, topk_idx_t

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t", "utils"]

NAME = "deep_ep"
SHIM_MARK = "_expertwire.py"  # the file by which the shim's folder is told from another deep_ep, without importing it


def install(*, replace: bool = False) -> ModuleType:
    """Let `import deep_ep` give Expertwire's names in this process, and return that module. Again: the same module.

    It holds for this process alone: one that is spawned does not inherit it, and calls `install()` itself or has the shim. Call it before
    what imports `deep_ep`; a module that has taken names from another one keeps them.

    Args:
        replace: also where another `deep_ep` is installed or imported, which then is out of reach for later imports.

    Raises:
        StateError: another `deep_ep` is there, and `replace` is not True.
    """
    return installing.install(NAME, SHIM_MARK, _is_ours, _put, replace=replace)


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "Buffer", None) is Buffer


def _put() -> ModuleType:
    """Modules `deep_ep` and `deep_ep.utils`, with specs, since callers ask `importlib.util.find_spec` whether it is installed."""
    module, inner = ModuleType(NAME, __doc__), ModuleType(f"{NAME}.utils", utils.__doc__)
    module.__path__ = []  # a package: `import deep_ep.utils` looks here
    for made, source, names in ((module, sys.modules[__name__], __all__), (inner, utils, utils.__all__)):
        made.__spec__ = ModuleSpec(made.__name__, None, origin=__file__, is_package=made is module)
        made.__file__ = source.__file__
        for name in names:
            setattr(made, name, getattr(source, name))
        made.__dict__["__all__"] = list(names)
    module.__dict__["utils"] = inner
    module.__dict__["__getattr__"] = missing
    sys.modules[NAME], sys.modules[inner.__name__] = module, inner
    return module


def missing(name: str) -> NoReturn:
    """What `deep_ep` says of a name that it lacks: an `AttributeError`, which makes `hasattr` False and an import an `ImportError`."""
    raise AttributeError(f"module {NAME!r}, which is Expertwire's, has no attribute {name!r}; it has {', '.join(__all__)}")
