"""DeepEP's `deep_ep.utils`, made of Expertwire."""

from expertwire.compat.deep_ep.utils import EventHandle, EventOverlap, check_nvlink_connections

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
