"""What the ranks of test_faults run. A rank that has come back as another endpoint keeps it as `endpoint.again`."""

from __future__ import annotations

from expertwire.fabric import Endpoint, Scope
from fabric.bodies import counter
from fabric.ranks import COUNTERS, DATA_BYTES


def now(endpoint: Endpoint) -> Endpoint:
    """The endpoint that this rank has now."""
    found = getattr(endpoint, "again", endpoint)
    assert isinstance(found, Endpoint)
    return found


def blob(endpoint: Endpoint) -> bytes:
    return now(endpoint).blob()


def return_as_another(endpoint: Endpoint) -> bytes:
    """Close, and open again under the same rank."""
    now(endpoint).close()
    again = Endpoint(endpoint.rank, endpoint.size, endpoint.settings, counters=COUNTERS)
    again.region("data", DATA_BYTES)
    endpoint.again = again  # type: ignore[attr-defined]
    return again.blob()


def meet(endpoint: Endpoint, blobs: dict[int, bytes]) -> None:
    for peer, theirs in blobs.items():
        now(endpoint).add_peer(peer, theirs)
    now(endpoint).start()


def replace_peer(endpoint: Endpoint, peer: int, theirs: bytes) -> None:
    now(endpoint).remove_peer(peer)
    now(endpoint).add_peer(peer, theirs)


def barriers_in_order(endpoint: Endpoint, rounds: int) -> list[int]:
    """Each rank counts at every other before its barrier; after it, what has been counted here since the first."""
    mine, seen = now(endpoint), []
    before = counter(mine, 4)
    mine.barrier()
    for _ in range(rounds):
        for peer in range(mine.size):
            if peer != mine.rank:
                mine.signal(peer, 1, 32, scope=Scope.PEER)
        mine.barrier()
        seen.append(counter(mine, 4) - before)
        mine.barrier()
    return seen
