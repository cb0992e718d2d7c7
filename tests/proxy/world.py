"""A conversation without sockets: a Port that records, servers that are played by the test, and a clock that is a number."""

from __future__ import annotations

import re
from typing import Any

import orjson

from expertwire.proxy import config as configs
from expertwire.proxy.config import Config
from expertwire.proxy.conversation import Conversation
from expertwire.proxy.core import Core
from expertwire.proxy.exchange import open_exchange
from expertwire.proxy.seam import Failure, Kind, Leg, Mode, Request

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


def config_of(prefill: int = 1, decode: int = 1, **changes: Any) -> Config:
    table = {
        "prefill": [{"url": f"http://10.0.0.{i + 1}:8000", "name": f"p{i}"} for i in range(prefill)],
        "decode": [{"url": f"http://10.0.1.{i + 1}:8000", "name": f"d{i}"} for i in range(decode)],
    }
    return configs.override(configs.from_table(table), **changes)


def parameters(number: int = 1, **changes: Any) -> dict[str, Any]:
    values = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, number]],
        "remote_engine_id": f"engine-{number}",
        "remote_request_id": f"cmpl-{number}",
        "remote_host": "10.9.9.9",
        "remote_port": 5600,
        "tp_size": 1,
        "something_new": {"of": "a later version"},
    }
    return values | changes


class Sent:
    """A request as a server would read it."""

    def __init__(self, leg: Leg) -> None:
        head, _, self.raw = leg.message.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        self.method, self.target, version = first.split(b" ")
        assert version == b"HTTP/1.1"
        self.pairs = [(name.lower(), value) for name, value in (line.split(b": ", 1) for line in lines)]
        self.headers = dict(self.pairs)
        if b"content-length" in self.headers:
            assert int(self.headers[b"content-length"]) == len(self.raw)

    @property
    def body(self) -> dict[str, Any]:
        return orjson.loads(self.raw)


class World:
    """One core; requests are made by `ask`. `instant`: the pool has a connection for every call."""

    def __init__(self, config: Config | None = None, *, instant: bool = True) -> None:
        self.core = Core(config or config_of(), b"\x01\x02")
        self.instant = instant
        self.half_close = True  # connections that can be ended on one side
        self.now = 100.0
        self.number = 0

    def ask(self, body: Any, path: bytes = b"/v1/completions", method: bytes = b"POST", headers: Any = ()) -> Client:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return Client(self, Request(method, path, [(b"host", b"front"), *headers], raw))

    def assert_idle(self) -> None:
        """Nothing outlives its request."""
        assert self.core.in_flight == 0
        assert self.core.open_legs == 0
        for side in ("prefill", "decode"):
            for server in self.core.fleet.servers(side):
                assert server.in_flight == 0, server.name
                assert not any(server.rank_in_flight)


class Client:
    """A client and the edge in one: what it was sent, and the legs that stand open."""

    def __init__(self, world: World, request: Request, *, start: bool = True) -> None:
        self.world = world
        self.legs: list[Leg] = []  # every one that was ever called
        self.sent: dict[Leg, Sent] = {}
        self.waiting: list[Leg] = []  # for a connection
        self.open: list[Leg] = []
        self.cancelled: list[Leg] = []
        self.abandoned: list[Leg] = []
        self.status = 0
        self.lines = b""
        self.body = b""
        self.length: int | None = None
        self.how = ""  # reply, begun, finished, aborted
        self.gone = False
        self.talk: Conversation = open_exchange(world.core, self, request)
        if start:
            self.talk.start(world.now)

    # the Port
    def call(self, leg: Leg) -> bool:
        assert leg not in self.legs
        self.legs.append(leg)
        if not self.world.instant:
            self.waiting.append(leg)
        self.open.append(leg)
        return self.world.instant

    def send(self, leg: Leg) -> None:
        assert leg in self.open
        assert leg not in self.waiting
        assert leg not in self.sent
        assert leg.message
        self.sent[leg] = Sent(leg)

    def cancel(self, leg: Leg) -> None:
        self.open.remove(leg)
        self.cancelled.append(leg)
        if leg in self.waiting:
            self.waiting.remove(leg)

    def abandon(self, leg: Leg) -> bool:
        assert leg in self.sent
        if self.world.half_close:
            self.abandoned.append(leg)
        return self.world.half_close

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        assert self.how == ""
        assert not self.gone
        self.how, self.status, self.lines, self.body = "reply", status, headers, body

    def begin(self, status: int, headers: bytes, length: int | None) -> None:
        assert self.how == ""
        assert not self.gone
        self.how, self.status, self.lines, self.length = "begun", status, headers, length

    def write(self, data: bytes) -> None:
        assert self.how == "begun"
        assert not self.gone
        self.body += data

    def finish(self) -> None:
        assert self.how == "begun"
        self.how = "finished"

    def abort(self, data: bytes) -> None:
        assert self.how == "begun"
        assert not self.gone
        self.body += data
        self.how = "aborted"

    # the servers
    def of(self, kind: Kind) -> list[Leg]:
        """The open legs of a kind, in the order of their calls."""
        return [leg for leg in self.open if leg.kind is kind]

    def calls(self, kind: Kind) -> list[Sent]:
        """What was sent on legs of a kind."""
        return [self.sent[leg] for leg in self.legs if leg.kind is kind and leg in self.sent]

    def connect(self, leg: Leg) -> None:
        self.waiting.remove(leg)
        self.talk.leg_ready(leg, self.world.now)

    def fail(self, leg: Leg, failure: Failure) -> None:
        self.open.remove(leg)
        if leg in self.waiting:
            self.waiting.remove(leg)
        self.talk.leg_failed(leg, failure, self.world.now)

    def answer(self, leg: Leg, status: int, body: Any, headers: Any = JSON) -> None:
        """A whole answer, by whichever mode it is taken."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        if self.talk.leg_head(leg, status, list(headers), self.world.now) is Mode.STREAM:
            self.data(leg, raw)
            self.end(leg)
        else:
            self.open.remove(leg)
            self.talk.leg_body(leg, raw, self.world.now)

    def head(self, leg: Leg, status: int = 200, headers: Any = SSE) -> Mode:
        return self.talk.leg_head(leg, status, list(headers), self.world.now)

    def data(self, leg: Leg, data: bytes) -> None:
        out = self.talk.leg_data(leg, data, self.world.now)
        if out is not None:
            self.write(out)

    def end(self, leg: Leg) -> None:
        self.open.remove(leg)
        self.talk.leg_ended(leg, self.world.now)

    def leave(self) -> None:
        self.gone = True
        self.talk.client_gone(self.world.now)

    def prefill(self, leg: Leg | None = None, **more: Any) -> dict[str, Any]:
        """P answers well; returns the parameters that it handed out."""
        leg = leg or self.of(Kind.PREFILL)[0]
        self.world.number += 1
        values = parameters(self.world.number)
        self.answer(leg, 200, {"id": "cmpl-p", "choices": [{"index": 0, "text": "x"}], "kv_transfer_params": dict(values)} | more)
        return values

    # what the client has
    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    def header(self, name: bytes) -> bytes:
        found = re.findall(rb"(?m)^" + re.escape(name) + rb": (.*)\r$", self.lines)
        return found[0] if found else b""

    @property
    def events(self) -> list[Any]:
        """The data of each event, read where it is JSON."""
        data = [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]
        return [orjson.loads(item) if item[:1] == b"{" else item.decode() for item in data]


def text_event(text: str, index: int = 0, ident: str = "cmpl-d", **more: Any) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": ident, "created": 1, "object": "text_completion", "choices": [choice]} | more) + b"\n\n"


def delta_event(delta: dict[str, Any], finish: str | None = None, index: int = 0, ident: str = "chatcmpl-d") -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": ident, "created": 1, "choices": [choice]}) + b"\n\n"


ROLE = delta_event({"role": "assistant", "content": ""})
DONE = b"data: [DONE]\n\n"


def reply_of(text: str = " world", **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": None}
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    return {"id": "cmpl-d", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": usage} | more
