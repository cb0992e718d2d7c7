"""What an agent stands on: an endpoint, a door, and the way to other doors. Simulations give another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from expertwire.errors import UnavailableError
from expertwire.fabric import Endpoint
from expertwire.fabric.discover import choose_interface
from expertwire.transfer.door import Doorkeeper, knock

if TYPE_CHECKING:
    from expertwire.fabric.config import Settings
    from expertwire.transfer.card import Door
    from expertwire.transfer.introduction import Answer, Knock, Record

__all__ = ["NEAR", "Ground"]

NEAR = "local"  # the provider between agents of one host


class Ground:
    """A real transport and real sockets."""

    def endpoint(self, settings: Settings, **options: Any) -> Endpoint:
        """Not yet started. Raises as `Endpoint`."""
        return Endpoint(0, settings=settings, **options)

    def near(self, settings: Settings, endpoint: Endpoint, **options: Any) -> Endpoint | None:
        """What reaches agents of this host, beside `endpoint`, which leads to others.

        None where a provider was asked for by name, or memory cannot be shared here: `Agent.paths` says so.
        """
        if settings.provider or endpoint.provider == NEAR:
            return None
        try:
            return Endpoint(0, settings=replace(settings, provider=NEAR), **options)
        except UnavailableError:
            return None

    def host(self, endpoint: Endpoint, settings: Settings, hosts: int) -> str:
        """The address that its door listens at: the endpoint's own interface."""
        return "127.0.0.1" if endpoint.provider == NEAR else choose_interface(settings, hosts).address

    def door(self, host: str, answer: Callable[[Knock], Record | None], tick: Callable[[], bool]) -> Doorkeeper:
        """See `Doorkeeper`."""
        return Doorkeeper(host, answer, tick)

    def knock(self, door: Door, record: Knock, whose: str, timeout_s: float) -> Answer:
        """See `door.knock()`."""
        return knock(door, record, whose, timeout_s)
