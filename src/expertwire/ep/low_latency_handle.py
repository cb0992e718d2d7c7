"""What a low-latency dispatch leaves for its combine."""

from __future__ import annotations

from typing import Any

import torch


class LowLatencyHandle(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """(src_info i32 [E_l, R·M], layout_range i64 [E_l, R] = begin << 32 | count, M, H, E), as DeepEP's; the hook fills the first two.

    It is a tuple, so that callers may unpack and index it; a combine needs this very object, since the tuple alone does not say which row
    of a token goes to which of its slots.
    """

    native: Any  # the core's own, or, on CUDA tensors, (number of the call, LowRoute)
    buffer: object

    @classmethod
    def of(
        cls,
        src_info: torch.Tensor,
        layout_range: torch.Tensor,
        tokens_max: int,
        hidden: int,
        num_experts: int,
        *,
        native: Any,
        buffer: object,
    ) -> LowLatencyHandle:
        """The handle of a dispatch that `buffer` made."""
        made = cls((src_info, layout_range, tokens_max, hidden, num_experts))
        made.native = native
        made.buffer = buffer
        return made

    @property
    def src_info(self) -> torch.Tensor:
        """i32 [E_l, R·M]: token number at its source."""
        return self[0]

    @property
    def tokens_max(self) -> int:
        """M."""
        return self[2]

    @property
    def hidden(self) -> int:
        """H."""
        return self[3]

    @property
    def num_experts(self) -> int:
        """E, of all ranks."""
        return self[4]
