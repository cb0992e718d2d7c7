"""The fake servers keep to the contract, and break answers as they are told: what tests of the proxy rest on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from expertwire.testing.http import answers, faults
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.blocks import State
from expertwire.testing.http.client import Client, Reply, ask, request
from expertwire.testing.http.fake_vllm import FakeServer, Fleet, Options
from expertwire.testing.http.faults import DROP, After, Cut, Fault, Framing, Rule
from expertwire.testing.http.wire import Decoder, End, Head, WireError, chunk

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = {"model": MODEL, "prompt": "one two three"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def prefill(server: FakeServer, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    reply = await ask(server.port, path, body | {"max_tokens": 1, "kv_transfer_params": ASK})
    assert reply.status == 200, reply
    return dict(reply.json["kv_transfer_params"])


async def decode(server: FakeServer, body: dict[str, Any], params: dict[str, Any] | None, path: str = "/v1/completions") -> Reply:
    return await ask(server.port, path, body | ({"kv_transfer_params": params} if params else {}))


def test_two_legs_give_the_text_of_one_server_and_once_only() -> None:
    async def body() -> None:
        async with Fleet() as fleet:
            p, d = fleet.prefill[0], fleet.decode[0]
            for path, asked in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "a b"})):
                for stream in (False, True):
                    params = await prefill(p, asked, path)
                    alone = await decode(d, asked | {"stream": stream}, None, path)
                    both = await decode(d, asked | {"stream": stream}, params, path)
                    assert both.texts() == alone.texts()
                    assert both.done == (stream and path != "/v1/responses")
                    again = await decode(d, asked, params, path)
                    assert again.status == 200
                    assert again.texts()[0].startswith("WRONG")
            assert fleet.blocks() == {State.PULLED: 6}
            assert fleet.world.reasons == {"already pulled": 6}
            assert d.counts["pull_right"] == d.counts["pull_wrong"] == 6
            assert p.counts["prefilled"] == 6
            assert fleet.total("engine_deaths") == 0
            assert await fleet.settle(sockets=True) == {}

    run(body())


def test_what_goes_wrong_in_the_contract_goes_wrong_here() -> None:
    async def body() -> None:
        now = [0.0]
        async with Fleet(decode=3, options=Options(side_channel_s=0.01, clock=lambda: now[0])) as fleet:
            p, d = fleet.prefill[0], fleet.decode[0]
            many = await decode(d, PROMPT | {"prompt": ["one two three", "four"], "n": 2}, await prefill(p, PROMPT))
            assert [text.startswith("WRONG") for text in many.texts().values()] == [False, True, True, True]

            late = await prefill(p, PROMPT)
            now[0] += 31
            assert (await decode(d, PROMPT, late)).texts()[0].startswith("WRONG")
            other = await decode(d, PROMPT | {"prompt": "another"}, await prefill(p, PROMPT))
            assert other.texts()[0].startswith("WRONG")
            assert fleet.blocks() == {State.EXPIRED: 1, State.PULLED: 2}

            wasted = await decode(d, PROMPT | {"echo": True, "logprobs": 1}, await prefill(p, PROMPT))
            assert wasted.json["choices"][0]["logprobs"]["text_offset"][:2] == [0, len(PROMPT["prompt"])]
            assert d.counts["recomputed"] == 1

            kept = await prefill(p, PROMPT)
            refused = await decode(d, PROMPT | {"model": "there is none"}, kept)
            assert (refused.status, fleet.blocks()[State.RELEASED]) == (404, 1)

            fleet.world.unreachable.add(p.engine)
            for stream in (False, True):
                silent = await decode(d, CHAT | {"stream": stream}, await prefill(p, CHAT, "/v1/chat/completions"), "/v1/chat/completions")
                check_engine_trouble(silent, stream)
            fleet.world.unreachable.clear()

            nameless = {k: v for k, v in (await prefill(p, PROMPT)).items() if k != "remote_request_id"}
            assert (await decode(fleet.decode[1], PROMPT, nameless)).status == 500
            longer = PROMPT | {"prompt": "word " * 33}
            assert (await decode(fleet.decode[2], longer, await prefill(p, PROMPT))).status == 500
            assert fleet.total("engine_deaths") == 2
            assert (await ask(fleet.decode[2].port, "/health")).status == 503

            p.script.add(Rule(Fault(dies=True)))
            before = await prefill(p, CHAT, "/v1/chat/completions")
            check_engine_trouble(await decode(d, CHAT | {"stream": True}, before, "/v1/chat/completions"), stream=True)
            with pytest.raises(ConnectionRefusedError):
                await Client.open(p.port)

    run(body())


def check_engine_trouble(reply: Reply, stream: bool) -> None:
    if not stream:
        assert (reply.status, reply.json["error"]["code"]) == (500, 500)
        return
    assert reply.status == 200
    assert reply.done
    assert [next(iter(event)) for event in reply.events] == ["id", "error"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"stream_options": {"include_usage": True}}, 400),
        ({"min_tokens": 5, "max_tokens": 1}, 400),
        ({"max_tokens": 0}, 400),
        ({"n": 0}, 400),
        ({"prompt": []}, 400),
        ({"prompt": "w " * 2048}, 400),
        ({"model": "another"}, 404),
    ],
)
def test_what_vllm_refuses(change: dict[str, Any], status: int) -> None:
    with pytest.raises(answers.Refusal) as refusal:
        answers.understand(answers.Api.COMPLETIONS, PROMPT | change, "id")
    assert refusal.value.status == refusal.value.body()["error"]["code"] == status


def test_endpoints_that_generate_nothing() -> None:
    async def body() -> None:
        async with Fleet() as fleet:
            port = fleet.decode[0].port
            assert (await ask(port, "/v1/models")).json["data"][0]["served_by"] == "decode-0"
            assert (await ask(port, "/version")).json == {"version": "0.32.0"}
            assert (await ask(port, "/tokenize", {"prompt": "a b"})).json["count"] == 2
            assert len((await ask(port, "/v1/embeddings", {"input": "a b"})).json["data"][0]["embedding"]) == 2
            assert (await ask(port, "/v1/completions")).status == 405
            assert (await ask(port, "/nowhere")).status == 404
            whole = await ask(port, "/health", method="HEAD")
            assert (whole.status, whole.body) == (200, b"")
            made = (await ask(port, "/v1/responses", {"input": "a"})).json
            assert (await ask(port, f"/v1/responses/{made['id']}")).json == made
            assert (await ask(fleet.prefill[0].port, f"/v1/responses/{made['id']}")).status == 404
            assert (await ask(port, "/v1/completions", b"{")).status == 400

    run(body())


CUTS = [
    (Fault(cut=Cut.BEFORE_HEAD), 0, 0),
    (Fault(cut=Cut.BEFORE_HEAD, reset=True), 0, 0),
    (Fault(cut=Cut.IN_HEAD), 0, 0),
    (Fault(cut=Cut.AFTER_EVENTS, events=2), 200, 2),
    (Fault(cut=Cut.AFTER_EVENTS, events=2, reset=True), 200, 2),
    (Fault(cut=Cut.AFTER_EVENTS, events=99), 200, 4),
    (Fault(cut=Cut.IN_EVENT, events=1), 200, 1),
    (Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"), 0, 0),
]


def test_a_fault_breaks_what_it_says() -> None:
    async def body() -> None:
        async with Fleet() as fleet:
            server = fleet.decode[0]
            for fault, status, events in CUTS:
                server.script.add(Rule(fault, path="/v1/chat/completions"))
                reply = await ask(server.port, "/v1/chat/completions", CHAT | {"stream": True})
                assert (reply.status, len(reply.data), reply.whole) == (status, events, False), fault
                assert reply.fault
            for fault in (faults.html(502), faults.text(500), faults.empty(503), faults.status(429, b"{}", Retry_After="7")):
                server.script.add(Rule(fault))
                reply = await ask(server.port, "/v1/chat/completions", CHAT)
                assert (reply.status, reply.body, reply.header("content-type")) == (fault.status, fault.body, fault.content_type)
            assert reply.header("retry-after") == "7"
            assert await fleet.settle() == {}

    run(body())


OTHER_WAYS = [
    Fault(chunk_bytes=1),
    Fault(segment_bytes=7),
    Fault(framing=Framing.CLOSE),
    Fault(framing=Framing.CHUNKED, chunk_bytes=3),
    Fault(interim=b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    Fault(delay_s=0.01),
    Fault(headers=(("x-long", "y" * 9999),)),
]
BROKEN_WHOLE = [(Fault(length_off=5), False), (Fault(length_off=-5), True), (Fault(cut=Cut.AFTER_EVENTS, events=9), False)]


def test_other_ways_to_answer_keep_the_text() -> None:
    async def body() -> None:
        async with Fleet() as fleet:
            server = fleet.decode[0]
            usual = (await ask(server.port, "/v1/chat/completions", CHAT)).texts()
            for stream in (False, True):
                for fault in OTHER_WAYS:
                    server.script.add(Rule(fault))
                    reply = await ask(server.port, "/v1/chat/completions", CHAT | {"stream": stream})
                    assert (reply.status, reply.whole, reply.texts()) == (200, True, usual), fault
                    assert reply.interim == ([103] if fault.interim else [])
            server.script.add(Rule(Fault(error_after=2)))
            broken = await ask(server.port, "/v1/chat/completions", CHAT | {"stream": True})
            assert broken.done
            assert "error" in broken.events[-1]
            for fault, whole in (
                (Fault(length_off=5), False),
                (Fault(length_off=-5), True),
                (Fault(cut=Cut.AFTER_EVENTS, events=9), False),
            ):
                server.script.add(Rule(fault))
                assert (await ask(server.port, "/v1/chat/completions", CHAT)).whole is whole
            server.script.add(Rule(Fault(params={"remote_host": DROP, "tp_size": 2})))
            params = await prefill(server, PROMPT)
            assert "remote_host" not in params
            assert params["tp_size"] == 2

    run(body())


def test_connections_end_as_told() -> None:
    async def body() -> None:
        async with Fleet(options=Options(keepalive_s=0.05)) as fleet:
            server = fleet.decode[0]
            client = await Client.open(server.port)
            await client.send(request("GET", "/version") * 3)
            assert [(await client.reply()).whole for _ in range(3)] == [True] * 3  # pipelined
            assert await client.closed(1)  # idle for too long
            client.leave()
            for after in (After.CLOSE, After.HALF_CLOSE):
                server.script.add(Rule(Fault(after=after)))
                client = await Client.open(server.port)
                await client.send(request("GET", "/version"))
                assert (await client.reply()).whole
                assert await client.closed(1)
                client.leave()
            server.close_on_accept = 1
            assert (await ask(server.port, "/version")).fault
            server.script.add(Rule(Fault(hang=True)))
            client = await Client.open(server.port)
            await client.send(request("POST", "/v1/completions", PROMPT))
            while not server.counts["in_flight"]:
                await asyncio.sleep(0.001)
            client.leave(reset=True)
            assert await fleet.settle(sockets=True) == {}
            assert server.counts["aborted"] == 1
            await server.refuse()
            with pytest.raises(ConnectionRefusedError):
                await Client.open(server.port)
            await server.start()
            assert (await ask(server.port, "/version")).status == 200

    run(body())


def test_an_aborted_decode_gives_the_blocks_back() -> None:
    async def body() -> None:
        async with Fleet(options=Options(queue_s=5)) as fleet:
            p, d = fleet.prefill[0], fleet.decode[0]
            p.options = Options()
            params = await prefill(p, PROMPT)
            client = await Client.open(d.port)
            await client.send(request("POST", "/v1/completions", PROMPT | {"kv_transfer_params": params}))
            while not d.counts["in_flight"]:
                await asyncio.sleep(0.001)
            client.leave()
            assert await fleet.settle() == {}
            assert fleet.blocks() == {State.RELEASED: 1}

    run(body())


# ---- the judge of messages


GET = b"GET / HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "data",
    [
        GET + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        GET + b"Content-Length: +1\r\n\r\n",
        GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        GET + b"A: b\r\n c\r\n\r\n",
        GET + b"A : b\r\n\r\n",
        GET + b"A: b\n\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / x HTTP/1.1\r\nHost: a\r\n\r\n",
        GET + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n",
        GET + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
    ],
)
def test_what_a_sender_may_not_say(data: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(data)


def test_messages_are_the_same_however_they_are_cut() -> None:
    told = (
        GET
        + b"Content-Length: 3\r\n\r\nabc"
        + GET
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + chunk(b"de")
        + b"1;x=y\r\nf\r\n0\r\nT: u\r\n\r\n"
    )
    for size in (1, 2, 3, 7, len(told)):
        decoder, bodies, heads, ends = Decoder(), [b""], 0, []
        for at in range(0, len(told), size):
            for event in decoder.feed(told[at : at + size]):
                if isinstance(event, Head):
                    heads += 1
                elif isinstance(event, End):
                    bodies.append(b"")
                    ends.append(event.trailers)
                else:
                    bodies[-1] += event
        assert (heads, bodies, ends) == (2, [b"abc", b"def", b""], [(), (("t", "u"),)])
        assert decoder.idle
        assert decoder.end() == []
