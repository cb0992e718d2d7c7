"""A request of two legs: prefill, then decode, for each of its branches, and one reply made of what they answer."""

from __future__ import annotations

from typing import Any, Final

import orjson

from expertwire.proxy import faults, headers, legs, merge, params, sse
from expertwire.proxy.branch import Branch, event_of, has_end
from expertwire.proxy.conversation import Answer, Conversation, Stage
from expertwire.proxy.core import Core
from expertwire.proxy.faults import Fault
from expertwire.proxy.flow import Event, Flow, State
from expertwire.proxy.headers import Headers
from expertwire.proxy.legs import Plan, Shape
from expertwire.proxy.passage import Passage
from expertwire.proxy.policy import Policy, Server, Side
from expertwire.proxy.seam import Failure, Kind, Leg, Mode, Port, Request
from expertwire.proxy.sse import Sort

# CPython 3.11 takes a member from its enum by a hook, for 90 ns; a request does so a hundred times.
_EVENT_ANSWERED, _EVENT_CONTENT, _EVENT_ENDED, _EVENT_GONE = Event.ANSWERED, Event.CONTENT, Event.ENDED, Event.GONE
_EVENT_LOST, _EVENT_NO_SERVER, _EVENT_OVERLOADED, _EVENT_PREFILLED = Event.LOST, Event.NO_SERVER, Event.OVERLOADED, Event.PREFILLED
_EVENT_READY, _EVENT_REFUSED, _EVENT_STALE, _EVENT_START = Event.READY, Event.REFUSED, Event.STALE, Event.START
_EVENT_EXHAUSTED, _EVENT_START_ALONE, _EVENT_UNFIT, _EVENT_UNREACHED = Event.EXHAUSTED, Event.START_ALONE, Event.UNFIT, Event.UNREACHED
_KIND_DECODE, _KIND_LATE, _KIND_PREFILL, _KIND_RELEASE = Kind.DECODE, Kind.LATE, Kind.PREFILL, Kind.RELEASE
_MODE_STREAM, _MODE_WHOLE = Mode.STREAM, Mode.WHOLE
_SHAPE_RESPONSES = Shape.RESPONSES
_SIDE_DECODE, _SIDE_PREFILL = Side.DECODE, Side.PREFILL
_STAGE_BEGUN, _STAGE_OPEN, _STAGE_OVER = Stage.BEGUN, Stage.OPEN, Stage.OVER
_STATE_DECODING, _STATE_DONE, _STATE_HANDOFF, _STATE_PREFILLING = State.DECODING, State.DONE, State.HANDOFF, State.PREFILLING
_STATE_STREAMING = State.STREAMING
_EVENT: Final = (
    *(Event.UNREACHED, Event.STALE, Event.LOST, Event.LOST, Event.LOST, Event.TIMED_OUT, Event.EXHAUSTED, Event.EXHAUSTED),
)  # by Failure
_OVERLOADED: Final = frozenset({502, 503, 504})
_RELEASE_TARGET: Final = b"/v1/completions"
_JSON: Final = b"content-type: application/json\r\n"
_USAGE_NEEDLE: Final = b'"usage":'
_SESSION_FIELDS: Final = ("prompt_cache_key", "user")
_ENDPOINTS: Final = ("completions", "chat", "responses")  # by Shape
_NO_PLAN: Final = Plan(Shape.COMPLETIONS, b"", {}, False)


def open_exchange(core: Core, port: Port, request: Request) -> Conversation:
    """The conversation that a request's method and path ask for. To be started."""
    target = request.target
    if b"?" in target or target[:1] != b"/":
        target = headers.origin_form(target).partition(b"?")[0]
    shape = legs.shape_of(request.method, target)
    return Exchange(core, port, request, shape) if shape in legs.TWO_LEGS else Passage(core, port, request, shape)


class Exchange(Conversation):
    """See the module."""

    __slots__ = ("_branches", "_client_lines", "_merge", "_plan", "_same_server", "_session", "_shape")

    def __init__(self, core: Core, port: Port, request: Request, shape: Shape) -> None:
        super().__init__(core, port, request)
        self._shape = shape
        self._plan = _NO_PLAN
        self._branches: list[Branch] = []
        self._client_lines = b""
        self._merge: merge.StreamMerge | None = None
        self._same_server: dict[int, Server] = {}
        self._session = b""

    def _branch_count(self) -> int:
        return len(self._branches) or 1

    def _endpoint(self) -> str:
        return _ENDPOINTS[self._shape]

    # ---- what the edge tells

    def _begin(self, now: float) -> None:
        core, request = self.core, self._request
        plan = legs.plan_of(self._shape, request.body, core.rules)
        if isinstance(plan, Fault):
            self._fail_with(plan, now)
            return
        self._plan = plan
        self._client_lines = self._digest.json_lines()
        self._session = self._session_key()
        count = plan.branches
        if count > 1 and plan.stream:
            self._merge = merge.StreamMerge(count, plan.n, plan.include_usage, self._request_id.decode())
        if plan.alone:
            core.metrics.count("decode_alone_total", plan.alone)
        self._branches = [Branch(index, Flow(core.limits)) for index in range(count)]
        event = _EVENT_START_ALONE if plan.alone else _EVENT_START
        for branch in self._branches:
            if self._stage is not _STAGE_OVER:
                self._step(branch, event, now)

    def leg_ready(self, leg: Leg, now: float) -> None:
        """See the base."""
        if leg not in self.open_legs:
            return
        if leg.kind is _KIND_DECODE:
            self._decode_ready(self._branches[leg.branch], now)
        elif leg.kind is _KIND_PREFILL:
            self._send_prefill(leg)
        else:
            self._send_leg(leg)

    def leg_head(self, leg: Leg, status: int, lines: Headers, now: float) -> Mode:
        """See the base."""
        leg.status, leg.headers, leg.head_at = status, lines, now
        if leg.kind is _KIND_DECODE and 200 <= status < 300 and self._plan.stream:
            if headers.media_type(lines) == b"text/event-stream":
                leg.splitter = sse.Splitter(self.core.config.limits.event_bytes)
                self._branches[leg.branch].lines = headers.down_lines(lines)
                return _MODE_STREAM
        return _MODE_WHOLE

    def leg_body(self, leg: Leg, body: bytes, now: float) -> None:
        """See the base."""
        fine = 200 <= leg.status < 300
        self._end_leg(leg, "cancelled" if leg.kind is _KIND_LATE else "answered" if fine else "refused")
        if leg.server.failures:
            self.core.fleet.answered(leg.server)
        if leg.kind is _KIND_LATE:
            self._late(leg, body, now)
        elif leg.kind is _KIND_RELEASE:
            self.core.metrics.count("releases_total", "released" if 400 <= leg.status < 500 else "failed")
        elif not fine:
            self._refused(leg, body, now)
        elif leg.kind is _KIND_PREFILL:
            self._prefilled(leg, body, now)
        else:
            self._decoded(leg, body, now)

    def leg_data(self, leg: Leg, data: bytes, now: float) -> bytes | None:
        """See the base."""
        if leg.relaying:
            if data.endswith(b"\n\n") and params.NEEDLE not in data and sse.ERROR_NEEDLE not in data:
                leg.last = data
                return data
            leg.relaying = False
        branch = self._branches[leg.branch]
        try:
            piece = leg.splitter.feed(data)
        except sse.EventTooLargeError:
            branch.failure = faults.answer_too_large(_SIDE_DECODE, self.core.config.limits.event_bytes)
            self._cancel_leg(leg)
            self._step(branch, _EVENT_UNFIT, now)
            return None
        if piece:
            leg.last = piece
            self._events(leg, branch, piece, now)
        if self._stage is _STAGE_OPEN:
            branch.held_bytes += len(piece)
            if branch.held_bytes > (limit := self.core.config.limits.reply_bytes):
                branch.failure = faults.answer_too_large(_SIDE_DECODE, limit)
                self._cancel_leg(leg)
                self._step(branch, _EVENT_UNFIT, now)
                return None
            return self._begin_stream(now) or None
        if self._stage is _STAGE_OVER:
            return None
        if not branch.held:
            return None
        held = branch.held
        branch.held = []
        return held[0] if len(held) == 1 else b"".join(held)

    def leg_ended(self, leg: Leg, now: float) -> None:
        """See the base."""
        branch = self._branches[leg.branch]
        if leg.splitter.held.strip() == sse.DONE_EVENT.strip() and self._stage is not _STAGE_OVER:  # without its empty line
            leg.last = sse.DONE_EVENT
            branch.held.append(b"" if self._merge is not None else sse.DONE_EVENT)
            if self._stage is _STAGE_BEGUN:
                self._port.write(sse.DONE_EVENT)
        whole = has_end(leg)
        self._end_leg(leg, "answered" if whole else "lost")
        self.core.fleet.answered(leg.server)
        self._ended(branch, whole, now)

    def leg_failed(self, leg: Leg, failure: Failure, now: float) -> None:
        """See the base."""
        if leg not in self.open_legs:
            return
        if leg.kind is _KIND_LATE:
            self._end_leg(leg, "cancelled")
            return
        self._leg_broke(leg, failure, now)
        if leg.kind is _KIND_RELEASE:
            self.core.metrics.count("releases_total", "failed")
            return
        branch = self._branches[leg.branch]
        state = branch.flow.state
        if state is _STATE_STREAMING and has_end(leg):
            self._ended(branch, True, now)  # all of it had come; only the framing's end is missing
            return
        event = _EVENT[failure]
        if event is _EVENT_EXHAUSTED:
            branch.failure = None  # what went before matters less than that it is our own fault now
        elif state is _STATE_HANDOFF:
            event = _EVENT_UNREACHED  # nothing was sent, whatever it was
        elif event is _EVENT_STALE and leg.status:
            event = _EVENT_LOST
        elif event is _EVENT_UNREACHED and state is not _STATE_PREFILLING:
            event = _EVENT_LOST
        if event is _EVENT_UNREACHED:
            if state is _STATE_PREFILLING:
                branch.avoid_prefill |= {leg.server}
            else:
                branch.avoid_decode |= {leg.server}
                if branch.avoid_decode.issuperset(self.core.fleet.servers(_SIDE_DECODE)):
                    event = _EVENT_NO_SERVER  # there is no other: do not let P compute for nobody
        # What another P has said is worth more than that this one said nothing.
        if not (event is _EVENT_UNREACHED and state is _STATE_PREFILLING and isinstance(branch.failure, Answer)):
            branch.failure = self._fault_of(leg, failure)
        self._step(branch, event, now)

    def client_gone(self, now: float) -> None:
        """See the base."""
        if self._stage is not _STAGE_OVER:
            self._close(now, "gone", "")

    def _close(self, now: float, outcome: str, why: str) -> None:
        Conversation._close(self, now, outcome, why)
        self._plan = _NO_PLAN

    def _drop_legs(self, now: float) -> None:
        for branch in self._branches:
            self._step(branch, _EVENT_GONE, now)

    # ---- answers

    def _prefilled(self, leg: Leg, body: bytes, now: float) -> None:
        branch = self._branches[leg.branch]
        reply = sse.parse(body)
        if not isinstance(reply, dict):
            branch.failure = faults.not_json(_SIDE_PREFILL)
            self._step(branch, _EVENT_UNFIT, now)
            return
        if field := params.missing(reply):
            branch.failure = faults.incomplete_prefill(field)
            self._step(branch, _EVENT_UNFIT, now)
            return
        tokens = reply.get("prompt_token_ids") if self._plan.reuse_tokens else None
        branch.params = params.Parameters(reply, tokens if isinstance(tokens, list) and tokens else None)
        branch.cached = branch.params.cached
        branch.granted_at = now
        if self._merge is not None:
            self._merge.cached(branch.index, branch.cached)
        kv = self.core.config.kv
        # From its head on: when its body has come is ours to know, not when the lease began.
        branch.flow.grant(leg.head_at + kv.lease_s - kv.margin_s)
        self.core.metrics.prefill.observe(now - leg.called_at)
        self._step(branch, _EVENT_PREFILLED, now)

    def _late(self, leg: Leg, body: bytes, now: float) -> None:
        """P had answered before it heard that nobody waits: D will not come for the blocks."""
        reply = sse.parse(body) if leg.status == 200 else None
        if isinstance(reply, dict) and not params.missing(reply):
            branch = self._branches[leg.branch]
            branch.params = params.Parameters(reply, None)
            self._do_release(branch, now)

    def _refused(self, leg: Leg, body: bytes, now: float) -> None:
        branch = self._branches[leg.branch]
        lines = headers.down_lines(leg.headers)
        if leg.kind is _KIND_PREFILL:
            branch.failure = Answer(_SIDE_PREFILL, leg.status, lines, body)
            if leg.status in _OVERLOADED:
                branch.avoid_prefill |= {leg.server}
                self._step(branch, _EVENT_OVERLOADED, now)
                return
        else:
            branch.failure = Answer(_SIDE_DECODE, leg.status, lines, params.redact(body, branch.given))
        self._step(branch, _EVENT_REFUSED, now)

    def _decoded(self, leg: Leg, body: bytes, now: float) -> None:
        """D's whole answer of 2xx."""
        branch = self._branches[leg.branch]
        if self._plan.stream:
            branch.failure = faults.not_a_stream()
            self._step(branch, _EVENT_UNFIT, now)
            return
        reply = sse.parse(body)
        if not isinstance(reply, dict):
            branch.failure = faults.not_json(_SIDE_DECODE)
            self._step(branch, _EVENT_UNFIT, now)
            return
        if self._shape is _SHAPE_RESPONSES:
            self._learn(reply, leg)
        elif not reply.get("choices"):
            branch.failure = faults.no_content()
            self._step(branch, _EVENT_UNFIT, now)
            return
        if self._plan.branches > 1:
            limit = self.core.config.limits.reply_bytes
            if len(body) + sum(len(other.reply[0]) for other in self._branches if other.reply is not None) > limit:
                branch.failure = faults.answer_too_large(_SIDE_DECODE, limit)
                self._step(branch, _EVENT_UNFIT, now)
                return
        branch.reply = (body, reply)
        branch.lines = headers.down_lines(leg.headers)
        self._step(branch, _EVENT_ANSWERED, now)

    def _learn(self, reply: Any, leg: Leg) -> None:
        if isinstance(reply, dict) and isinstance(ident := reply.get("id"), str):
            self.core.homes.learn(ident, leg.server.name)

    def _events(self, leg: Leg, branch: Branch, piece: bytes, now: float) -> None:
        """Whole events of D's stream: into `branch.held` goes what the client is to get."""
        single = self._merge is None
        if single and branch.flow.state is _STATE_STREAMING and not self._has_ours(branch, piece):
            branch.held.append(piece)
            leg.relaying = branch.cached is None and not leg.splitter.held
            return
        for event in sse.events_of(piece):
            data = sse.data_of(event)
            parsed = sse.parse(data) if data[:1] == b"{" else None
            sort = sse.sort_of(data, parsed)
            if sort is Sort.ERROR:
                self._told_error(leg, branch, event, parsed, now)
                return
            if self._merge is not None:
                if out := self._merge.event(branch.index, parsed):
                    branch.held.append(out)
            else:
                branch.held.append(self._clean(branch, event, parsed))
            if branch.flow.state is not _STATE_DECODING:
                continue
            if self._shape is _SHAPE_RESPONSES and isinstance(parsed, dict):
                self._learn(parsed.get("response"), leg)
            if sort is Sort.CONTENT or (sort is Sort.END and self._shape is _SHAPE_RESPONSES):
                self._step(branch, _EVENT_CONTENT, now)
            elif sort is Sort.END:
                branch.failure = faults.no_content()
                self._cancel_leg(leg)
                self._step(branch, _EVENT_UNFIT, now)
                return

    def _has_ours(self, branch: Branch, piece: bytes) -> bool:
        return params.NEEDLE in piece or sse.ERROR_NEEDLE in piece or (branch.cached is not None and _USAGE_NEEDLE in piece)

    def _clean(self, branch: Branch, event: bytes, parsed: Any) -> bytes:
        """An event as the client gets it: as it came, where it has nothing of ours."""
        if not isinstance(parsed, dict):
            return event
        changed = params.NEEDLE in event and params.strip_everywhere(parsed)
        if branch.cached is not None and merge.with_cached(parsed, branch.cached):
            changed = True
        return sse.with_data(event, orjson.dumps(parsed)) if changed else event

    def _told_error(self, leg: Leg, branch: Branch, event: bytes, parsed: Any, now: float) -> None:
        """D told an error within its stream: before content it becomes a reply of its own status, after it it is the last event."""
        self._cancel_leg(leg)
        status, error = sse.error_of(parsed)
        if self._stage is _STAGE_OPEN:
            body = params.redact(orjson.dumps({"error": error}), branch.given)
            branch.failure = Answer(_SIDE_DECODE, status, _JSON, body)
        else:
            branch.held.append(event)
            branch.failure = None
        self._step(branch, _EVENT_UNFIT, now)

    def _ended(self, branch: Branch, whole: bool, now: float) -> None:
        """D's stream has ended."""
        state = branch.flow.state
        if whole and state is _STATE_STREAMING:
            self._step(branch, _EVENT_ENDED, now)
            return
        branch.failure = faults.no_content() if state is _STATE_DECODING else faults.cut_short()
        self._step(branch, _EVENT_UNFIT, now)

    # ---- the flow's actions

    def _step(self, branch: Branch, event: Event, now: float) -> None:
        for action in branch.flow.step(event, now):
            _DO[action](self, branch, now)

    def _end_leg(self, leg: Leg, outcome: str) -> None:
        Conversation._end_leg(self, leg, outcome)  # without super()'s object: each request does this twice
        branch = self._branches[leg.branch]
        if branch.leg is leg:
            branch.leg = None  # nothing here refers to itself in a circle, or a busy proxy would spend its time in the collector

    def _do_close(self, branch: Branch, now: float) -> None:
        if (leg := branch.leg) is None:
            return
        config = self.core.config
        if leg.kind is _KIND_PREFILL and leg.sent and config.kv.release:
            leg.first_byte_s = leg.idle_s = config.timeouts.release_s
            if self._port.abandon(leg):
                leg.kind = _KIND_LATE
                branch.leg = None
                return
        self._cancel_leg(leg)

    def _do_release(self, branch: Branch, now: float) -> None:
        held, branch.params = branch.params, None
        core = self.core
        if held is None or not core.config.kv.release:
            return
        chosen = core.fleet.choose(_SIDE_DECODE, now, branch.avoid_decode)
        if chosen is None:
            core.metrics.count("releases_total", "failed")
            return
        leg = Leg(self, _KIND_RELEASE, branch.index, *chosen, core.release_terms)
        leg.message = self._message(leg, branch, _RELEASE_TARGET, held.release_body())
        if self._call(leg, now):
            self._send_leg(leg)

    def _do_alone(self, branch: Branch, now: float) -> None:
        self.core.metrics.count("decode_alone_total", "no_prefill")
        branch.failure = None

    def _do_prefill(self, branch: Branch, now: float) -> None:
        core, flow, plan = self.core, branch.flow, self._plan
        if flow.reprefills and flow.prefills == 1:
            core.metrics.count("reprefills_total")
            self._reprefills += 1
            branch.avoid_prefill = frozenset()
        elif flow.prefills > 1:
            core.metrics.count("retries_total", _SIDE_PREFILL)
            self._retries += 1
        same = self._same_server.get(branch.index // plan.n) if plan.n > 1 else None
        chosen: tuple[Server, int] | None
        if same is not None and same not in branch.avoid_prefill and same in core.fleet.servers(_SIDE_PREFILL):
            chosen = core.fleet.hold(same)  # the prompt's blocks are or will be in its cache
        else:
            chosen = core.fleet.choose(_SIDE_PREFILL, now, branch.avoid_prefill, self._session)
        if chosen is None:
            branch.failure = branch.failure or faults.no_server(_SIDE_PREFILL, core.config.retry_after_s)
            self._step(branch, _EVENT_NO_SERVER, now)
            return
        if plan.n > 1:
            self._same_server[branch.index // plan.n] = chosen[0]
        self._prefill = chosen
        leg = branch.leg = Leg(self, _KIND_PREFILL, branch.index, *chosen, core.prefill_terms)
        if self._call(leg, now):
            self._send_prefill(leg)

    def _send_prefill(self, leg: Leg) -> None:
        branch = self._branches[leg.branch]
        leg.message = self._message(leg, branch, self._target, legs.prefill_body(self._plan, branch.index))
        self._send_leg(leg)

    def _do_decode(self, branch: Branch, now: float) -> None:
        core = self.core
        if branch.flow.decodes > 1 and branch.flow.prefills == 0:
            core.metrics.count("retries_total", _SIDE_DECODE)
            self._retries += 1
        chosen = core.fleet.choose(_SIDE_DECODE, now, branch.avoid_decode, self._session) if (home := self._home()) is None else home
        if chosen is None:
            branch.failure = branch.failure or faults.no_server(_SIDE_DECODE, core.config.retry_after_s)
            self._step(branch, _EVENT_NO_SERVER, now)
            return
        self._decode = chosen
        leg = branch.leg = Leg(self, _KIND_DECODE, branch.index, *chosen, core.decode_terms)
        if self._call(leg, now):
            self._decode_ready(branch, now)

    def _home(self) -> tuple[Server, int] | None:
        """The D that holds the response which this one goes on from."""
        if self._plan.alone != "previous_response":
            return None
        name = self.core.homes.of(str(self._plan.body.get("previous_response_id")).encode())
        server = self.core.fleet.by_name(_SIDE_DECODE, name) if name else None
        return None if server is None else self.core.fleet.hold(server)

    def _decode_ready(self, branch: Branch, now: float) -> None:
        deadline = branch.flow.deadline
        if deadline is not None and now >= deadline:
            self.core.metrics.count("expiries_total")
            branch.failure = faults.expired(self.core.config.kv.lease_s)
        self._step(branch, _EVENT_READY, now)

    def _do_send(self, branch: Branch, now: float) -> None:
        leg, held = branch.leg, branch.params
        assert leg is not None
        values = None
        if held is not None:
            branch.params = None
            values = held.take()
            branch.given = values
            self.core.metrics.handoff.observe(now - branch.granted_at)
        branch.failure = None
        leg.message = self._message(leg, branch, self._target, legs.decode_body(self._plan, branch.index, values))
        self._send_leg(leg)
        if self._merge is not None and self._stage is _STAGE_OPEN and (out := self._begin_stream(now)):
            self._port.write(out)

    def _do_commit(self, branch: Branch, now: float) -> None:
        if not self._first_content_s:
            self._first_content_s = now - self._started
            self.core.metrics.first_content.observe(self._first_content_s)

    def _do_finish(self, branch: Branch, now: float) -> None:
        if self._plan.branches > 1 and any(other.flow.state is not _STATE_DONE for other in self._branches):
            return
        if self._plan.stream:
            if self._merge is not None:
                self._port.write(self._merge.end())
            self._port.finish()
            self._close(now, "done", "")
            return
        body = self._whole_reply()
        if isinstance(body, Fault):
            self._fail_with(body, now)
        else:
            self._reply(200, self._branches[0].lines, body, now, "done", "")

    def _do_fail(self, branch: Branch, now: float) -> None:
        if self._stage is _STAGE_BEGUN:
            self._do_abort(branch, now)
        elif self._stage is _STAGE_OPEN:
            self._fail_with(branch.failure or faults.internal(), now)

    def _do_abort(self, branch: Branch, now: float) -> None:
        if self._stage is _STAGE_OPEN:  # one branch has content, but another has not been sent to D yet
            self._do_fail(branch, now)
        if self._stage is not _STAGE_BEGUN:
            return
        failure = branch.failure
        event = failure.event() if isinstance(failure, Fault) else b"" if failure is None else event_of(failure)
        self.core.metrics.count("stream_errors_total")
        self._port.abort(b"".join(branch.held) + event)
        branch.held = []
        self._close(now, "failed", failure.type if isinstance(failure, Fault) else "upstream")

    # ---- the reply

    def _begin_stream(self, now: float) -> bytes:
        """Let the status leave if some branch has content and P can refuse none any more; returns what was held, or b""."""
        states = [branch.flow.state for branch in self._branches]
        if self._stage is not _STAGE_OPEN or not any(state in (_STATE_STREAMING, _STATE_DONE) for state in states):
            return b""
        if min(states) < _STATE_DECODING:
            return b""
        first = next(branch for branch in self._branches if branch.lines)
        self._begin_reply(200, first.lines, None)
        out = b"".join([piece for branch in self._branches for piece in branch.held])
        for branch in self._branches:
            branch.held = []
            if self._merge is None and branch.leg is not None:
                branch.leg.relaying = branch.cached is None and not branch.leg.splitter.held
        return out

    def _whole_reply(self) -> bytes | Fault:
        parts = [branch.reply for branch in self._branches if branch.reply is not None]
        if len(parts) == 1:
            body, reply = parts[0]
            return merge.single_reply(body, reply, self._branches[0].cached)
        try:
            cached = [branch.cached for branch in self._branches]
            return merge.replies([reply for _, reply in parts], cached, self._plan.n, self._request_id.decode())
        except (KeyError, TypeError, IndexError):
            return faults.not_json(_SIDE_DECODE)

    # ---- requests

    def _message(self, leg: Leg, branch: Branch, target: bytes, body: bytes) -> bytes:
        """The complete request of a leg. All legs of a branch have one request id."""
        request_id = self._request_id
        if len(self._branches) > 1:
            request_id = b"%b-%d" % (request_id, branch.index)
        if branch.flow.reprefills:
            request_id = b"%b-r%d" % (request_id, branch.flow.reprefills)
        server = leg.server
        rank = b"%d" % leg.rank if leg.rank >= 0 else self._rank
        return headers.message(b"POST", server.prefix + target, server.host_header, self._client_lines, request_id, rank, body)

    def _session_key(self) -> bytes:
        if self.core.config.policy != Policy.SESSION:
            return b""
        if (value := headers.value_of(self._request.headers, self.core.session_header)) != b"":
            return value
        for name in _SESSION_FIELDS:
            if isinstance(word := self._plan.body.get(name), str) and word:
                return word.encode()
        return b""


# By Action.
_DO: Final = (
    Exchange._do_close,
    Exchange._do_release,
    Exchange._do_alone,
    Exchange._do_prefill,
    Exchange._do_decode,
    Exchange._do_send,
    Exchange._do_commit,
    Exchange._do_finish,
    Exchange._do_fail,
    Exchange._do_abort,
)
