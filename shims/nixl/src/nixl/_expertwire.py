"""Where the names come from. `expertwire.compat.nixl.install` knows this distribution by this file."""

from expertwire.compat import nixl as ours

__all__ = ["ours"]
