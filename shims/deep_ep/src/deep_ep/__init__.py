"""DeepEP's module, made of Expertwire: see `expertwire.compat.deep_ep`."""

from deep_ep import utils
from deep_ep._expertwire import Buffer, Config, EventOverlap, missing, topk_idx_t

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t", "utils"]
__getattr__ = missing
