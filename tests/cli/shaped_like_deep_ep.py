"""A module that `bench ep --against` can be given: DeepEP's surface under another name, on CPU tensors."""

from expertwire.compat.deep_ep import Buffer, Config, EventOverlap, topk_idx_t, utils

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t", "utils"]
