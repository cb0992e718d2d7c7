"""NIXL's `nixl._utils`, made of Expertwire."""

from expertwire.compat.nixl._utils import *  # noqa: F403 - all of its names, which are listed there
from expertwire.compat.nixl._utils import __all__

__all__ = list(__all__)
