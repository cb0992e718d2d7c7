"""NIXL's package, made of Expertwire: see `expertwire.compat.nixl`."""

from expertwire.compat.nixl import *  # noqa: F403 - all of its names, which are listed there
from expertwire.compat.nixl import __all__, missing

__all__ = list(__all__)
__getattr__ = missing
