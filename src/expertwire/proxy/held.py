"""How many bytes of large bodies a worker holds, all its connections together.

Bodies up to FREE_BYTES are not counted: `limits.connections` times that much is their bound. Nobody waits for room: of many bodies that are
each half here and wait for the other half's, none would ever be whole. Who finds none is refused.
"""

from __future__ import annotations

from typing import Final

FREE_BYTES: Final = 65_536


class Held:
    """Of one worker."""

    __slots__ = ("limit", "most", "total")

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self.limit = limit
        self.total = 0
        self.most = 0  # since whoever looks at it has set it back

    def fits(self, size: int) -> bool:
        """Whether there is room for as many more bytes."""
        return self.total + size <= self.limit

    def take(self, size: int) -> bool:
        """Count bytes that have come; False, and nothing counted, where there is no room."""
        if self.total + size > self.limit:
            return False
        self.add(size)
        return True

    def add(self, size: int) -> None:
        """Count bytes that are here whether there is room or not."""
        self.total += size
        if self.total > self.most:
            self.most = self.total

    def give(self, size: int) -> None:
        """They are gone."""
        self.total -= size
