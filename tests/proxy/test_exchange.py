"""One request from body to reply, without sockets: the rows of docs/proxy.md's tables at the level where they are decided."""

from __future__ import annotations

import gc

import pytest

from expertwire.proxy.conversation import Conversation
from expertwire.proxy.seam import Failure, Kind
from proxy.world import DONE, ROLE, SSE, World, config_of, delta_event, reply_of, text_event


def test_prefill_then_decode() -> None:
    world = World()
    headers = [(b"authorization", b"Bearer secret"), (b"x-request-id", b"abc-1"), (b"traceparent", b"00-1-2-01"), (b"connection", b"close")]
    client = world.ask({"model": "m", "prompt": "hello", "max_tokens": 7}, headers=headers)
    (sent,) = client.calls(Kind.PREFILL)
    assert sent.target == b"/v1/completions"
    assert sent.headers[b"host"] == b"10.0.0.1:8000"
    assert sent.body["max_tokens"] == 1
    assert sent.body["stream"] is False
    assert sent.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    values = client.prefill()
    (decode,) = client.calls(Kind.DECODE)
    assert decode.body == {"model": "m", "prompt": "hello", "max_tokens": 7, "kv_transfer_params": values}
    for leg in (sent, decode):
        assert leg.headers[b"authorization"] == b"Bearer secret"
        assert leg.headers[b"traceparent"] == b"00-1-2-01"
        assert [value for name, value in leg.pairs if name == b"x-request-id"] == [b"abc-1"]
        assert b"connection" not in leg.headers
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of(kv_transfer_params=None))
    assert client.how == "reply"
    assert client.status == 200
    assert client.json == reply_of()
    assert client.header(b"x-request-id") == b"abc-1"
    world.assert_idle()


def test_a_stream_commits_at_content_and_passes_through() -> None:
    world = World()
    client = world.ask({"model": "m", "messages": [], "stream": True}, b"/v1/chat/completions")
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, ROLE)
    assert client.how == ""
    pieces = [delta_event({"content": word}) for word in ("one", " two", " three")]
    for piece in pieces:
        client.data(leg, piece)
        assert client.how == "begun"
    client.data(leg, delta_event({"content": ""}, "stop") + DONE)
    client.end(leg)
    assert client.how == "finished"
    assert client.body == ROLE + b"".join(pieces) + delta_event({"content": ""}, "stop") + DONE
    world.assert_idle()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500, 501])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_p_is_verbatim(status: int, stream: bool) -> None:
    world = World(config_of(prefill=3))
    client = world.ask({"model": "m", "prompt": "x", "stream": stream})
    client.answer(client.of(Kind.PREFILL)[0], status, b"<html>no</html>", [(b"content-type", b"text/html"), (b"retry-after", b"17")])
    assert (client.how, client.status, client.body) == ("reply", status, b"<html>no</html>")
    assert client.header(b"content-type") == b"text/html"
    assert client.header(b"retry-after") == b"17"
    assert len(client.legs) == 1
    world.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_that_breaks_ends_with_an_error(stream: bool) -> None:
    world = World()
    client = world.ask({"model": "m", "prompt": "x", "stream": stream})
    client.prefill()
    (leg,) = client.of(Kind.DECODE)
    client.head(leg, headers=SSE)
    if stream:
        client.data(leg, text_event("a"))
        client.data(leg, text_event("b")[:20])
    client.fail(leg, Failure.LOST)
    if stream:
        assert client.how == "aborted"
        assert client.events[-1]["error"]["code"] == 502
        assert client.body.startswith(text_event("a") + b'data: {"error"')
    else:
        assert (client.how, client.status) == ("reply", 502)
    world.assert_idle()


@pytest.mark.parametrize("how", ["whole", "stream", "left", "failed", "passed on"])
def test_nothing_is_left_to_the_collector(how: str) -> None:
    """A conversation that is over dies by its count of references."""
    world = World()
    path = b"/tokenize" if how == "passed on" else b"/v1/completions"
    client = world.ask({"model": "m", "prompt": "x", "stream": how in ("stream", "left")}, path)
    if how == "passed on":
        (leg,) = client.of(Kind.PLAIN)
        client.head(leg, 200, [])
        client.end(leg)
    else:
        client.prefill()
        (leg,) = client.of(Kind.DECODE)
        if how == "whole":
            client.answer(leg, 200, reply_of())
        elif how == "failed":
            client.fail(leg, Failure.LOST)
        else:
            client.head(leg)
            client.data(leg, text_event("a"))
            if how == "stream":
                client.data(leg, DONE)
                client.end(leg)
            else:
                client.leave()
    assert client.talk.over
    world.assert_idle()
    del leg
    gc.collect()
    gc.disable()
    try:
        client.legs, client.sent, client.cancelled, client.open = [], {}, [], []
        del client.talk
        assert not [item for item in gc.get_objects() if isinstance(item, Conversation)]
    finally:
        gc.enable()
