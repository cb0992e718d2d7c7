"""Where the names come from. `expertwire.compat.deep_ep.install` knows this distribution by this file."""

from expertwire.compat.deep_ep import Buffer, Config, EventOverlap, missing, topk_idx_t

__all__ = ["Buffer", "Config", "EventOverlap", "missing", "topk_idx_t"]
