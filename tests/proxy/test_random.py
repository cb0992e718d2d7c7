"""Whole requests under every order of what servers, sockets and clients may do."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertwire.proxy import params
from expertwire.proxy.config import Config
from expertwire.proxy.seam import Failure, Kind, Leg, Mode
from proxy.world import DONE, JSON, SSE, Client, World, config_of, parameters, reply_of, text_event

STATUSES = [200, 400, 404, 429, 500, 502, 503, 504]
BODIES = st.builds(
    lambda prompts, n, stream, usage: (
        {"model": "m", "prompt": prompts, "stream": stream}
        | ({"n": n} if n > 1 else {})
        | ({"stream_options": {"include_usage": True}} if usage and stream else {})
    ),
    st.sampled_from(["one", ["a", "b"], [[1, 2], [3], [4]]]),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
CONFIGS = st.builds(
    lambda prefill, decode, alone: config_of(prefill, decode, allow_decode_alone=alone),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
)


class Chaos:
    """Plays every server, and draws what each does next."""

    def __init__(self, config: Config, body: dict[str, Any], draw: Any, instant: bool) -> None:
        self.draw = draw
        self.world = World(config, instant=instant)
        self.client: Client = self.world.ask(body)
        self.streams: dict[Leg, int] = {}  # pieces that came
        self.granted: set[str] = set()
        self.broken: set[Leg] = set()
        self.sent_after_leaving: list[Leg] = []

    def calls(self) -> int:
        """Everything that servers were asked for, but to free blocks."""
        return sum(leg.kind is not Kind.RELEASE for leg in self.client.sent)

    def turn(self) -> None:
        self.world.now += self.draw(st.sampled_from([0.0, 0.0, 0.1, 26.0]))
        client = self.client
        leg = self.draw(st.sampled_from(client.open))
        if leg in client.waiting:
            if self.draw(st.booleans()):
                client.connect(leg)
            else:
                client.fail(leg, self.draw(st.sampled_from([Failure.CONNECT, Failure.DESCRIPTORS])))
        elif leg in self.streams:
            self.stream(leg)
        else:
            self.answer(leg)

    def answer(self, leg: Leg) -> None:
        client = self.client
        if self.draw(st.integers(0, 5)) == 0:
            client.fail(leg, self.draw(st.sampled_from([f for f in Failure if f is not Failure.CONNECT])))
            return
        late = leg.kind is Kind.LATE
        status = self.draw(st.sampled_from([200] * 8 + STATUSES))
        if leg.kind is Kind.RELEASE or status != 200:
            client.answer(leg, status if status != 200 else 404, {"error": {"message": "no"}})
        elif leg.kind in (Kind.PREFILL, Kind.LATE):
            if self.draw(st.integers(0, 7)) == 0:
                client.answer(leg, 200, {"choices": [], "kv_transfer_params": parameters(1, remote_host=None)})
                return
            self.world.number += 1
            values = parameters(self.world.number)
            self.granted.add(values["remote_request_id"])
            client.answer(leg, 200, {"choices": [{}], "kv_transfer_params": values})
            assert not late or client.of(Kind.RELEASE), "nobody comes for these blocks, and they were not freed"
        elif client.sent[leg].body.get("stream"):
            assert client.head(leg, 200, SSE) is Mode.STREAM
            self.streams[leg] = 0
        else:
            client.answer(leg, 200, reply_of(f"by {leg.branch}"), JSON)

    def stream(self, leg: Leg) -> None:
        client, what = self.client, self.draw(st.sampled_from(["text", "text", "half", "done", "end", "error", "lost"]))
        self.streams[leg] += 1
        event = text_event(f"{leg.branch}.{self.streams[leg]}")
        if what == "text":
            client.data(leg, event)
        elif what == "half":
            client.data(leg, event[:25])
            if leg in client.open:
                client.data(leg, event[25:])
        elif what == "done":
            client.data(leg, event + DONE)
            if leg in client.open:
                client.end(leg)
        elif what == "error":
            client.data(leg, b'data: {"error": {"message": "broke", "code": 500}}\n\n')
        elif what == "end":
            client.end(leg)
        else:
            client.fail(leg, Failure.LOST)

    def check(self) -> None:
        client = self.client
        assert client.talk.over
        assert client.gone or client.how in ("reply", "finished", "aborted")
        used: list[str] = []
        for leg, sent in client.sent.items():
            values = sent.body.get(params.NAME)
            if leg.kind in (Kind.DECODE, Kind.RELEASE) and values is not None:
                used.append(values["remote_request_id"])
        assert len(used) == len(set(used)), "parameters were used twice"
        assert set(used) <= self.granted
        if client.how == "finished":
            assert client.body.endswith(DONE)
            assert client.status == 200
        if client.how == "aborted":
            assert b'{"error"' in client.body
            assert not client.body.endswith(DONE)
        if client.how == "reply" and client.status == 200:
            assert [choice["index"] for choice in client.json["choices"]] == list(range(len(client.json["choices"])))
        assert b"engine-" not in client.body
        self.world.assert_idle()


@given(CONFIGS, BODIES, st.booleans(), st.integers(0, 30), st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_order_of_everything(config: Config, body: dict[str, Any], instant: bool, leave_after: int, data: st.DataObject) -> None:
    chaos = Chaos(config, body, data.draw, instant)
    for turn in range(200):
        if not chaos.client.open:
            break
        if turn == leave_after and not chaos.client.talk.over:
            calls = chaos.calls()
            chaos.client.leave()
            assert not [leg for leg in chaos.client.open if leg.kind not in (Kind.RELEASE, Kind.LATE)], (
                "a leg stayed open after the client left"
            )
            assert calls == chaos.calls()
            continue
        chaos.turn()
    else:
        chaos.client.leave()
        for leg in list(chaos.client.open):
            chaos.client.fail(leg, Failure.CONNECT)
    chaos.check()
