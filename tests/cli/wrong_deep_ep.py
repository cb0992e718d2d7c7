"""Another such module, whose sums are wrong."""

from typing import Any

from expertwire.compat import deep_ep


class Buffer(deep_ep.Buffer):
    """As ours, but for the first element of a sum."""

    def combine(self, *given: Any, **named: Any) -> Any:
        out, *rest = super().combine(*given, **named)
        out[0, 0] += 100
        return out, *rest
