"""Each row of docs/proxy.md over sockets: a worker of the proxy between a client and fake servers that keep to vLLM's contract."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from expertwire.testing.http import faults
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.blocks import State
from expertwire.testing.http.client import Client, Reply, ask, request
from expertwire.testing.http.fake_vllm import Fleet, Options
from expertwire.testing.http.faults import DROP, Cut, Fault, Rule
from proxy.edge import CHAT, PROMPT, STREAM, Edge, run

PATHS = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "a b c", "max_output_tokens": 3},
}


async def alone(edge: Edge, path: str, body: dict[str, Any]) -> Reply:
    """What one server says that computes everything."""
    return await ask(edge.d.port, path, body)


def right(edge: Edge, pulls: int) -> None:
    """Every pull was of the right blocks, once, and nothing is held any more."""
    fleet = edge.fleet
    assert fleet.total("pull_right") == pulls
    assert fleet.total("pull_wrong") == fleet.total("wrong_texts") == fleet.total("engine_deaths") == 0
    assert fleet.total("prefilled_too_much") == 0
    assert fleet.blocks()[State.HELD] == 0


def test_the_text_is_one_servers_by_every_endpoint_streamed_and_whole() -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge:
            for path, asked in PATHS.items():
                for stream in (False, True):
                    whole = asked | {"stream": stream}
                    found = await ask(edge.port, path, whole)
                    assert (found.status, found.whole) == (200, True), found
                    assert found.texts() == (await alone(edge, path, whole)).texts()
                    assert found.done or path == "/v1/responses" or not stream
                    assert b"kv_transfer" not in found.body
            assert edge.fleet.total("pull_right") == 6
            assert await edge.fleet.settle(sockets=False) == {}
            right(edge, 6)

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_batches_and_choices_have_the_texts_of_one_server(stream: bool) -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2, Options(cached_tokens=2))) as edge:
            asked = {"model": MODEL, "prompt": ["one two", "three", "four five six"], "n": 2, "max_tokens": 4, "seed": 7, "stream": stream}
            if stream:
                asked["stream_options"] = {"include_usage": True}
            found = await ask(edge.port, "/v1/completions", asked, {"X-Request-Id": "rid-1"})
            truth = await alone(edge, "/v1/completions", asked)
            assert found.texts() == truth.texts()
            assert len(found.texts()) == 6
            usage, known = ((r.events[-1] if stream else r.json)["usage"] for r in (found, truth))
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert usage[name] == known[name], name
            assert usage["prompt_tokens_details"] == {"cached_tokens": 6}
            ids = {event["id"] for event in (found.events if stream else [found.json])}
            assert len(ids) == 1
            assert all("rid-1" in ident and not ident.endswith("-0") for ident in ids)
            chat = await ask(edge.port, "/v1/chat/completions", CHAT | {"n": 3, "stream": stream})
            assert chat.texts() == (await alone(edge, "/v1/chat/completions", CHAT | {"n": 3, "stream": stream})).texts()
            right(edge, 9)

    run(body())


def test_what_each_leg_is_sent() -> None:
    async def body() -> None:
        async with Edge() as edge:
            headers = {"Authorization": "Bearer secret-1", "X-Request-Id": "rid-9", "traceparent": "00-a-b-01", "X-data-parallel-rank": "3"}
            asked = CHAT | {
                "stream": True,
                "max_completion_tokens": 3,
                "min_tokens": 2,
                "stream_options": {"include_usage": True},
                "stop": ["zz"],
            }
            found = await ask(edge.port, "/v1/chat/completions", asked, headers)
            assert found.done
            assert found.header("x-request-id") == "rid-9"
            (p,), (d,) = edge.p.seen, edge.d.seen
            for seen in (p, d):
                for name, value in headers.items():
                    assert seen.head.all(name.lower()) == [value]
            assert p.json["stream"] is False
            assert p.json["max_tokens"] == p.json["max_completion_tokens"] == p.json["n"] == 1
            assert not {"stream_options", "min_tokens", "stop"} & set(p.json)
            assert {name: d.json[name] for name in asked} == asked
            assert d.json["kv_transfer_params"]["of_a_later_version"] == {"opaque": ["é", 1, None]}
            assert d.json["kv_transfer_params"]["prompt_token_ids"], "P's tokens, so that both legs have the same"
            assert not any(b"secret-1" in line for line in edge.lines)

    run(body())


@pytest.mark.parametrize("code", [400, 404, 422, 429, 500, 501])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_verbatim(side: str, code: int, stream: bool) -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge:
            servers = edge.fleet.prefill if side == "prefill" else edge.fleet.decode
            json = faults.status(code, retry_after="21")
            for fault in (json, faults.html(code), faults.text(code), faults.empty(code)):
                for server in servers:
                    server.script.rules = [Rule(fault, path="/v1/completions")]
                found = await ask(edge.port, "/v1/completions", PROMPT | {"stream": stream})
                assert (found.status, found.body, found.whole) == (code, fault.body, True)
                assert found.header("content-type") == fault.content_type
                assert found.header("retry-after") == ("21" if fault is json else "")
            total = edge.fleet.total("requests", side)
            assert total == 4, "what was answered is not asked again"
            assert edge.fleet.total("requests", "decode") == (4 if side == "decode" else 0)

    run(body())


@pytest.mark.parametrize("code", [502, 503, 504])
def test_an_overloaded_p_is_tried_elsewhere(code: int) -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 1)) as edge:
            for server in edge.fleet.prefill:
                server.script.add(Rule(faults.status(code)))
            found = [await ask(edge.port, "/v1/completions", PROMPT) for _ in range(2)]
            assert sorted(reply.status for reply in found) == [200, code] or [reply.status for reply in found] == [code, 200]
            assert edge.fleet.total("requests", "prefill") == 3

    run(body())


def test_p_without_a_needed_field_is_502_and_d_not_called() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for params, name in (
                ({"remote_request_id": DROP}, "kv_transfer_params.remote_request_id"),
                ({"remote_host": None}, "kv_transfer_params.remote_host"),
                ({"do_remote_prefill": False}, "kv_transfer_params.do_remote_prefill"),
                (None, "kv_transfer_params"),
            ):
                edge.p.script.rules = [Rule(Fault(params=params))]
                found = await ask(edge.port, "/v1/completions", STREAM)
                assert (found.status, found.json["error"]["param"]) == (502, name)
                assert "127.0.0.1" not in found.body.decode()
            assert edge.d.counts["requests"] == 0
            edge.p.world._blocks.clear()

    run(body())


def test_a_first_token_that_is_the_end_of_the_text_is_none_for_p() -> None:
    """Newer vLLM looks for the end before it looks at the length: P would hold nothing, and hand out no parameters."""

    async def body() -> None:
        async with Edge() as edge:
            await ask(edge.port, "/v1/completions", PROMPT | {"stop_token_ids": [1], "stop": "x", "ignore_eos": False})
            assert edge.p.seen[0].json["ignore_eos"] is True
            assert not {"stop", "stop_token_ids"} & set(edge.p.seen[0].json)
            assert {"stop", "stop_token_ids"} < set(edge.d.seen[0].json)

    run(body())


def test_a_p_that_hands_out_no_blocks_is_502_and_d_lives() -> None:
    """Sent on, they end D's engine: its scheduler asserts that there is something to fetch for a prompt that it does not have."""

    async def body() -> None:
        async with Edge() as edge:
            for none in ([], [[]]):
                edge.p.script.add(Rule(Fault(params={"remote_block_ids": none})))
                found = await ask(edge.port, "/v1/completions", PROMPT)
                assert (found.status, found.json["error"]["param"]) == (502, "kv_transfer_params.remote_block_ids")
            assert edge.d.counts["requests"] == edge.fleet.total("engine_deaths") == 0
            assert (await ask(edge.port, "/v1/completions", PROMPT)).status == 200

    run(body())


def test_parameters_of_a_client_go_nowhere() -> None:
    async def body() -> None:
        async with Edge() as edge:
            evil = {
                "do_remote_prefill": True,
                "remote_host": "169.254.1.1",
                "remote_port": 1,
                "remote_engine_id": "x",
                "remote_block_ids": [[1]],
            }
            for more in ({"kv_transfer_params": evil}, {"vllm_xargs": {"kv_transfer_params": evil}}):
                for path, asked in (*PATHS.items(), ("/v1/completions", PROMPT | {"echo": True, "logprobs": 1})):
                    found = await ask(edge.port, path, asked | more)
                    assert found.status == 200
            found = await ask(edge.port, "/echo", {"a": 1, "kv_transfer_params": evil})
            assert found.json == {"a": 1}
            for server in edge.fleet.servers:
                assert not any(b"169.254" in seen.body for seen in server.seen)
            right(edge, 6)

    run(body())


def test_what_d_must_compute_alone_never_sees_p() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for more in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
                found = await ask(edge.port, "/v1/completions", PROMPT | more)
                assert found.texts() == (await alone(edge, "/v1/completions", PROMPT | more)).texts()
            assert edge.p.counts["requests"] == 0
            assert edge.d.counts["computed_alone"] == 4
        async with Edge(decode_alone_below_tokens=50) as edge:
            assert (await ask(edge.port, "/v1/completions", PROMPT)).status == 200
            assert (await ask(edge.port, "/v1/completions", PROMPT | {"prompt": "long " * 60})).status == 200
            assert edge.p.counts["requests"] == 1

    run(body())


def test_a_lease_that_runs_out_while_d_has_no_connection_to_give() -> None:
    async def body() -> None:
        table = {"kv": {"lease_s": 1.0, "margin_s": 0.6}, "limits": {"pool_per_server": 1}}
        async with Edge(Fleet(1, 1, Options(token_s=0.2)), **table) as edge:
            first = asyncio.ensure_future(ask(edge.port, "/v1/completions", PROMPT))  # 4 tokens of 0.2 s each
            async with asyncio.timeout(10):
                while not edge.d.counts["in_flight"]:
                    await asyncio.sleep(0.001)
            second = await ask(edge.port, "/v1/completions", PROMPT | {"max_tokens": 1})
            assert ((await first).status, second.status) == (200, 200)
            assert second.texts() == (await alone(edge, "/v1/completions", PROMPT | {"max_tokens": 1})).texts()
            metrics = edge.worker.core.metrics
            assert metrics.value("expiries_total") == metrics.value("reprefills_total") >= 1
            assert await edge.fleet.settle(sockets=False) == {}, "what was not used was freed"
            assert edge.fleet.total("wrong_texts") == 0

    run(body())


def test_p_dies_before_the_pull() -> None:
    async def body() -> None:
        for stream in (False, True):
            async with Edge() as edge:
                edge.p.script.add(Rule(Fault(dies=True)))
                found = await ask(edge.port, "/v1/chat/completions", CHAT | {"stream": stream})
                assert (found.status, found.whole) == (500, True), "never 200 with an error behind a role"
                assert found.header("content-type") == "application/json"
                assert found.json["error"]["message"]

    run(body())


def test_p_unreachable_at_its_side_channel() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(side_channel_s=0.05))) as edge:
            edge.fleet.world.unreachable.add(edge.p.engine)
            for stream in (False, True):
                assert (await ask(edge.port, "/v1/completions", PROMPT | {"stream": stream})).status == 500
            edge.fleet.world._blocks.clear()

    run(body())


@pytest.mark.parametrize("cut", [Cut.BEFORE_HEAD, Cut.IN_HEAD, Cut.AFTER_EVENTS, Cut.IN_EVENT])
@pytest.mark.parametrize("reset", [False, True])
def test_d_breaks_off(cut: Cut, reset: bool) -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 2)) as edge:
            for server in edge.fleet.decode:
                server.script.add(Rule(Fault(cut=cut, events=2, reset=reset), path="/v1/completions", times=None))
            found = await ask(edge.port, "/v1/completions", STREAM | {"max_tokens": 6})
            if cut in (Cut.BEFORE_HEAD, Cut.IN_HEAD):
                assert (found.status, found.whole) == (502, True)
            else:
                assert (found.status, found.whole, found.done) == (200, False, False), "no client takes it for an end"
                assert found.events[-1]["error"]["code"] == 502
                assert len(found.events) == 3
            whole = await ask(edge.port, "/v1/completions", PROMPT)
            assert (whole.status, whole.whole) == (502, True)
            assert edge.fleet.total("requests", "decode") == 2
            edge.fleet.world._blocks.clear()

    run(body())


def test_an_error_event_of_d_is_the_last() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(token_s=0.01))) as edge:
            edge.d.script.add(Rule(Fault(error_after=3)))
            found = await ask(edge.port, "/v1/completions", STREAM | {"max_tokens": 6})
            assert (found.status, found.whole) == (200, False)
            assert "error" in found.events[-1]
            assert "[DONE]" not in found.data

    run(body())


def test_the_status_waits_for_content() -> None:
    async def body() -> None:
        async with Edge() as edge:
            edge.d.script.add(Rule(Fault(error_after=1)))
            found = await ask(edge.port, "/v1/chat/completions", CHAT | {"stream": True})
            assert (found.status, found.whole) == (500, True)

    run(body())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_servers_that_are_not_reached(side: str) -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge:
            servers = edge.fleet.prefill if side == "prefill" else edge.fleet.decode
            await servers[0].refuse()  # before there is a connection to it
            found = [await ask(edge.port, "/v1/completions", PROMPT) for _ in range(4)]
            assert [reply.status for reply in found] == [200] * 4
            right(edge, 4)
            await servers[1].refuse()
            for connection in list(servers[1].connections):
                connection.drop(reset=True)
            found = [await ask(edge.port, "/v1/completions", PROMPT)]
            assert (found[0].status, found[0].json["error"]["type"]) == (502, "upstream_unreachable")
            edge.fleet.world._blocks.clear()

    run(body())


def test_a_d_that_is_not_reached_costs_p_nothing() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 2)) as edge:
            await edge.fleet.decode[0].refuse()
            await edge.fleet.decode[1].start() if edge.fleet.decode[1]._server is None else None
            for _ in range(4):
                assert (await ask(edge.port, "/v1/completions", PROMPT)).status == 200
            metrics = edge.worker.core.metrics
            assert metrics.value("reprefills_total") == metrics.value("releases_total", "released") >= 1
            assert await edge.fleet.settle(sockets=False) == {}
            right(edge, 4)

    run(body())


@pytest.mark.parametrize("when", ["prefilling", "decoding", "streaming"])
def test_a_client_that_leaves_ends_the_work(when: str) -> None:
    async def body() -> None:
        options = Options(token_s=0.2 if when != "streaming" else 0.01)
        async with Edge(Fleet(1, 1, options)) as edge:
            if when == "prefilling":
                edge.p.script.add(Rule(Fault(hang=True)))
            client = await Client.open(edge.port)
            await client.send(request("POST", "/v1/completions", STREAM | {"max_tokens": 1000}))
            if when == "streaming":
                await client.reply(until_events=3)
            else:
                server = edge.p if when == "prefilling" else edge.d
                async with asyncio.timeout(10):
                    while not server.counts["in_flight"]:
                        await asyncio.sleep(0.001)
            client.leave()
            assert await edge.fleet.settle(1.5, sockets=False) == {}
            assert edge.d.counts["requests"] == (0 if when == "prefilling" else 1)

    run(body())


def test_other_endpoints_are_ds_and_ids_lead_home() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 3)) as edge:
            models = await ask(edge.port, "/v1/models")
            assert models.json["data"][0]["served_by"].startswith("decode")
            assert (await ask(edge.port, "/tokenize", {"model": MODEL, "prompt": "a b"})).json["count"] == 2
            assert (await ask(edge.port, "/v1/embeddings", {"input": "a"})).json["data"]
            assert (await ask(edge.port, "/version")).json["version"]
            assert (await ask(edge.port, "/nothing")).status == 404
            for _ in range(3):
                made = await ask(edge.port, "/v1/responses", PATHS["/v1/responses"])
                again = await ask(edge.port, f"/v1/responses/{made.json['id']}")
                assert again.json["id"] == made.json["id"]
            edge.worker.core.homes.__init__()  # as another worker, that knows of none
            assert (await ask(edge.port, f"/v1/responses/{made.json['id']}")).json["id"] == made.json["id"]
            assert (await ask(edge.port, "/v1/responses/resp_none")).status == 404

    run(body())


def test_connections_are_kept() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for number in range(12):
                path = list(PATHS)[number % 3]
                assert (await ask(edge.port, path, PATHS[path] | {"stream": number % 2 == 1})).status == 200
                assert (await ask(edge.port, "/v1/models")).status == 200
            assert len(edge.p.connections) == len(edge.d.connections) == 1
            assert edge.worker.core.metrics.value("legs_total", "decode", "decode-0", "answered") == 24

    run(body())
