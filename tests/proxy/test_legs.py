"""A client's body as P's and D's: the rows of vLLM's contract, one by one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from expertwire.proxy import legs, params
from expertwire.proxy.faults import Fault
from expertwire.proxy.legs import Plan, Rules, Shape, plan_of, shape_of
from proxy.world import parameters


def plan(body: Any, shape: Shape = Shape.COMPLETIONS, rules: Rules | None = None) -> Plan:
    made = plan_of(shape, body if isinstance(body, bytes) else orjson.dumps(body), rules or Rules())
    assert isinstance(made, Plan), made
    return made


def prefill(body: dict[str, Any], shape: Shape = Shape.COMPLETIONS, branch: int = 0) -> dict[str, Any]:
    return orjson.loads(legs.prefill_body(plan(body, shape), branch))


def decode(body: dict[str, Any], shape: Shape = Shape.COMPLETIONS, branch: int = 0) -> dict[str, Any]:
    return orjson.loads(legs.decode_body(plan(body, shape), branch, parameters()))


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("shape", "given", "sent", "absent"),
    [
        (Shape.COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}, {"stream": False}, ["stream_options"]),
        (Shape.COMPLETIONS, {"max_tokens": 9}, {"max_tokens": 1}, ["max_completion_tokens", "max_output_tokens"]),
        (Shape.COMPLETIONS, {}, {"max_tokens": 1, "n": 1, "ignore_eos": True}, ["return_token_ids"]),
        (Shape.CHAT, {"max_completion_tokens": 9}, {"max_tokens": 1, "max_completion_tokens": 1}, []),
        (Shape.CHAT, {}, {"max_tokens": 1, "return_token_ids": True}, ["max_completion_tokens"]),
        (Shape.COMPLETIONS, {"min_tokens": 5, "max_tokens": 9}, {"max_tokens": 1}, ["min_tokens"]),
        (Shape.COMPLETIONS, {"stop": ["a"], "stop_token_ids": [2], "ignore_eos": False}, {"ignore_eos": True}, ["stop", "stop_token_ids"]),
        (
            Shape.RESPONSES,
            {"input": "x", "max_output_tokens": 9, "store": True},
            {"max_output_tokens": 1, "store": False},
            ["max_tokens", "n"],
        ),
        (Shape.RESPONSES, {"input": "x"}, {"max_output_tokens": 1, "stream": False}, ["store"]),
        (Shape.COMPLETIONS, {"temperature": 0.5, "logit_bias": {"5": 1}}, {"temperature": 0.5, "logit_bias": {"5": 1}}, []),
    ],
)
def test_what_p_is_sent(shape: Shape, given: dict[str, Any], sent: dict[str, Any], absent: list[str]) -> None:
    base = CHAT if shape is Shape.CHAT else {"model": "m"} if shape is Shape.RESPONSES else {"model": "m", "prompt": "x"}
    body = prefill(base | given, shape)
    assert {name: body[name] for name in sent} == sent
    assert not set(absent) & set(body)
    assert body[params.NAME] == params.ask()


def test_d_gets_the_clients_bytes_and_the_parameters() -> None:
    raw = b'{ "model":"m", "prompt" : "x", "seed": 12345678901234567890123, "top_p":1.0,"min_tokens":2 } \n'
    made = plan(raw)
    assert legs.decode_body(made, 0, None) == raw
    sent = legs.decode_body(made, 0, {"remote_port": 1})
    assert sent == raw.rstrip()[:-1] + b',"kv_transfer_params":{"remote_port":1}}'
    assert orjson.loads(sent)["min_tokens"] == 2


def test_an_empty_object_is_spliced_right() -> None:
    assert orjson.loads(legs.decode_body(plan(b" {} "), 0, {"a": 1})) == {"kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}},
        {"kv_transfer_params": None},
        {"vllm_xargs": {"kv_transfer_params": {"remote_host": "evil"}, "mine": 1}},
        {"extra_args": {"kv_transfer_params": {"remote_host": "evil"}}},
    ],
)
def test_a_clients_parameters_go_nowhere(extra: dict[str, Any]) -> None:
    for raw in (orjson.dumps({"prompt": "x"} | extra), orjson.dumps({"prompt": "x"} | extra).replace(b"kv_t", b"kv\\u005ft")):
        made = plan(raw)
        assert b"evil" not in legs.prefill_body(made, 0)
        assert b"evil" not in legs.decode_body(made, 0, parameters())
        assert orjson.loads(legs.decode_body(made, 0, parameters()))[params.NAME] == parameters()
        assert b"evil" not in legs.decode_body(made, 0, None)


@pytest.mark.parametrize(
    ("body", "shape", "why"),
    [
        ({"prompt": "x", "echo": True, "logprobs": 0}, Shape.COMPLETIONS, "echo_logprobs"),
        ({"prompt": "x", "echo": True}, Shape.COMPLETIONS, ""),
        ({"prompt": "x", "logprobs": 3}, Shape.COMPLETIONS, ""),
        ({"prompt": "x", "prompt_logprobs": 0}, Shape.COMPLETIONS, "prompt_logprobs"),
        (CHAT | {"prompt_logprobs": 1}, Shape.CHAT, "prompt_logprobs"),
        (CHAT | {"echo": True, "logprobs": True}, Shape.CHAT, "echo_logprobs"),
        ({"prompt": "x", "use_beam_search": True, "n": 4}, Shape.COMPLETIONS, "beam_search"),
        ({"prompt": "x", "best_of": 3}, Shape.COMPLETIONS, "best_of"),
        ({"prompt": "x", "truncate_prompt_tokens": -1}, Shape.COMPLETIONS, "truncation"),
        ({"prompt": "x", "truncate_prompt_tokens": 100}, Shape.COMPLETIONS, ""),
        ({"prompt_embeds": "…"}, Shape.COMPLETIONS, "prompt_embeds"),
        ({"input": "x", "previous_response_id": "resp_1"}, Shape.RESPONSES, "previous_response"),
        ({"input": "x", "background": True}, Shape.RESPONSES, "background"),
        ({"input": "x", "tools": [{"type": "web_search_preview"}]}, Shape.RESPONSES, "server_tools"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, Shape.RESPONSES, ""),
    ],
)
def test_what_d_computes_alone(body: dict[str, Any], shape: Shape, why: str) -> None:
    made = plan(body, shape)
    assert made.alone == why
    assert made.branches == 1
    if why:
        assert orjson.loads(legs.decode_body(made, 0, None)) == body


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 40}, 10),
        ({"prompt": [5] * 10}, 10),
        ({"prompt": ["x" * 8, "x" * 40]}, 10),
        ({"prompt": [[1], [5] * 10]}, 10),
    ],
)
def test_short_prompts_go_to_d_alone_below_the_threshold(body: dict[str, Any], tokens: int) -> None:
    assert plan(body).alone == ""  # 0 by default
    assert plan(body, rules=Rules(alone_below_tokens=tokens)).alone == ""
    short = plan(body, rules=Rules(alone_below_tokens=tokens + 1))
    assert (short.alone, short.branches) == ("short", 1)


@pytest.mark.parametrize(
    ("prompt", "n", "branches"),
    [
        ("x", 1, 1),
        ("x", 3, 3),
        (["x"], 1, 1),
        (["x", "y"], 1, 2),
        (["x", "y"], 2, 4),
        ([1, 2, 3], 1, 1),
        ([[1], [2]], 1, 2),
        ([[1]], 1, 1),
        (["x", [1]], 1, 1),  # P says what is wrong with it
        ([], 1, 1),
        (None, 1, 1),
        ("x", True, 1),
        ("x", "3", 3),  # as vLLM reads it
        ("x", 3.0, 3),
        (["x", "y"], "2.0", 4),
    ],
)
def test_into_how_many_branches(prompt: Any, n: Any, branches: int) -> None:
    body = {"prompt": prompt, "n": n}
    assert plan(body).branches == branches
    alone = plan(body, rules=Rules(split_batches=False))
    assert (alone.branches, alone.alone) == (1, "batch" if branches > 1 else "")
    assert orjson.loads(legs.decode_body(alone, 0, None)) == body


def test_each_branch_is_one_choice_of_one_prompt() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "n": 3, "seed": 40, "max_tokens": 5}
    for branch in range(6):
        sent, asked = decode(body, branch=branch), prefill(body, branch=branch)
        assert sent["prompt"] == asked["prompt"] == ["a", "b"][branch // 3]
        assert sent["seed"] == asked["seed"] == 40 + branch % 3
        assert sent["n"] == asked["n"] == 1
        assert sent["max_tokens"] == 5
    chat = CHAT | {"n": 2}
    assert "seed" not in decode(chat, Shape.CHAT, 1)
    assert decode(chat, Shape.CHAT, 1)["messages"] == CHAT["messages"]


@pytest.mark.parametrize("n", [0, -1, "0", "two", 1.5, [2], "nan", "9" * 5000])
def test_a_number_of_choices_that_is_none_never_reaches_p(n: Any) -> None:
    fault = plan_of(Shape.COMPLETIONS, orjson.dumps({"prompt": "x", "n": n}), Rules())
    assert isinstance(fault, Fault)
    assert (fault.status, fault.param) == (400, "n")
    assert len(fault.message) < 200


def test_seeds_of_choices_stay_what_vllm_takes() -> None:
    last = 2**63 - 1
    assert [decode({"prompt": "x", "n": 2, "seed": last}, branch=k)["seed"] for k in (0, 1)] == [last, -(2**63)]
    assert [decode({"prompt": "x", "n": 2, "seed": "7"}, branch=k)["seed"] for k in (0, 1)] == [7, 8]
    assert decode({"prompt": "x", "n": 2, "seed": 2**64 - 1}, branch=1)["seed"] == 2**64 - 1  # D says what is wrong with it


@pytest.mark.parametrize(
    ("value", "stream"), [(1, True), ("true", True), ("Yes", True), (1.0, True), (0, False), ("false", False), (None, False), ([1], False)]
)
def test_a_stream_is_asked_for_in_the_words_that_vllm_knows(value: Any, stream: bool) -> None:
    made = plan({"prompt": "x", "stream": value, "stream_options": {"include_usage": value}})
    assert (made.stream, made.include_usage) == (stream, stream)


@pytest.mark.parametrize("shape", [Shape.COMPLETIONS, Shape.CHAT])
def test_what_is_read_and_cannot_be_written_is_refused(shape: Shape) -> None:
    deep = b'{"prompt":"x","messages":[],"logit_bias":' + b"[" * 300 + b"]" * 300 + b"}"
    fault = plan_of(shape, deep, Rules())
    assert isinstance(fault, Fault)
    assert (fault.status, "254 levels" in fault.message) == (400, True)
    wide = {"prompt": "x", "messages": [{"role": "user", "content": "a"}] * 400}
    assert json.loads(legs.prefill_body(plan(wide, shape), 0))["messages"] == wide["messages"]


EVIL = '{"a":[{"kv_transfer_params":{"remote_host":"evil"}}],"b":%s}'


@pytest.mark.parametrize("odd", ["1", "NaN", '"\\ud800"', "[" * 300 + "]" * 300, "1e999", '"é"'])
@pytest.mark.parametrize("written", ["kv_transfer_params", "kv\\u005Ftransfer_params", "\\u006bv_transfer_param\\u0073"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_no_reader_of_a_passed_on_body_finds_parameters(odd: str, written: str, encoding: str) -> None:
    sent = legs.plain_body((EVIL % odd).replace("kv_transfer_params", written).encode(encoding))
    read = json.loads(sent)  # as vLLM's server does
    assert "kv_transfer_params" not in read["a"][0]
    assert json.dumps(read["b"]) == json.dumps(json.loads(odd))


@pytest.mark.parametrize("raw", [b"", b"\x00\x01\x02\xff", b"RIFF\x00\\u", b"\xff\xfea", '{"a":NaN,"b":"\\u0041"}'.encode("utf-16")])
def test_a_body_without_them_is_passed_on_as_it_is(raw: bytes) -> None:
    assert legs.plain_body(raw) == raw


def test_too_many_branches_are_refused_with_both_numbers() -> None:
    fault = plan_of(Shape.COMPLETIONS, orjson.dumps({"prompt": ["a"] * 20, "n": 10}), Rules(max_branches=128))
    assert isinstance(fault, Fault)
    assert fault.status == 400
    assert "200" in fault.message
    assert "128" in fault.message


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a":1}x', b"null"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    fault = plan_of(Shape.CHAT, raw, Rules())
    assert isinstance(fault, Fault)
    assert (fault.status, fault.type) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("content", "reused"),
    [
        ("text", True),
        (None, True),
        ([{"type": "text", "text": "x"}], True),
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "http://x"}}], False),
        ([{"type": "input_audio"}], False),
    ],
)
def test_ps_token_ids_serve_d_for_text_alone(content: Any, reused: bool) -> None:
    assert plan({"messages": [{"role": "user", "content": content}]}, Shape.CHAT).reuse_tokens is reused
    assert not plan({"messages": []}, Shape.CHAT, Rules(reuse_tokens=False)).reuse_tokens
    assert not plan({"messages": "odd"}, Shape.CHAT).reuse_tokens


@pytest.mark.parametrize(
    ("method", "path", "shape"),
    [
        (b"POST", b"/v1/completions", Shape.COMPLETIONS),
        (b"POST", b"/v1/chat/completions", Shape.CHAT),
        (b"POST", b"/v1/responses", Shape.RESPONSES),
        (b"GET", b"/v1/completions", Shape.PLAIN),
        (b"GET", b"/v1/responses/resp_1", Shape.RESPONSE_BY_ID),
        (b"POST", b"/v1/responses/resp_1/cancel", Shape.RESPONSE_BY_ID),
        (b"GET", b"/v1/models", Shape.PLAIN),
        (b"POST", b"/tokenize", Shape.PLAIN),
        (b"POST", b"/v1/embeddings", Shape.PLAIN),
        (b"POST", b"/v1/completions/", Shape.PLAIN),
    ],
)
def test_shapes(method: bytes, path: bytes, shape: Shape) -> None:
    assert shape_of(method, path) is shape


def test_the_id_in_a_path() -> None:
    assert legs.response_id_of(b"/v1/responses/resp_1") == b"resp_1"
    assert legs.response_id_of(b"/v1/responses/resp_1/cancel") == b"resp_1"


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (b'{"input":"x","kv_transfer_params":{"remote_host":"evil"}}', {"input": "x"}),
        (b'{"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"evil"}}}}', {"sampling_params": {"extra_args": {}}}),
        (b'[{"a":[{"kv\\u005ftransfer_params":{"h":"evil"}}]}]', [{"a": [{}]}]),
    ],
)
def test_what_is_passed_on_is_stripped_at_every_depth(raw: bytes, clean: Any) -> None:
    assert orjson.loads(legs.plain_body(raw)) == clean


def test_what_is_passed_on_without_them_is_untouched() -> None:
    for raw in (b'{ "input" : "x" }', b"\x00binary", b'{"input":"\\u00e9"}', b""):
        assert legs.plain_body(raw) == raw
    assert b"kv_transfer_params" not in legs.plain_body(b'{"x": NaN, "kv_transfer_params": {}}')


@pytest.mark.parametrize(
    "field", ["do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
)
@pytest.mark.parametrize("value", [None, "absent", False, {}, "", -1])
def test_every_needed_field_is_required(field: str, value: Any) -> None:
    values = parameters()
    if value == "absent":
        del values[field]
    else:
        values[field] = value
    assert params.missing({params.NAME: values}) == f"{params.NAME}.{field}"


@pytest.mark.parametrize(
    ("value", "fits"), [([], False), ([[]], False), ([[], []], False), ([[], [0]], True), ([0], True), ([[0], []], True)]
)
def test_p_has_a_block_of_some_group(value: list[Any], fits: bool) -> None:
    found = params.missing({params.NAME: parameters(remote_block_ids=value)})
    assert found == ("" if fits else f"{params.NAME}.remote_block_ids")


@pytest.mark.parametrize("reply", [{}, {params.NAME: None}, {params.NAME: []}, {params.NAME: "x"}])
def test_parameters_that_are_none_are_named(reply: dict[str, Any]) -> None:
    assert params.missing(reply) == params.NAME


def test_what_p_says_is_forwarded_as_it_is() -> None:
    values = parameters(remote_block_ids=[[], [0]], new_thing=[{"a": None}])
    assert params.missing({params.NAME: values}) == ""
    assert params.Parameters({params.NAME: dict(values)}, None).take() == values


def test_parameters_serve_once() -> None:
    held = params.Parameters({params.NAME: parameters()}, [1, 2])
    assert held.take()["prompt_token_ids"] == [1, 2]
    with pytest.raises(RuntimeError, match="have been used; prefill again"):
        held.take()
    with pytest.raises(RuntimeError, match="have been used"):
        held.release_body()


def test_a_release_is_a_request_that_d_refuses() -> None:
    body = orjson.loads(params.Parameters({params.NAME: parameters()}, [1, 2]).release_body())
    assert body[params.NAME] == parameters()
    assert body["model"] == params.RELEASE_MODEL


@pytest.mark.parametrize(
    ("reply", "clean"),
    [
        (b'{"id":"a","kv_transfer_params":null,"usage":{}}', b'{"id":"a","usage":{}}'),
        (b'{"id":"a","kv_transfer_params":{"remote_host":"h"},"usage":{}}', b'{"id":"a","usage":{}}'),
        (b'{"id":"a","text":"\\"kv_transfer_params\\":null"}', b'{"id":"a","text":"\\"kv_transfer_params\\":null"}'),
        (b'{ "id" : "a" }', b'{ "id" : "a" }'),
    ],
)
def test_replies_are_stripped(reply: bytes, clean: bytes) -> None:
    assert params.strip_reply(reply) == clean


def test_an_error_that_quotes_our_parameters_is_redacted() -> None:
    quoted = b"bad input: {'kv_transfer_params': {'remote_host': '10.9.9.9', 'remote_engine_id': 'engine-1'}}"
    assert b"10.9.9.9" not in params.redact(quoted, parameters())
    assert b"engine-1" not in params.redact(quoted, parameters())
    assert params.redact(quoted, None) == quoted
    assert params.redact(b"10.9.9.9 is not there", parameters()) == b"10.9.9.9 is not there"
