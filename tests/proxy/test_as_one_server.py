"""Whole answers, not their texts alone: what a client gets through the proxy is what one server says, but for names."""

from __future__ import annotations

from typing import Any

from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.blocks import State
from expertwire.testing.http.client import ask
from expertwire.testing.http.fake_vllm import Fleet
from proxy.edge import Edge, run

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PROMPT = {"model": MODEL, "prompt": "one two three", "max_tokens": 4}
TALK = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, PROMPT),
    (TEXT, PROMPT | {"prompt": ["one two", "three", "four five six"]}),
    (TEXT, PROMPT | {"prompt": ["one two", "three"], "n": 2, "seed": 7}),
    (TEXT, PROMPT | {"prompt": [[1, 2, 3], [4, 5]], "logprobs": 1}),
    (TEXT, PROMPT | {"echo": True}),
    (TEXT, PROMPT | {"echo": True, "logprobs": 2}),
    (CHAT, TALK),
    (CHAT, TALK | {"n": 3, "seed": 1, "logprobs": True}),
    (CHAT, TALK | {"max_completion_tokens": 5}),
    (RESPONSES, {"model": MODEL, "input": "one two", "max_output_tokens": 3}),
]


def plain(found: Any) -> Any:
    """An answer without what names the request or the server."""
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items() if key not in ("id", "item_id", "kv_transfer_params")}
    return [plain(value) for value in found] if isinstance(found, list) else found


def test_a_client_gets_what_one_server_would_have_said() -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge:
            one = edge.d
            for path, asked in BODIES:
                for more in ({}, USAGE):
                    if path == RESPONSES and more:
                        more = {"stream": True}
                    alone, both = await ask(one.port, path, asked | more), await edge.ask(path, asked | more)
                    assert both.status == 200, (asked, both)
                    assert both.texts() == alone.texts(), asked
                    assert both.done == alone.done
                    assert b"kv_transfer" not in both.body.replace(b'"kv_transfer_params":null', b"")
                    if not more:
                        assert plain(both.json) == plain(alone.json)
                    elif path != RESPONSES:
                        assert both.events[-1]["usage"] == alone.events[-1]["usage"]
            fleet = edge.fleet
            assert fleet.total("wrong_texts") == fleet.total("recomputed") == fleet.total("engine_deaths") == 0
            assert fleet.total("prefilled_too_much") == 0
            assert fleet.total("pull_right") == fleet.total("prefilled") > 30
            assert await edge.settle() == {}
            assert set(fleet.blocks()) == {State.PULLED}

    run(body())
