"""NIXL's `nixl.logging`, made of Expertwire."""

from expertwire.compat.nixl.logging import *  # noqa: F403 - all of its names, which are listed there
from expertwire.compat.nixl.logging import __all__

__all__ = list(__all__)
