"""Several prompts and several choices: legs of one, and one reply of them all."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from expertwire.proxy.seam import Failure, Kind, Leg
from proxy.world import DONE, Client, World, config_of, reply_of, text_event

RID = [(b"x-request-id", b"abc")]


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, "prompt_tokens_details": details}


def prefill_all(client: Client) -> list[Leg]:
    for leg in list(client.of(Kind.PREFILL)):
        client.prefill(leg)
    return sorted(client.of(Kind.DECODE), key=lambda leg: leg.branch)


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_replies_are_merged_in_order(order: tuple[int, ...]) -> None:
    world = World(config_of(prefill=2, decode=2))
    client = world.ask({"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 5}, headers=RID)
    sent = client.calls(Kind.PREFILL)
    assert [(leg.body["prompt"], leg.body["seed"]) for leg in sent] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert [leg.headers[b"x-request-id"] for leg in sent] == [b"abc-0", b"abc-1", b"abc-2", b"abc-3"]
    legs = prefill_all(client)
    used = [leg.body["kv_transfer_params"]["remote_request_id"] for leg in client.calls(Kind.DECODE)]
    assert len(set(used)) == 4
    for branch in order:
        assert client.how == ""
        more = {"id": f"cmpl-abc-{branch}", "usage": usage(10 + branch // 2, branch + 1)}
        client.answer(legs[branch], 200, reply_of(f"text {branch}", kv_transfer_params=None, **more))
    assert client.status == 200
    assert [(choice["index"], choice["text"]) for choice in client.json["choices"]] == [(i, f"text {i}") for i in range(4)]
    assert client.json["usage"] == usage(10 + 11, 1 + 2 + 3 + 4)
    assert client.json["id"] == "cmpl-abc"
    assert "kv_transfer_params" not in client.json
    assert client.header(b"x-request-id") == b"abc"
    world.assert_idle()


def test_choices_of_one_prompt_go_to_one_p() -> None:
    world = World(config_of(prefill=3))
    client = world.ask({"model": "m", "prompt": ["a", "b"], "n": 3})
    names = [leg.server.name for leg in client.of(Kind.PREFILL)]
    assert len(set(names[:3])) == len(set(names[3:])) == 1
    assert names[0] != names[3]
    client.leave()
    for leg in list(client.open):
        client.fail(leg, Failure.LOST)
    world.assert_idle()


def test_streams_are_interleaved() -> None:
    world = World()
    body = {"model": "m", "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    client = world.ask(body, headers=RID)
    first, second = prefill_all(client)
    for leg in (first, second):
        client.head(leg)
    client.data(first, text_event("a1", ident="cmpl-abc-0"))
    assert client.how == "begun", "both prompts are with D, so P can refuse none"
    client.data(second, text_event("b1", ident="cmpl-abc-1") + text_event("b2", ident="cmpl-abc-1"))
    client.data(first, text_event("a2")[:30])
    client.data(first, text_event("a2")[30:])
    for leg, tokens in ((second, 2), (first, 2)):
        client.data(
            leg, b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":9}}\n\n' % tokens + DONE
        )
        client.end(leg)
    assert client.how == "finished"
    *events, total, done = client.events
    assert done == "[DONE]"
    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in events] == [(0, "a1"), (1, "b1"), (1, "b2"), (0, "a2")]
    assert {e["id"] for e in events} == {"cmpl-abc"}
    assert total["choices"] == []
    assert total["usage"] == usage(14, 4)
    world.assert_idle()


def test_usage_only_if_it_was_asked_for() -> None:
    client = World().ask({"model": "m", "prompt": ["a", "b"], "stream": True})
    for leg in prefill_all(client):
        client.head(leg)
        client.data(leg, text_event("x") + DONE)
        client.end(leg)
    assert client.events[-1] == "[DONE]"
    assert len(client.events) == 3


def test_the_status_waits_until_p_can_refuse_none() -> None:
    world = World()
    client = world.ask({"model": "m", "prompt": ["a", "too long"], "stream": True})
    first, second = client.of(Kind.PREFILL)
    client.prefill(first)
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, text_event("a1") + text_event("a2"))
    assert client.how == ""
    client.answer(second, 400, b"too long", [(b"content-type", b"text/plain")])
    assert (client.how, client.status, client.body) == ("reply", 400, b"too long")
    assert client.cancelled == [leg]
    world.assert_idle()


def test_what_was_held_leaves_with_the_status() -> None:
    client = World().ask({"model": "m", "prompt": ["a", "b"], "stream": True})
    first, second = client.of(Kind.PREFILL)
    client.prefill(first)
    (leg,) = client.of(Kind.DECODE)
    client.head(leg)
    client.data(leg, text_event("a1") + DONE)
    client.end(leg)
    assert client.how == ""
    client.prefill(second)
    assert client.how == "begun"
    assert [e["choices"][0]["text"] for e in client.events] == ["a1"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_branch_that_fails_ends_all(stream: bool) -> None:
    world = World(instant=False)
    client = world.ask({"model": "m", "prompt": ["a", "b", "c"], "stream": stream})
    for leg in client.of(Kind.PREFILL):
        client.connect(leg)
    prefills = client.of(Kind.PREFILL)
    client.prefill(prefills[0])
    client.prefill(prefills[1])
    held, sent = client.of(Kind.DECODE)
    client.connect(sent)
    client.fail(sent, Failure.LOST)
    assert (client.how, client.status) == ("reply", 502)
    assert client.cancelled == [held]
    assert client.abandoned == [prefills[2]]
    client.fail(prefills[2], Failure.LOST)
    (release,) = client.open  # of the branch whose parameters D was never sent
    assert release.kind is Kind.RELEASE
    client.connect(release)
    client.answer(release, 404, b"")
    world.assert_idle()


def test_a_refusal_after_the_status_is_an_event() -> None:
    world = World()
    client = world.ask({"model": "m", "prompt": ["a", "b"], "stream": True})
    first, second = prefill_all(client)
    client.head(first)
    client.data(first, text_event("a1"))
    client.answer(second, 400, {"error": {"message": "no", "code": 400}})
    assert client.how == "aborted"
    assert client.events[-1] == {"error": {"message": "no", "code": 400}}
    assert client.cancelled == [first]
    world.assert_idle()


def test_a_refusal_after_the_status_that_is_no_json() -> None:
    client = World().ask({"model": "m", "prompt": ["a", "b"], "stream": True})
    first, second = prefill_all(client)
    client.head(first)
    client.data(first, text_event("a1"))
    client.answer(second, 503, b"<html>", [])
    assert client.events[-1]["error"]["code"] == 503


def test_cached_tokens_are_ps() -> None:
    world = World()
    client = world.ask({"model": "m", "prompt": ["a", "b"], "n": 2})
    for index, leg in enumerate(list(client.of(Kind.PREFILL))):
        client.prefill(leg, usage=usage(10, 1, cached=index))
    for leg in sorted(client.of(Kind.DECODE), key=lambda leg: leg.branch):
        client.answer(leg, 200, reply_of("x", usage=usage(10, 2, cached=9)))
    assert client.json["usage"] == usage(20, 8, cached=0 + 2)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_one_branch_are_ps(stream: bool) -> None:
    client = World().ask({"model": "m", "prompt": "a", "stream": stream})
    client.prefill(usage=usage(10, 1, cached=4))
    (leg,) = client.of(Kind.DECODE)
    if stream:
        client.head(leg)
        client.data(leg, text_event("x"))
        client.data(leg, text_event("y"))
        client.data(leg, text_event("", usage=usage(10, 2, cached=9)) + DONE)
        client.end(leg)
        assert [e["choices"][0]["text"] for e in client.events[:-1]] == ["x", "y", ""]
        assert client.events[-2]["usage"] == usage(10, 2, cached=4)
    else:
        client.answer(leg, 200, reply_of(usage=usage(10, 2, cached=9), kv_transfer_params={"remote_host": "h"}))
        assert client.json["usage"] == usage(10, 2, cached=4)
        assert "kv_transfer_params" not in client.json


@pytest.mark.parametrize("choices", [None, "x", [5]])
def test_a_branch_without_its_choice(choices: Any) -> None:
    client = World().ask({"model": "m", "prompt": ["a", "b"]})
    legs = prefill_all(client)
    client.answer(legs[0], 200, reply_of())
    client.answer(legs[1], 200, reply_of(choices=choices))
    assert client.status == 502


def test_batches_to_d_alone_by_a_setting() -> None:
    world = World(config_of(batch="decode"))
    body = {"model": "m", "prompt": ["a", "b"], "n": 2}
    client = world.ask(body)
    assert [leg.body for leg in client.calls(Kind.DECODE)] == [body]
    assert not client.calls(Kind.PREFILL)
    assert world.core.metrics.value("decode_alone_total", "batch") == 1


def test_answers_that_are_one_reply_have_one_limit() -> None:
    """Each is within it, and together they are not: all are held until the last has come."""
    world = World(config_of(limits__reply_bytes=3000))
    client = world.ask({"model": "m", "prompt": "x", "n": 3})
    for _ in range(3):
        client.prefill()
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of("y" * 1200))
    assert client.how == ""
    client.answer(client.of(Kind.DECODE)[0], 200, reply_of("y" * 2000))
    assert (client.status, client.error["type"]) == (502, "upstream_too_large")
    assert not client.of(Kind.DECODE)
    world.assert_idle()
