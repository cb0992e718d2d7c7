"""What clients may say to the proxy and what they may not, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random

import pytest

from expertwire.proxy.http import front
from expertwire.proxy.http.front import Front
from expertwire.proxy.http.upstream import Upstream
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.client import Client, request
from expertwire.testing.http.fake_vllm import Fleet, Options
from proxy.edge import CHAT, PROMPT, STREAM, Edge, run

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps(PROMPT).encode()


def whole(body: bytes = BODY, *lines: bytes) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_every_endpoint_and_own_ones() -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge:
            for stream in (False, True):
                for path, asked in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "a b"})):
                    reply = await edge.ask(
                        path, {**asked, "stream": stream}, {"X-Request-Id": f"rid{path}", "Authorization": "Bearer hush"}
                    )
                    assert (reply.status, reply.whole) == (200, True), reply
                    assert reply.header("x-request-id") == f"rid{path}"
                    assert "kv_transfer_params" not in reply.body.decode()
                    assert reply.texts()[0]
                    assert reply.header("date")
                    assert reply.done == (stream and path != "/v1/responses")
            assert edge.fleet.total("pull_right") == 6
            for server in edge.fleet.servers:
                for seen in server.seen:
                    assert seen.head.get("authorization") == "Bearer hush"
            for path in ("/v1/models", "/version", "/tokenize"):
                reply = await edge.ask(path, {"model": MODEL, "prompt": "a"} if path == "/tokenize" else None)
                assert (reply.status, reply.whole) == (200, True), reply
            for path in ("/health", "/ready", "/metrics"):
                reply = await edge.ask(path)
                assert (reply.status, reply.whole) == (200, True), reply
            assert b'expertwire_proxy_requests_total{endpoint="chat",outcome="done"} 2' in reply.body
            assert await edge.settle() == {}
        logged = [line for line in edge.logged() if line["event"] == "request"]
        assert len(logged) == 9
        assert "hush" not in str(edge.lines)
        assert "one two" not in str(edge.lines)

    run(body())


def test_a_request_split_at_every_byte_and_into_single_bytes() -> None:
    async def body() -> None:
        async with Edge() as edge:
            chunked = POST + b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
            third = len(BODY) // 3
            for piece in (BODY[:third], BODY[third:]):
                chunked += b"%X;x=y\r\n%b\r\n" % (len(piece), piece)
            chunked += b"0\r\nTrailer: dropped\r\n\r\n"
            (reply,), client = await edge.say(chunked)
            text = reply.texts()[0]
            client.leave()
            for data in (whole(), chunked):
                client = await Client.open(edge.port)
                for at in range(1, len(data), 7):
                    await client.send(data[:at])
                    await asyncio.sleep(0)
                    await client.send(data[at:])
                    reply = await client.reply()
                    assert reply.texts()[0] == text, at
                client.leave()
                (reply,), client = await edge.say(data, segment_bytes=1)
                assert reply.texts()[0] == text
                client.leave()

    run(body())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def body() -> None:
        async with Edge(limits={"pipelined": 4}) as edge:
            data = b""
            for index in range(40):
                if index % 3 == 0:
                    data += b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
                else:
                    data += whole(json.dumps({**PROMPT, "stream": index % 3 == 1}).encode(), b"X-Request-Id: n%d" % index)
            replies, client = await edge.say(data, replies=40)
            for index, reply in enumerate(replies):
                assert (reply.status, reply.whole) == (200, True)
                assert reply.header("x-request-id") == ("" if index % 3 == 0 else f"n{index}")
            # What cannot be read is answered behind what could be, and ends the connection.
            await client.send(whole() + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n" + whole())
            statuses = [(await client.reply()).status for _ in range(3)]
            assert statuses == [200, 200, 400]
            assert await client.closed()
            client.leave()

    run(body())


SMUGGLED = {
    "both lengths": whole(b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "both lengths, the other order": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": whole(BODY, b"Content-Length: 5"),
    "the same length twice": whole(BODY, b"Content-Length: %d" % len(BODY)),
    "a length with a sign": POST + b"Content-Length: +5\r\n\r\nabcde",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nabcde",
    "no length": POST + b"Content-Length:\r\n\r\nabcde",
    "a huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a chunk size in C": POST + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nabcde\r\n0\r\n\r\n",
    "a negative chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
    "a space behind the chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n5 \r\nabcde\r\n0\r\n\r\n",
    "a chunk size with LF": POST + b"Transfer-Encoding: chunked\r\n\r\n5\nabcde\r\n0\r\n\r\n",
    "an overflowing chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nabcde\r\n0\r\n\r\n",
    "a chunk that is too long": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdef\r\n0\r\n\r\n",
    "a length among the trailers": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\nabcde",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding behind chunked": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded header": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a folded value": POST + b"X: a\r\n\tb\r\nContent-Length: 0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a space before the first header": b"POST / HTTP/1.1\r\n Host: x\r\n\r\n",
    "lines that end in LF": b"POST / HTTP/1.1\nHost: x\n\n",
    "a header that ends in LF": POST + b"X: a\nY: b\r\n\r\n",
    "a CR within a header": POST + b"X: a\rb\r\n\r\n",
    "a NUL within a header": POST + b"X: a\x00b\r\n\r\n",
    "no name": POST + b": b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": POST + b"Host: y\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.9": b"GET / HTTP/1.9\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(64),
    "an expectation": whole(BODY, b"Expect: 200-maybe"),
}
OTHER_STATUS = {"an unknown coding": (400, 501), "a coding before chunked": (501,), "HTTP/2": (400, 505), "HTTP/1.9": (400, 505)}
OTHER_STATUS |= {
    "HTTP/0.9": (400, 505),
    "a tunnel": (405,),
    "an expectation": (417,),
    "a huge length": (400, 413),
    "chunked twice": (400, 501),
}


def test_what_could_be_read_in_two_ways_is_refused_and_ends_the_connection() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for name, data in SMUGGLED.items():
                for segment_bytes in (0, 1):
                    (reply,), client = await edge.say(data + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", segment_bytes=segment_bytes)
                    assert reply.status in OTHER_STATUS.get(name, (400, 501)), (name, reply)
                    assert reply.whole, name
                    assert reply.header("connection") == "close", name
                    assert reply.json["error"]["code"] == reply.status, name
                    assert await client.closed(), name
                    client.leave()
            assert not edge.p.seen
            assert not edge.d.seen
            assert await edge.settle() == {}

    run(body())


def test_limits_of_head_and_body() -> None:
    async def body() -> None:
        limits = {"head_bytes": 2048, "headers": 20, "body_bytes": 4096}
        async with Edge(limits=limits) as edge:
            many = [b"X-%d: a" % index for index in range(30)]
            cases = (
                (431, whole(BODY, b"X: " + b"a" * 3000)),
                (431, whole(BODY, *many)),
                (431, b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
                (431, POST + b"X: " + b"a" * 500_000),
                (413, whole(b"a" * 5000)),
                (413, POST + b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n"),
                (413, POST + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n%b\r\n1\r\na\r\n" % (b"a" * 4096)),
                (413, POST + b"Content-Length: 50000000\r\n\r\n" + b"a" * 300_000),
            )
            for status, data in cases:
                (reply,), client = await edge.say(data)
                assert (reply.status, reply.whole, reply.header("connection")) == (status, True, "close"), (data[:80], reply)
                assert reply.interim == []
                client.leave()
            assert not edge.p.seen
            # At the limit: many small requests in one piece are no large head.
            replies, client = await edge.say(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200, replies=200)
            assert {reply.status for reply in replies} == {200}
            client.leave()
            fits = json.dumps({**PROMPT, "prompt": "a" * (4096 - len(BODY) + len("one two three"))}).encode()
            assert len(fits) == 4096
            (reply,), client = await edge.say(whole(fits))
            assert reply.status == 200
            client.leave()

    run(body())


def test_old_clients_heads_expectations_and_upgrades() -> None:
    async def body() -> None:
        async with Edge() as edge:
            old = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n%b\r\n%b"
            streamed = json.dumps(STREAM).encode()
            (reply,), client = await edge.say(old % (len(streamed), b"", streamed))
            assert reply.header("transfer-encoding") == ""
            assert reply.done
            assert await client.closed()
            client.leave()
            for _ in range(2):
                (reply,), client = await edge.say(old % (len(BODY), b"Connection: keep-alive\r\n", BODY))
                assert (reply.status, reply.header("connection")) == (200, "keep-alive")
                await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                reply = await client.reply()
                assert (reply.status, reply.header("connection")) == (200, "close")
                assert await client.closed()
                client.leave()
            for target in (b"/v1/models", b"/health", b"/nowhere"):
                (reply,), client = await edge.say(b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n" % target, head_only=True)
                assert (reply.status, reply.whole, reply.body) == (404 if target == b"/nowhere" else 200, True, b"")
                await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await client.reply()).status == 200
                client.leave()
            client = await Client.open(edge.port)
            await client.send(POST + b"Content-Length: %d\r\nExpect: 100-Continue\r\n\r\n" % len(BODY))
            assert (await client.reader.readexactly(25)) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(BODY)
            assert (await client.reply()).status == 200
            upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")
            await client.send(
                whole(BODY, *upgrade) + whole() + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
            )
            assert [(await client.reply()).status for _ in range(3)] == [200, 200, 200]
            client.leave()

    run(body())


def test_slow_heads_and_bodies_are_told_so_and_idle_connections_closed() -> None:
    async def body() -> None:
        async with Edge(timeouts={"client_head_s": 0.2, "client_idle_s": 0.3}) as edge:
            half = whole()[:-5]
            for data in (b"POST /v1", POST, half):
                (reply,), client = await edge.say(data)
                assert (reply.status, reply.header("connection")) == (408, "close")
                client.leave()
            (reply,), client = await edge.say(whole())
            assert reply.status == 200
            assert await client.closed()
            client.leave()
            client = await Client.open(edge.port)
            assert await client.closed()
            client.leave()
            assert not edge.worker.fronts

    run(body())


def test_more_than_may_be_in_flight_and_more_connections_than_allowed() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(queue_s=0.1)), in_flight_limit=2, limits={"connections": 4}) as edge:
            clients = [await Client.open(edge.port) for _ in range(4)]
            for client in clients[:3]:
                await client.send(request("POST", "/v1/completions", PROMPT))
            replies = [await client.reply() for client in clients[:3]]
            assert sorted(reply.status for reply in replies) == [200, 200, 429]
            refused = next(reply for reply in replies if reply.status == 429)
            assert refused.header("retry-after") == "1"
            assert refused.json["error"]["type"] == "rate_limit_error"
            extra = await Client.open(edge.port)
            assert (await extra.reply()).status == 429
            assert await extra.closed()
            for client in (*clients, extra):
                client.leave()

    run(body())


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_never_break_it(seed: int) -> None:
    """Real requests with bytes flipped, cut out, doubled: answered or closed, nothing left, and the next client is served."""

    async def body() -> None:
        chance = random.Random(seed)
        seeds = [*SMUGGLED.values(), whole(), whole(json.dumps(STREAM).encode()), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"]
        async with Edge(timeouts={"client_head_s": 0.1, "client_idle_s": 0.1}) as edge:

            async def one() -> None:
                data = bytearray(chance.choice(seeds) + chance.choice(seeds))
                for _ in range(chance.randrange(4)):
                    at = chance.randrange(len(data))
                    what = chance.randrange(3)
                    if what == 0:
                        data[at] = chance.randrange(256)
                    elif what == 1:
                        del data[at : at + chance.randrange(1, 9)]
                    else:
                        data[at:at] = data[at : at + chance.randrange(1, 40)]
                client = await Client.open(edge.port)
                half = chance.randrange(2)
                with contextlib.suppress(ConnectionError):  # closed as idle just when this came
                    await client.send(bytes(data))
                    if half:
                        client.writer.write_eof()
                    await client.reader.read()
                client.leave()

            for _ in range(6):
                await asyncio.gather(*(one() for _ in range(20)), return_exceptions=False)
            assert (await edge.ask("/v1/completions", PROMPT)).status == 200
            assert await edge.settle() == {}

    run(body())


def test_a_connection_that_has_ended_needs_no_collector() -> None:
    """The parser and its connection hold each other: what had come of a body stayed until a collection, which a worker has rarely."""

    async def body() -> None:
        async with Edge(limits={"reply_bytes": 1000}) as edge:
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    client = await Client.open(edge.port)
                    await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
                    client.leave()
                    assert (
                        await edge.ask("/v1/completions", PROMPT | {"max_tokens": 400})
                    ).status == 502  # too large: the connection is dropped
                    assert (await edge.ask("/v1/completions", PROMPT, headers={"connection": "close"})).status == 200
                await edge.settle()
                for pool in edge.worker.pools:
                    pool.retire()
                while edge.worker.fronts or any(pool.open_count for pool in edge.worker.pools):
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.01)
                edge.worker.wheel._slots.clear()  # it holds whom it watches for 2 s at most
                assert [type(found) for found in gc.get_objects() if isinstance(found, Front | Upstream)] == []
            finally:
                gc.enable()

    run(body())


def test_a_target_that_names_a_host_is_one_of_ours_too() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for target, said in (
                (b"http://x/health", b'"ok"'),
                (b"http://x/ready?a", b'"ready":true'),
                (b"http://x/metrics", b"expertwire_proxy_"),
            ):
                replies, client = await edge.say(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
                assert said in replies[0].body, target
                client.leave()
            assert edge.d.counts["requests"] == 0

    run(body())


def test_a_head_that_came_before_is_known_and_what_is_behind_it_is_not() -> None:
    """Requests of one head, byte for byte, with other bodies; in pieces; with more behind; and what may not be kept."""

    async def body() -> None:
        async with Edge() as edge:
            known = edge.worker.known
            bodies = [json.dumps(PROMPT | {"prompt": prompt}).encode() for prompt in ("one two three", "two one three")]
            texts = [(await edge.ask("/v1/completions", json.loads(data))).texts() for data in bodies]
            assert texts[0] != texts[1]
            client = await Client.open(edge.port)
            known.clear()

            async def right(*pieces: bytes, of: tuple[int, ...]) -> None:
                for piece in pieces:
                    await client.send(piece)
                    await asyncio.sleep(0.01)
                for index in of:
                    reply = await client.reply()
                    assert (reply.status, reply.texts()) == (200, texts[index]), (pieces, reply)

            asked = [whole(data) for data in bodies]
            head = asked[0].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            await right(asked[0], of=(0,))
            assert list(known) == [head]
            for index in (1, 0, 1):
                await right(asked[index], of=(index,))
            await right(asked[0] + asked[1], of=(0, 1))
            await right(head, asked[1][len(head) :], of=(1,))
            await right(asked[0][:-3], asked[0][-3:] + asked[1], of=(0, 1))
            await right(asked[0] + asked[1][:30], asked[1][30:], of=(0, 1))
            seen = edge.d.seen[-1].head
            assert (seen.get("x-request-id") != "", seen.get("content-type")) == (True, "application/json")
            assert len({request.head.get("x-request-id") for request in edge.d.seen}) == len(edge.d.seen), "each has an id of its own"
            # What comes once, or is not simply so many bytes, is not kept.
            kept = dict(known)
            chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(bodies[0]), bodies[0])
            upgrade = whole(bodies[0], b"Connection: Upgrade", b"Upgrade: h2c")
            for data in (chunked, upgrade, whole(bodies[0], b"X-Request-Id: mine"), whole(bodies[0], b"X: " + b"a" * 1024)):
                for _ in range(2):
                    await right(data, of=(0,))
            await client.send(whole(bodies[0], b"Expect: 100-continue"))
            assert (await client.reply()).interim == [100]
            assert known == kept
            # Behind a known head with a length, as behind any: what could be read in two ways.
            await client.send(asked[0] + b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
            assert [(await client.reply()).status for _ in range(2)] == [200, 400]
            assert await client.closed()
            client.leave()
            # Who says that the connection ends, ends it every time; and the number of heads is bounded.
            for _ in range(2):
                (reply,), client = await edge.say(whole(bodies[0], b"Connection: close"))
                assert (reply.texts(), await client.closed()) == (texts[0], True)
                client.leave()
            client = await Client.open(edge.port)
            for index in range(front.KNOWN_HEADS + 5):
                await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-N: %d\r\n\r\n" % index)
                assert (await client.reply()).status == 200
                assert len(known) <= front.KNOWN_HEADS
            client.leave()

    run(body())
