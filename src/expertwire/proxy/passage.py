"""A request that is passed on to a D: models, tokenize, version, embeddings and the rest, and responses by their id."""

from __future__ import annotations

from typing import Final

from expertwire.proxy import faults, headers, legs
from expertwire.proxy.conversation import Answer, Conversation, Stage
from expertwire.proxy.core import Core
from expertwire.proxy.faults import Fault
from expertwire.proxy.flow import Action, Event, Flow, State
from expertwire.proxy.headers import Headers
from expertwire.proxy.legs import Shape
from expertwire.proxy.policy import Server, Side
from expertwire.proxy.seam import Failure, Kind, Leg, Mode, Port, Request

# May be sent again where a kept connection turns out to have been closed: RFC 9110, 9.2.2.
_REPEATABLE: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_BODILESS: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"DELETE"})


class Passage(Conversation):
    """One leg, whose answer leaves as it comes: its status is known with its head."""

    __slots__ = ("_avoid", "_events", "_failure", "_flow", "_leg", "_shape")

    def __init__(self, core: Core, port: Port, request: Request, shape: Shape) -> None:
        super().__init__(core, port, request)
        self._shape = shape
        self._flow = Flow(core.limits)
        self._leg: Leg | None = None  # the open one
        self._events = False  # the answer is a stream of events
        self._failure: Fault | Answer | None = None
        self._avoid: set[Server] = set()

    def _endpoint(self) -> str:
        return "response" if self._shape is Shape.RESPONSE_BY_ID else "plain"

    def _begin(self, now: float) -> None:
        self._step(Event.START_ALONE, now)

    def leg_ready(self, leg: Leg, now: float) -> None:
        """See the base."""
        if leg in self.open_legs:
            self._step(Event.READY, now)

    def leg_head(self, leg: Leg, status: int, lines: Headers, now: float) -> Mode:
        """See the base."""
        leg.status, leg.headers, leg.head_at = status, lines, now
        if status == 404 and self._shape is Shape.RESPONSE_BY_ID:
            return Mode.WHOLE  # another D may have made it
        self._step(Event.CONTENT, now)
        return Mode.STREAM

    def leg_body(self, leg: Leg, body: bytes, now: float) -> None:
        """See the base."""
        self._end_leg(leg, "refused")
        self.core.fleet.answered(leg.server)
        self._avoid.add(leg.server)
        self._failure = Answer(Side.DECODE, leg.status, headers.plain_down_lines(leg.headers, leg.server.origin), body)
        if all(server in self._avoid for server in self.core.fleet.servers(Side.DECODE)):
            self._step(Event.REFUSED, now)
        else:
            self._flow = Flow(self.core.limits)
            self._step(Event.START_ALONE, now)

    def leg_data(self, leg: Leg, data: bytes, now: float) -> bytes | None:
        """See the base."""
        return data

    def leg_ended(self, leg: Leg, now: float) -> None:
        """See the base."""
        self._end_leg(leg, "answered")
        self.core.fleet.answered(leg.server)
        self._step(Event.ENDED, now)

    def leg_failed(self, leg: Leg, failure: Failure, now: float) -> None:
        """See the base."""
        if leg not in self.open_legs:
            return
        self._leg_broke(leg, failure, now)
        self._failure = self._fault_of(leg, failure)
        if failure is Failure.DESCRIPTORS or failure is Failure.HELD:
            self._step(Event.EXHAUSTED, now)
        elif self._flow.state is State.HANDOFF:
            self._avoid.add(leg.server)
            self._step(Event.UNREACHED, now)
        elif failure is Failure.STALE and self._flow.state is State.DECODING and self._request.method in _REPEATABLE:
            self._step(Event.STALE, now)
        else:
            self._step(Event.TIMED_OUT if failure is Failure.TIMED_OUT else Event.LOST, now)

    def client_gone(self, now: float) -> None:
        """See the base."""
        if self._stage is not Stage.OVER:
            self._close(now, "gone", "")

    def _drop_legs(self, now: float) -> None:
        self._step(Event.GONE, now)

    def _end_leg(self, leg: Leg, outcome: str) -> None:
        super()._end_leg(leg, outcome)
        self._leg = None

    def _step(self, event: Event, now: float) -> None:
        for action in self._flow.step(event, now):
            if action is Action.DECODE:
                self._open(now)
            elif action is Action.SEND:
                self._send()
            elif action is Action.COMMIT:
                self._commit(now)
            elif action is Action.FINISH:
                self._port.finish()
                self._close(now, "done", "")
            elif action is Action.CLOSE:
                if self._leg is not None:
                    self._cancel_leg(self._leg)
            elif action is Action.FAIL:
                self._fail_with(self._failure or faults.internal(), now)
            else:
                assert action is Action.ABORT, action
                self._abort(now)

    def _open(self, now: float) -> None:
        core = self.core
        if self._flow.decodes > 1:
            core.metrics.count("retries_total", Side.DECODE)
            self._retries += 1
        chosen = self._home() or core.fleet.choose(Side.DECODE, now, self._avoid)
        if chosen is None:
            self._failure = self._failure or faults.no_server(Side.DECODE, core.config.retry_after_s)
            self._step(Event.NO_SERVER, now)
            return
        self._decode = chosen
        leg = self._leg = Leg(self, Kind.PLAIN, 0, *chosen, core.decode_terms)
        leg.head_only = self._request.method == b"HEAD"
        if self._call(leg, now):
            self._step(Event.READY, now)

    def _home(self) -> tuple[Server, int] | None:
        """The D that made the response which is asked for; None if that is not known here, or not there any more."""
        if self._shape is not Shape.RESPONSE_BY_ID:
            return None
        name = self.core.homes.of(legs.response_id_of(self._target.partition(b"?")[0]))
        server = self.core.fleet.by_name(Side.DECODE, name) if name else None
        return None if server is None or server in self._avoid else self.core.fleet.hold(server)

    def _send(self) -> None:
        leg, request = self._leg, self._request
        assert leg is not None
        body = None if not request.body and request.method in _BODILESS else legs.plain_body(request.body)
        rank = b"%d" % leg.rank if leg.rank >= 0 else self._rank
        target = leg.server.prefix + self._target
        lines = headers.up_lines(request.headers, json=False)
        leg.message = headers.message(request.method, target, leg.server.host_header, lines, self._request_id, rank, body)
        self._failure = None
        self._send_leg(leg)

    def _commit(self, now: float) -> None:
        leg = self._leg
        assert leg is not None
        self._first_content_s = now - self._started
        self._events = headers.media_type(leg.headers) == b"text/event-stream"
        lines = headers.plain_down_lines(leg.headers, leg.server.origin)
        length = None if headers.value_of(leg.headers, b"transfer-encoding") else headers.length_of(leg.headers)
        self._begin_reply(leg.status, lines, length)

    def _abort(self, now: float) -> None:
        failure = self._failure
        event = b""
        if isinstance(failure, Fault) and self._events:
            self.core.metrics.count("stream_errors_total")
            event = failure.event()
        self._port.abort(event)
        self._close(now, "failed", failure.type if isinstance(failure, Fault) else "")
