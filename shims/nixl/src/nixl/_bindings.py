"""NIXL's `nixl._bindings`, made of Expertwire."""

from expertwire.compat.nixl._bindings import *  # noqa: F403 - all of its names, which are listed there
from expertwire.compat.nixl._bindings import __all__

__all__ = list(__all__)
