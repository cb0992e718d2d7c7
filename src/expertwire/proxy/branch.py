"""One choice of one prompt: what is held for it, and what can be said of its leg."""

from __future__ import annotations

from typing import Any

import orjson

from expertwire.proxy import faults, merge, params, sse
from expertwire.proxy.conversation import Answer
from expertwire.proxy.faults import Fault
from expertwire.proxy.flow import Flow
from expertwire.proxy.policy import Server
from expertwire.proxy.seam import Leg
from expertwire.proxy.sse import Sort


class Branch:
    """One choice of one prompt."""

    __slots__ = (
        "avoid_decode",
        "avoid_prefill",
        "cached",
        "failure",
        "flow",
        "given",
        "granted_at",
        "held",
        "held_bytes",
        "index",
        "leg",
        "lines",
        "params",
        "reply",
    )

    def __init__(self, index: int, flow: Flow) -> None:
        self.index = index
        self.flow = flow
        self.leg: Leg | None = None  # the open one
        self.params: params.Parameters | None = None  # P's, unused
        self.granted_at = 0.0
        self.cached: merge.Usage | None = None  # P's count
        self.given: dict[str, Any] | None = None  # the parameters that D was sent
        self.failure: Fault | Answer | None = None  # the last; None while streaming: D has told it itself
        self.lines = b""  # D's header lines
        self.reply: tuple[bytes, dict[str, Any]] | None = None  # D's, whole, and read
        self.held: list[bytes] = []  # events on their way to the client
        self.held_bytes = 0  # that came before the status could leave
        self.avoid_prefill: frozenset[Server] = frozenset()
        self.avoid_decode: frozenset[Server] = frozenset()


def has_end(leg: Leg) -> bool:
    """The last event that came is the mark of the end."""
    events = sse.events_of(leg.last)
    if not events:
        return False
    data = sse.data_of(events[-1])
    return sse.sort_of(data, sse.parse(data)) is Sort.END


def event_of(answer: Answer) -> bytes:
    """A server's refusal as an event, where the status has left for another branch."""
    parsed = sse.parse(answer.body)
    if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
        return b"data: %b\n\n" % orjson.dumps({"error": parsed["error"]})
    return faults.upstream_error(answer.status, f"the {answer.side} server answered {answer.status}").event()
