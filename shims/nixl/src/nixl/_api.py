"""NIXL's `nixl._api`, made of Expertwire."""

from expertwire.compat.nixl._api import *  # noqa: F403 - all of its names, which are listed there
from expertwire.compat.nixl._api import __all__

__all__ = list(__all__)
