"""What an agent stands on: an endpoint, a door, and the way to other doors. Simulations give another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from expertwire.fabric import Endpoint
from expertwire.fabric.discover import choose_interface
from expertwire.transfer.door import Doorkeeper, knock

if TYPE_CHECKING:
    from expertwire.fabric.config import Settings
    from expertwire.transfer.card import Door
    from expertwire.transfer.introduction import Answer, Knock, Refusal

__all__ = ["Ground"]


class Ground:
    """A real transport and real sockets."""

    def endpoint(self, settings: Settings, **options: Any) -> Endpoint:
        """Not yet started. Raises as `Endpoint`."""
        return Endpoint(0, settings=settings, **options)

    def host(self, endpoint: Endpoint, settings: Settings, hosts: int) -> str:
        """The address that its door listens at: the endpoint's own interface."""
        return "127.0.0.1" if endpoint.provider == "local" else choose_interface(settings, hosts).address

    def door(self, host: str, answer: Callable[[Knock], Answer | Refusal | None], tick: Callable[[], bool]) -> Doorkeeper:
        """See `Doorkeeper`."""
        return Doorkeeper(host, answer, tick)

    def knock(self, door: Door, record: Knock, whose: str, timeout_s: float) -> Answer:
        """See `door.knock()`."""
        return knock(door, record, whose, timeout_s)
