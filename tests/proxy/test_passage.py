"""What is passed on to a D, responses by their id, and what the proxy answers itself."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from expertwire.proxy import config, core, headers
from expertwire.proxy.headers import origin_form
from expertwire.proxy.seam import Failure, Kind, Mode
from proxy.world import JSON, SSE, World, config_of


def test_what_is_no_endpoint_of_ours_goes_to_a_d() -> None:
    world = World()
    sent_headers = [
        (b"authorization", b"Bearer s"),
        (b"content-type", b"application/json"),
        (b"connection", b"keep-alive, x-mine"),
        (b"x-mine", b"1"),
    ]
    client = world.ask({"model": "m", "prompt": "x"}, b"/tokenize?a=1", headers=[*sent_headers, (b"proxy-authorization", b"secret")])
    (leg,) = client.of(Kind.PLAIN)
    sent = client.sent[leg]
    assert (sent.method, sent.target, sent.body) == (b"POST", b"/tokenize?a=1", {"model": "m", "prompt": "x"})
    assert sent.headers[b"authorization"] == b"Bearer s"
    assert sent.headers[b"host"] == b"10.0.1.1:8000"
    assert not {b"x-mine", b"connection", b"proxy-authorization"} & set(sent.headers)
    assert leg.server.side == "decode"
    assert client.head(leg, 201, [*JSON, (b"content-length", b"5"), (b"x-a", b"b"), (b"x-request-id", b"other")]) is Mode.STREAM
    client.data(leg, b"he")
    client.data(leg, b"llo")
    client.end(leg)
    assert (client.how, client.status, client.body, client.length) == ("finished", 201, b"hello", 5)
    assert client.header(b"x-a") == b"b"
    assert client.lines.count(b"x-request-id") == 1
    world.assert_idle()


@pytest.mark.parametrize("status", [200, 204, 304, 400, 404, 500, 503])
def test_any_status_is_passed_on_with_its_head(status: int) -> None:
    client = World(config_of(decode=2)).ask(b"", b"/v1/models", b"GET")
    (leg,) = client.of(Kind.PLAIN)
    assert b"content-length" not in client.sent[leg].headers
    client.head(leg, status, [(b"retry-after", b"3")])
    client.end(leg)
    assert (client.how, client.status, client.header(b"retry-after")) == ("finished", status, b"3")


def test_a_post_without_a_body_says_so() -> None:
    client = World().ask(b"", b"/reset_prefix_cache")
    assert client.calls(Kind.PLAIN)[0].headers[b"content-length"] == b"0"


def test_head_has_no_body() -> None:
    client = World().ask(b"", b"/v1/models", b"HEAD")
    assert client.of(Kind.PLAIN)[0].head_only


@pytest.mark.parametrize("sse", [False, True])
def test_a_passed_on_answer_that_breaks_is_no_end(sse: bool) -> None:
    client = World().ask(b"", b"/x", b"GET")
    (leg,) = client.of(Kind.PLAIN)
    client.head(leg, 200, SSE if sse else JSON)
    client.data(leg, b"abc")
    client.fail(leg, Failure.LOST)
    assert client.how == "aborted"
    assert client.body.startswith(b'abcdata: {"error"') if sse else client.body == b"abc"


@pytest.mark.parametrize(
    ("method", "failure", "tries"),
    [(b"GET", Failure.STALE, 2), (b"POST", Failure.STALE, 1), (b"GET", Failure.LOST, 1), (b"POST", Failure.TIMED_OUT, 1)],
)
def test_only_what_may_be_repeated_is(method: bytes, failure: Failure, tries: int) -> None:
    world = World(config_of(decode=2))
    client = world.ask(b"", b"/x", method)
    client.fail(client.of(Kind.PLAIN)[0], failure)
    assert len(client.legs) == tries
    assert client.how == ("" if tries == 2 else "reply")
    if tries == 1:
        assert client.status == (504 if failure is Failure.TIMED_OUT else 502)
    else:
        client.leave()
    world.assert_idle()


def test_what_was_not_sent_goes_elsewhere() -> None:
    world = World(config_of(decode=2), instant=False)
    client = world.ask(b"{}", b"/tokenize")
    first = client.of(Kind.PLAIN)[0]
    client.fail(first, Failure.CONNECT)
    second = client.of(Kind.PLAIN)[0]
    assert second.server is not first.server
    client.fail(second, Failure.CONNECT)
    assert client.status == 502
    world.assert_idle()


def test_no_d_at_all() -> None:
    world = World()
    world.core.fleet.remove("decode", "d0")
    assert world.ask(b"", b"/v1/models", b"GET").status == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_asked_of_the_d_that_made_it(stream: bool) -> None:
    world = World(config_of(decode=3))
    client = world.ask({"model": "m", "input": "x", "stream": stream}, b"/v1/responses")
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    made = {"id": "resp_7", "object": "response", "output": [{"type": "message"}], "usage": None}
    if stream:
        client.head(leg)
        for kind in ("response.created", "response.in_progress"):
            client.data(leg, b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, "response": made | {"error": None}})))
            assert client.how == ""
        client.data(leg, b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n')
        assert client.how == "begun"
        client.data(leg, b"event: response.completed\ndata: %b\n\n" % orjson.dumps({"type": "response.completed", "response": made}))
        client.end(leg)
        assert client.how == "finished"
    else:
        client.answer(leg, 200, made)
        assert client.json == made
    for method, path in ((b"GET", b"/v1/responses/resp_7?stream=true"), (b"POST", b"/v1/responses/resp_7/cancel")) * 3:
        asked = world.ask(b"", path, method)
        assert asked.of(Kind.PLAIN)[0].server is leg.server
        asked.leave()
    follow = world.ask({"model": "m", "input": "y", "previous_response_id": "resp_7"}, b"/v1/responses")
    assert follow.of(Kind.DECODE)[0].server is leg.server
    follow.leave()
    world.assert_idle()


@pytest.mark.parametrize("found", [True, False])
def test_a_response_that_is_not_known_here_is_looked_for(found: bool) -> None:
    world = World(config_of(decode=3))
    client = world.ask(b"", b"/v1/responses/resp_9", b"GET")
    for _ in range(2):
        client.answer(client.of(Kind.PLAIN)[0], 404, {"error": {"message": "not here"}})
    (leg,) = client.of(Kind.PLAIN)
    assert len({leg.server for leg in client.legs}) == 3
    client.answer(leg, 200 if found else 404, {"id": "resp_9"} if found else {"error": {"message": "not here"}})
    assert client.status == (200 if found else 404)
    world.assert_idle()


def test_homes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "HOMES_MAX", 3)
    homes = core.Homes()
    for i in range(5):
        homes.learn(f"r{i}", f"d{i}")
    assert [homes.of(b"r%d" % i) for i in range(5)] == ["", "", "d2", "d3", "d4"]


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        (b"/v1/models?x=1", b"/v1/models?x=1"),
        (b"http://evil:1/v1/models?x=http://y", b"/v1/models?x=http://y"),
        (b"http://evil", b"/"),
        (b"http://evil?x=1", b"/?x=1"),
        (b"//evil/x", b"//evil/x"),
        (b"*", b"/"),
        (b"evil:80", b"/"),
    ],
)
def test_no_client_names_a_server(target: bytes, origin: bytes) -> None:
    assert origin_form(target) == origin
    client = World().ask(b"", target, b"GET")
    (sent,) = client.calls(Kind.PLAIN)
    assert (sent.target, sent.headers[b"host"]) == (origin, b"10.0.1.1:8000")


@pytest.mark.parametrize(
    ("location", "told"),
    [
        (b"http://10.0.1.1:8000/docs?a=1", b"/docs?a=1"),
        (b"http://10.0.1.1:8000", b"/"),
        (b"http://10.0.1.1:80001/x", b"http://10.0.1.1:80001/x"),
        (b"/docs", b"/docs"),
    ],
)
def test_a_location_on_the_server_becomes_a_path(location: bytes, told: bytes) -> None:
    assert headers.plain_down_lines([(b"location", location)], b"http://10.0.1.1:8000") == b"location: %b\r\n" % told


@pytest.mark.parametrize(
    ("given", "kept"),
    [([b"abc"], b"abc"), ([b"a", b"b"], b"a"), ([], None), ([b""], None), ([b"a b"], None), ([b"x" * 257], None), ([b"\xc3\xa9"], None)],
)
def test_one_request_id_on_every_leg_and_in_the_reply(given: list[bytes], kept: bytes | None) -> None:
    client = World().ask({"prompt": "x"}, headers=[(b"x-request-id", value) for value in given])
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    ids = {value for sent in client.sent.values() for name, value in sent.pairs if name == b"x-request-id"}
    assert len(ids) == 1
    client.answer(leg, 400, b"no")
    assert {client.header(b"x-request-id")} == ids
    assert (ids == {kept}) if kept else ids.pop()


def test_ids_of_ours_differ() -> None:
    world = World()
    assert len({world.core.new_id() for _ in range(100)} | {World().core.new_id()}) == 100


def test_ranks() -> None:
    table = {"prefill": [{"url": "http://p", "ranks": 2}], "decode": [{"url": "http://d/base/"}]}
    world = World(config.from_table(table))
    clients = [world.ask({"prompt": "x"}, headers=[(b"x-data-parallel-rank", b"7")]) for _ in range(4)]
    assert [client.calls(Kind.PREFILL)[0].headers[b"x-data-parallel-rank"] for client in clients] == [b"0", b"1", b"0", b"1"]
    clients[0].prefill()
    (sent,) = clients[0].calls(Kind.DECODE)
    assert sent.headers[b"x-data-parallel-rank"] == b"7"  # the server has no ranks of ours, so the client's own goes through
    assert sent.target == b"/base/v1/completions"
    for client in clients:
        client.leave()


def test_servers_are_shown_only_if_asked_for() -> None:
    for show in (False, True):
        client = World(config_of(show_servers=show)).ask({"prompt": "x"})
        client.prefill()
        client.answer(client.of(Kind.DECODE)[0], 400, b"")
        assert (client.header(b"x-expertwire-prefill"), client.header(b"x-expertwire-decode")) == ((b"p0", b"d0") if show else (b"", b""))


def own(world: World, path: bytes, method: bytes = b"GET") -> Any:
    return core.own(world.core, method, path)


def test_health_is_not_readiness() -> None:
    world = World()
    assert own(world, b"/health")[0] == 200
    assert own(world, b"/ready")[0] == 200
    world.core.fleet.remove("prefill", "p0")
    status, lines, body = own(world, b"/ready")
    assert status == 503
    assert b"retry-after" in lines
    assert orjson.loads(body) == {"ready": False, "stopping": False, "prefill": 0, "decode": 1}
    assert own(world, b"/health")[0] == 200
    world = World()
    world.core.stopping = True
    assert own(world, b"/ready")[0] == 503
    assert own(world, b"/v1/models") is None
    assert own(world, b"/health", b"POST")[0] == 405


def test_a_server_that_is_tripped_is_not_ready() -> None:
    world = World()
    for _ in range(3):
        world.core.fleet.failed(world.core.fleet.servers("decode")[0], 0.0)
    assert own(world, b"/ready")[0] == 503


def test_metrics_are_text() -> None:
    world = World()
    client = world.ask({"prompt": "x"})
    client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 429, b"")
    status, _, body = own(world, b"/metrics")
    text = body.decode()
    assert status == 200
    assert 'expertwire_proxy_replies_total{status="429"} 1\n' in text
    assert 'expertwire_proxy_legs_total{side="decode",server="d0",outcome="refused"} 1\n' in text
    assert "expertwire_proxy_in_flight 0\n" in text
    assert "expertwire_proxy_prefill_seconds_count 1\n" in text
    assert 'expertwire_proxy_prefill_seconds_bucket{le="+Inf"} 1\n' in text
    assert 'expertwire_proxy_requests_total{endpoint="completions",outcome="failed"} 1\n' in text
