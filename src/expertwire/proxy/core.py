"""What one worker's requests have in common, and the endpoints that it answers itself."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import orjson

from expertwire.proxy import metrics
from expertwire.proxy.config import Config
from expertwire.proxy.held import Held
from expertwire.proxy.metrics import Metrics, Snapshot
from expertwire.proxy.policy import Side, Standing
from expertwire.proxy.seam import Terms

HOMES_MAX: Final = 65_536
RELEASE_BYTES_MAX: Final = 1 << 20


class Homes:
    """Which D made which response: `/v1/responses/{id}` goes there. Bounded: the oldest is forgotten."""

    __slots__ = ("_servers",)

    def __init__(self) -> None:
        self._servers: OrderedDict[bytes, str] = OrderedDict()

    def learn(self, response_id: str, server: str) -> None:
        """`server` (its name) made it."""
        key = response_id.encode()
        self._servers[key] = server
        self._servers.move_to_end(key)
        if len(self._servers) > HOMES_MAX:
            self._servers.popitem(last=False)

    def of(self, response_id: bytes) -> str:
        """The server's name, "" if it is not known here."""
        return self._servers.get(response_id, "")


class Core:
    """One worker's state."""

    def __init__(self, config: Config, seed: bytes) -> None:
        """`seed`: a few random bytes, by which this worker's request ids differ from all others'."""
        self.config = config
        self.rules = config.rules()
        self.limits = config.flow_limits()
        timeouts, limits = config.timeouts, config.limits
        self.prefill_terms = Terms(timeouts.connect_s, timeouts.prefill_first_byte_s, timeouts.idle_s, limits.reply_bytes)
        self.decode_terms = Terms(timeouts.connect_s, timeouts.decode_first_byte_s, timeouts.idle_s, limits.reply_bytes)
        self.release_terms = Terms(timeouts.release_s, timeouts.release_s, timeouts.release_s, RELEASE_BYTES_MAX)
        self.fleet = config.fleet()
        self.metrics = Metrics()
        self.homes = Homes()
        self.held = Held(limits.held_bytes)
        self.descriptors = 0  # that this process may have; the edge says it
        self.session_header = config.session_header.lower().encode()
        self.in_flight = 0  # requests whose client waits
        self.open_legs = 0  # calls to servers, those that free blocks included
        self.stopping = False
        self._ids = seed.hex().encode()
        self._count = 0

    def new_id(self) -> bytes:
        """A request id for a client that sent none."""
        self._count += 1
        return b"%b-%x" % (self._ids, self._count)

    def gauges(self) -> Snapshot:
        """What stands now, for `Metrics.snapshot`."""
        servers = [server for side in Side for server in self.fleet.servers(side)]
        return {
            "in_flight": {(): self.in_flight},
            "held_bytes": {(): self.held.total},
            "server_in_flight": {(server.side, server.name): server.in_flight for server in servers},
            "server_up": {(server.side, server.name): int(server.standing is not Standing.TRIPPED) for server in servers},
        }


def own(core: Core, method: bytes, path: bytes) -> tuple[int, bytes, bytes] | None:
    """(status, header lines, body) of an endpoint of ours, None if `path` is none. `/metrics` is of this worker alone."""
    if path not in (b"/health", b"/ready", b"/metrics"):
        return None
    if method not in (b"GET", b"HEAD"):
        return 405, b"allow: GET, HEAD\r\n", b""
    if path == b"/health":
        return 200, b"content-type: application/json\r\n", b'{"status":"ok"}'
    if path == b"/ready":
        ready = core.fleet.ready() and not core.stopping
        lines = b"content-type: application/json\r\n"
        body: dict[str, int] = {"ready": ready, "stopping": core.stopping}
        body |= {str(side): sum(server.standing is not Standing.TRIPPED for server in core.fleet.servers(side)) for side in Side}
        return (200, lines, orjson.dumps(body)) if ready else (503, lines + b"retry-after: 1\r\n", orjson.dumps(body))
    text = metrics.text(core.metrics.snapshot(core.gauges()))
    return 200, b"content-type: text/plain; version=0.0.4\r\n", text.encode()
