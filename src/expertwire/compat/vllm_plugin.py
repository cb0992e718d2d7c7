"""vLLM's plug-in (entry point `vllm.general_plugins`): with EXPERTWIRE_VLLM each process of vLLM finds Expertwire as `nixl` and `deep_ep`.

vLLM calls `register()` in its API server, its engine cores and their workers, before any of them imports either name.
"""

from __future__ import annotations

import importlib
import logging
import sys

from expertwire.errors import StateError
from expertwire.fabric.config import Settings

NAMES = {"0": (), "1": ("nixl", "deep_ep"), "nixl": ("nixl",), "deep_ep": ("deep_ep",)}  # of EXPERTWIRE_VLLM
# Where vLLM keeps what it took from a package: what it took before cannot be replaced any more.
KEPT = {
    "nixl": ("vllm.distributed.nixl_utils", "NixlWrapper"),
    "deep_ep": ("vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht", "deep_ep"),
}
LOG = "vllm.plugins.expertwire"  # below vLLM's own logger, so that its settings show it


def register() -> None:
    """Do what EXPERTWIRE_VLLM says; without it nothing, and nothing is imported. Again: nothing more.

    Another package of that name, installed or imported, is put out of reach: who sets the variable has chosen.

    Raises `InvalidArgumentError` (a value that cannot be meant), `StateError` (vLLM holds the other package's names already).
    """
    for name in NAMES[Settings.read("vllm")]:
        _check_not_taken(name)
        importlib.import_module(f"expertwire.compat.{name}").install(replace=True)
        logging.getLogger(LOG).info("%s is Expertwire's in this process", name)


def _check_not_taken(name: str) -> None:
    module, kept = KEPT[name]
    taken = getattr(sys.modules.get(module), "__dict__", {}).get(kept)
    origin = str(getattr(getattr(taken, "Buffer", taken), "__module__", None))
    if taken is not None and not origin.startswith("expertwire."):
        raise StateError(
            f"{module} has taken {kept} of another {name} ({origin}) before the plug-in was called: "
            "something imports it too early; have vLLM's plug-ins loaded first, or set EXPERTWIRE_VLLM=0"
        )
