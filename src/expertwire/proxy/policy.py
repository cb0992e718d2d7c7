"""Which server a leg goes to, and which rank of it. Counts what is in flight; a breaker looks at failures of the transport alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from expertwire.errors import InvalidArgumentError

# What a request's first line and its Host may hold. A host of other letters is given as xn--…, a path's as %XX.
_URL: Final = re.compile(r"[!-~]+")
NAME_CHARACTERS_MAX: Final = 128


class Side(StrEnum):
    """Which of the two."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = str.__hash__  # enum's is a function of Python, and each request looks a side up ten times


class Policy(StrEnum):
    """How one of several is chosen."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    SESSION = "session"  # the same for the same key, as long as it is there


class Standing(IntEnum):
    """What a server is thought to be."""

    SERVING = 0
    TRIPPED = 1  # its connections failed; passed over until `open_until`, if there is another
    PROBING = 2  # one leg is being tried on it
    DRAINING = 3  # removed: no new legs


_SERVING = Standing.SERVING  # CPython 3.11 takes a member from its enum by a hook, for 90 ns


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server as it is configured. `ranks`: data-parallel ranks behind it among which we choose; 0: it does so itself."""

    url: str
    name: str = ""
    ranks: int = 0


class Server:
    """One upstream. Made by `Fleet.add`."""

    __slots__ = (
        "failures",
        "host",
        "host_header",
        "in_flight",
        "name",
        "open_until",
        "origin",
        "pool",
        "port",
        "prefix",
        "rank_in_flight",
        "ranks",
        "side",
        "standing",
        "tls",
        "trips",
    )

    def __init__(self, side: Side, config: ServerConfig, name: str, key: str = "url") -> None:
        """`key`: what the configuration calls the URL, for errors."""
        try:
            parts = urlsplit(config.url)
            fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and _URL.fullmatch(config.url)
        except ValueError:  # a port that is none, half an IPv6 address
            fits = False
        if not fits or parts.query or parts.fragment or "@" in parts.netloc:
            raise InvalidArgumentError(
                f"{key} is {_without_secrets(config.url)!r}; give http://HOST:PORT or https://HOST:PORT in ASCII, a path may follow"
            )
        if not name.isprintable() or len(name) > NAME_CHARACTERS_MAX:  # it stands in a header, and in the metrics
            raise InvalidArgumentError(
                f"the name of {key} is {name[:200]!r}; give at most {NAME_CHARACTERS_MAX} characters that can be printed"
            )
        if not 0 <= config.ranks <= 4096:
            raise InvalidArgumentError(f"ranks of {name} is {config.ranks}; give 0 (the server chooses) to 4096")
        self.side = side
        self.name = name
        self.tls = parts.scheme == "https"
        self.host: str = parts.hostname or ""
        self.port: int = parts.port or (443 if self.tls else 80)
        self.host_header = parts.netloc.encode()
        self.origin = f"{parts.scheme}://{parts.netloc}".encode()
        self.prefix = parts.path.rstrip("/").encode()
        self.ranks = config.ranks
        self.in_flight = 0
        self.rank_in_flight = [0] * config.ranks
        self.standing = Standing.SERVING
        self.failures = 0  # of the transport, one after the other
        self.trips = 0
        self.open_until = 0.0
        self.pool: Any = None  # the edge's


def _without_secrets(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"…@{tail}" if at and head else url


class Fleet:
    """The servers of both sides. Nothing here waits: what is chosen is counted at once, and given back by `done`."""

    def __init__(self, policy: Policy, breaker_failures: int, breaker_open_s: float) -> None:
        """`breaker_failures`: of the transport, in a row, until a server is passed over for `breaker_open_s` seconds."""
        self._policy = policy
        self._failures_max = breaker_failures
        self._open_s = breaker_open_s
        self._servers: dict[Side, list[Server]] = {Side.PREFILL: [], Side.DECODE: []}
        self._turn = {Side.PREFILL: 0, Side.DECODE: 0}
        self._given = {Side.PREFILL: 0, Side.DECODE: 0}

    def add(self, side: Side, config: ServerConfig, key: str = "url") -> Server:
        """Take a server in. InvalidArgumentError for a URL that cannot be one, or a name that is taken."""
        name = config.name
        while not name or (not config.name and self.by_name(side, name) is not None):
            name = f"{side}-{self._given[side]}"
            self._given[side] += 1
        server = Server(side, config, name, key)
        if any(other.name == name for other in self._servers[side]):
            raise InvalidArgumentError(f"a {side} server of the name {name!r} is there already; give another name")
        self._servers[side].append(server)
        return server

    def remove(self, side: Side, name: str) -> Server | None:
        """Take a server out; its open legs go on to their end. None if there is none of that name."""
        for server in self._servers[side]:
            if server.name == name:
                self._servers[side].remove(server)
                server.standing = Standing.DRAINING
                return server
        return None

    def servers(self, side: Side) -> tuple[Server, ...]:
        """Those that are there."""
        return tuple(self._servers[side])

    def by_name(self, side: Side, name: str) -> Server | None:
        """The server of that name."""
        return next((server for server in self._servers[side] if server.name == name), None)

    def ready(self) -> bool:
        """Both sides have a server that is not tripped."""
        return all(any(server.standing is not Standing.TRIPPED for server in servers) for servers in self._servers.values())

    def choose(self, side: Side, now: float, avoid: Collection[Server] = (), key: bytes = b"") -> tuple[Server, int] | None:
        """(server, rank or −1), counted as in flight; None if there is none but those of `avoid`.

        A tripped one is taken if there is no other: a breaker must never make the last server unreachable. `key`: of the session.
        """
        servers = self._servers[side]
        if len(servers) == 1 and not avoid:
            server = servers[0]
            if server.standing is not _SERVING or server.ranks:
                return self._take(server, now)
            server.in_flight += 1
            return server, -1
        there = [server for server in servers if server not in avoid]
        if not there:
            return None
        # One whose probe was never answered, because who asked left, is probed again after the same while.
        sound = [server for server in there if server.standing is Standing.SERVING or now >= server.open_until]
        if not sound:
            return self._take(min(there, key=lambda server: server.open_until), now)
        return self._take(self._pick(side, sound, key), now)

    def _pick(self, side: Side, servers: list[Server], key: bytes) -> Server:
        if len(servers) == 1:
            return servers[0]
        if key and self._policy is Policy.SESSION:
            # Rendezvous hashing: who leaves or comes moves only its own sessions.
            return max(servers, key=lambda server: hashlib.blake2b(key, digest_size=8, key=server.name.encode()[:64]).digest())
        turn = self._turn[side] = (self._turn[side] + 1) & 0xFFFFFFFF
        if self._policy is Policy.ROUND_ROBIN:
            return servers[turn % len(servers)]
        count = len(servers)
        best = servers[turn % count]
        for step in range(1, count):
            server = servers[(turn + step) % count]
            if server.in_flight < best.in_flight:
                best = server
        return best

    def _take(self, server: Server, now: float) -> tuple[Server, int]:
        if server.standing is not Standing.SERVING and now >= server.open_until:
            server.standing = Standing.PROBING
            server.open_until = now + self._open_s
        return self.hold(server)

    def hold(self, server: Server) -> tuple[Server, int]:
        """Count one more in flight on a server that was chosen otherwise."""
        server.in_flight += 1
        if not server.ranks:
            return server, -1
        ranks = server.rank_in_flight
        rank = min(range(server.ranks), key=ranks.__getitem__)
        ranks[rank] += 1
        return server, rank

    def done(self, server: Server, rank: int) -> None:
        """A leg is over, however."""
        server.in_flight -= 1
        if rank >= 0:
            server.rank_in_flight[rank] -= 1

    def answered(self, server: Server) -> None:
        """It answered, whatever: its transport is sound."""
        if server.failures:
            server.failures = 0
            if server.standing is not Standing.DRAINING:
                server.standing = Standing.SERVING

    def failed(self, server: Server, now: float) -> bool:
        """Its transport failed; True if that tripped it."""
        server.failures += 1
        probing = server.standing is Standing.PROBING
        if server.standing is Standing.DRAINING or (server.failures < self._failures_max and not probing):
            return False
        server.open_until = now + self._open_s
        tripped = server.standing is not Standing.TRIPPED
        server.standing = Standing.TRIPPED
        server.trips += tripped
        return tripped
