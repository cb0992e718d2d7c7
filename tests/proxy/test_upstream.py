"""What servers do to the proxy, and what clients that leave or read slowly do through it to servers, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from expertwire.proxy.exchange import Exchange
from expertwire.proxy.http import upstream
from expertwire.proxy.policy import ServerConfig, Side
from expertwire.testing.http import faults
from expertwire.testing.http.client import Client, request
from expertwire.testing.http.connection import Connection
from expertwire.testing.http.fake_vllm import Fleet, Options
from expertwire.testing.http.faults import After, Cut, Fault, Framing, Rule
from proxy.edge import PROMPT, STREAM, Edge, run

PATH = "/v1/completions"


def test_connections_are_kept_and_used_again_last_in_first_out() -> None:
    async def body() -> None:
        async with Edge(timeouts={"pool_idle_s": 0.3}) as edge:
            for _ in range(5):
                assert (await edge.ask(PATH, PROMPT)).status == 200
                assert (await edge.ask(PATH, STREAM)).done
            assert (len(edge.p.connections), len(edge.d.connections)) == (1, 1)
            await asyncio.gather(*(edge.ask(PATH, PROMPT) for _ in range(8)))
            most = len(edge.d.connections)
            assert 1 < most <= 8
            assert await edge.fleet.settle(3.0, sockets=True) == {}, "kept for longer than allowed"
            assert not any(pool.open_count for pool in edge.worker.pools)

    run(body())


def test_answers_of_every_framing_and_size_of_segment() -> None:
    async def body() -> None:
        async with Edge() as edge:
            good = (await edge.ask(PATH, STREAM)).texts()
            for framing in Framing:
                for segment_bytes, chunk_bytes in ((0, 0), (1, 0), (0, 1), (3, 7)):
                    fault = Fault(
                        framing=framing,
                        segment_bytes=segment_bytes,
                        chunk_bytes=chunk_bytes,
                        interim=b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n",
                    )
                    for server in edge.fleet.servers:
                        server.script.add(Rule(fault, times=2))
                    for asked in (PROMPT, STREAM):
                        reply = await edge.ask(PATH, asked)
                        assert (reply.status, reply.texts()) == (200, good), (framing, segment_bytes, chunk_bytes, reply)
                        assert reply.interim == []
            head = await edge.ask("/v1/models", method="HEAD")
            assert (head.status, head.body, head.whole) == (200, b"", True)
            assert await edge.settle() == {}

    run(body())


def test_a_head_that_came_before_is_known_and_its_body_is_not() -> None:
    """Answers of one head, byte for byte, and of other bodies; in segments; with bytes behind; to HEAD."""

    async def body() -> None:
        async with Edge() as edge:
            prompts = [PROMPT | {"prompt": prompt} for prompt in ("one two three", "two one three")]
            texts = [(await edge.ask(PATH, asked | {"stream": True})).texts() for asked in prompts]
            assert texts[0] != texts[1]

            async def as_ever() -> None:
                for asked, right in zip(prompts, texts, strict=True):
                    reply = await edge.ask(PATH, asked)
                    assert (reply.status, reply.texts()) == (200, right)

            for _ in range(3):
                await as_ever()
            pools = [edge.worker.core.fleet.servers(side)[0].pool for side in Side]
            for pool in pools:
                assert 0 < len(pool.heads) <= upstream.KNOWN_HEADS
                assert all(int(dict(lines)[b"content-length"]) == size for _, lines, size in pool.heads.values())
            for fault in (Fault(segment_bytes=40), Fault(behind=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nWRONG")):
                for server in edge.fleet.servers:
                    server.script.add(Rule(fault, times=2))
                await as_ever()
            await as_ever()
            for _ in range(2):
                whole, head = await edge.ask("/v1/models", method="GET"), await edge.ask("/v1/models", method="HEAD")
                assert (whole.status, head.status, head.body, head.whole) == (200, 200, b"", True)
                assert whole.body
            assert await edge.settle() == {}

    run(body())


def test_a_kept_connection_that_was_closed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with Edge() as edge:
            for server in edge.fleet.servers:
                server.script.add(Rule(Fault(after=After.CLOSE), times=None))
            for _ in range(10):
                assert (await edge.ask(PATH, PROMPT)).status == 200
            for server in edge.fleet.servers:
                server.script.rules.clear()
                server.script.add(Rule(Fault(behind=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nWRONG"), times=None))
            for _ in range(5):
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, "WRONG" in reply.texts()[0]) == (200, False)
            for server in edge.fleet.servers:
                server.script.rules.clear()
            # Closed without an answer, once the request is there, on a connection that was in use a moment ago: a failure as any other.
            # On one that had rested it may be that the server closes what is idle: P is asked again, and so is D, with fresh parameters.
            for server, rested_s, status, again in (
                (edge.p, 1.0, 502, 1),
                (edge.d, 1.0, 502, 1),
                (edge.p, 0.0, 200, 2),
                (edge.d, 0.0, 200, 2),
            ):
                monkeypatch.setattr(upstream, "RESTED_S", rested_s)
                assert (await edge.ask(PATH, PROMPT)).status == 200
                server.script.add(Rule(Fault(cut=Cut.BEFORE_HEAD)))
                before = server.counts["requests"]
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, server.counts["requests"] - before) == (status, again), (server.name, reply)
            assert edge.fleet.total("pull_wrong") == 0
            assert edge.left() == {}  # what D was sent and did not pull lies at P until its lease ends

    run(body())


NOT_HTTP = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a status that is none": b"HTTP/1.1 0 OK\r\n\r\n",
    "a status that is too large": b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n",
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "a coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n{}",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "another protocol, agreed": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{}",
    "a head without an end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 5000,
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{",
}


def test_what_is_no_answer_is_a_502_of_ours_and_d_is_not_called() -> None:
    async def body() -> None:
        async with Edge(limits={"head_bytes": 2048}, retries={"prefill_attempts": 1, "decode_attempts": 1}) as edge:
            for name, raw in NOT_HTTP.items():
                fault = Fault(raw=raw) if raw else Fault(cut=Cut.BEFORE_HEAD)
                edge.p.script.add(Rule(fault))
                before = edge.d.counts["requests"]
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, edge.d.counts["requests"]) == (502, before), (name, reply)
                assert "127.0.0.1" not in reply.body.decode()
                edge.d.script.add(Rule(fault))
                for asked in (PROMPT, STREAM):
                    edge.d.script.rules[:] = [Rule(fault)]
                    reply = await edge.ask(PATH, asked)
                    assert (reply.status, reply.whole) == (502, True), (name, reply)
                assert (await edge.ask(PATH, PROMPT)).status == 200, name
            assert await edge.settle(blocks=False) == {}

    run(body())


def test_who_answers_before_the_request_is_whole_is_not_asked_again_on_that_connection() -> None:
    answer = b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}]}'
    opened = 0

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        await ended.wait()  # and reads no more
        writer.close()

    async def body() -> None:
        async with await asyncio.start_server(early, "127.0.0.1", 0, limit=4096) as server, Edge() as edge:
            fleet = edge.worker.core.fleet
            fleet.remove(Side.DECODE, "decode-0")
            fleet.add(Side.DECODE, ServerConfig(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            for _ in range(3):
                async with asyncio.timeout(5):
                    reply = await edge.ask(PATH, PROMPT | {"user": "y" * (16 << 20)})
                assert (reply.status, reply.body) == (200, answer)
            assert opened == 3
            ended.set()

    ended = asyncio.Event()
    run(body())


def test_an_answer_over_its_limit_is_refused() -> None:
    async def body() -> None:
        async with Edge(limits={"reply_bytes": 2000}) as edge:
            for server in (edge.p, edge.d):
                server.script.add(Rule(Fault(status=200, body=b'{"a":"' + b"x" * 3000 + b'"}', content_type="application/json")))
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, reply.json["error"]["type"]) == (502, "upstream_too_large")
            assert await edge.settle(blocks=False) == {}

    run(body())


def test_every_wait_for_a_server_has_its_deadline() -> None:
    async def body() -> None:
        times = {"prefill_first_byte_s": 0.2, "decode_first_byte_s": 0.3, "idle_s": 0.25, "connect_s": 0.2}
        async with Edge(timeouts=times) as edge:
            loop = asyncio.get_running_loop()
            for server, least in ((edge.p, 0.2), (edge.d, 0.3)):
                for asked in (PROMPT, STREAM):
                    server.script.add(Rule(Fault(hang=True)))
                    began = loop.time()
                    reply = await edge.ask(PATH, asked)
                    assert (reply.status, reply.json["error"]["type"]) == (504, "upstream_timeout"), (server.name, reply)
                    assert loop.time() - began >= least
            assert await edge.fleet.settle() == {}
            assert await edge.settle() == {}

    run(body())


def test_a_server_that_takes_no_connection_is_unreached_in_time() -> None:
    async def body() -> None:
        # A listener whose queue is full answers no SYN: as a host that drops packets.
        with contextlib.ExitStack() as stack:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(silent.getsockname())
            async with Edge(timeouts={"connect_s": 0.3}, retries={"prefill_attempts": 1}) as edge:
                edge.worker.core.fleet.servers(Side.PREFILL)[0].port = silent.getsockname()[1]
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, reply.json["error"]["type"]) == (502, "upstream_unreachable")
                # One that leaves while it waits for the connection takes it along.
                client = await Client.open(edge.port)
                await client.send(request("POST", PATH, PROMPT))
                while not edge.worker.live:
                    await asyncio.sleep(0.002)
                client.leave()
                assert await edge.settle() == {}

    run(body())


def test_who_leaves_takes_along_whatever_leg_is_open() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(token_s=0.005))) as edge:
            long = STREAM | {"max_tokens": 400}
            for reset in (False, True):
                for where in ("prefill", "decode", "stream"):
                    if where != "stream":
                        (edge.p if where == "prefill" else edge.d).script.add(Rule(Fault(hang=True)))
                    before = edge.d.counts["requests"]
                    client = await Client.open(edge.port)
                    await client.send(request("POST", PATH, long))
                    if where == "stream":
                        assert (await client.reply(until_events=3)).status == 200
                    else:
                        server = edge.p if where == "prefill" else edge.d
                        while not server.counts["in_flight"]:
                            await asyncio.sleep(0.002)
                    client.leave(reset=reset)
                    assert await edge.settle() == {}, (where, reset)
                    if where == "prefill":
                        assert edge.d.counts["requests"] == before, "D was called for a client that had left"
            # Half closed counts as left: from here it looks the same.
            client = await Client.open(edge.port)
            await client.send(request("POST", PATH, long))
            await client.reply(until_events=2)
            client.writer.write_eof()
            assert await edge.settle() == {}
            client.leave()
            assert edge.fleet.total("engine_deaths") == 0
        outcomes = [line["outcome"] for line in edge.logged() if line["event"] == "request"]
        assert outcomes == ["gone"] * 7

    run(body())


EVENT = b'data: {"choices":[{"index":0,"text":"' + b"x" * 950 + b'","finish_reason":null}]}\n\n'
LARGE = EVENT * 16_000 + b"data: [DONE]\n\n"  # more than the kernel's buffers of two connections take


def test_who_leaves_while_no_more_is_read_of_it_has_left_too() -> None:
    async def body() -> None:
        async with Edge(limits={"pipelined": 2}) as edge:
            edge.p.script.add(Rule(Fault(hang=True)))
            client = await Client.open(edge.port)
            await client.send(request("POST", PATH, PROMPT) * 6)
            while not edge.p.counts["in_flight"]:
                await asyncio.sleep(0.002)
            client.leave()
            assert await edge.settle() == {}
            assert not edge.worker.fronts

    run(body())


def test_a_client_that_reads_slowly_holds_back_its_server_and_nobody_else() -> None:
    async def body() -> None:
        async with Edge() as edge:
            edge.d.script.add(Rule(Fault(status=200, body=LARGE, content_type="text/event-stream")))
            client = await Client.open(edge.port, receive_bytes=4096)
            await client.send(request("POST", PATH, STREAM))
            await client.reply(until_events=1)
            (front,) = edge.worker.fronts
            while not front.stalled:
                await asyncio.sleep(0.002)
            held = front._transport.get_write_buffer_size()
            assert held < 1 << 20, "the proxy took what its client did not"
            for _ in range(20):
                assert (await edge.ask(PATH, PROMPT)).status == 200
            assert front._transport.get_write_buffer_size() == held, "it went on reading"
            size = 0
            while data := await client.reader.read(1 << 20):
                size += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
            assert size > len(LARGE) - 100_000
            client.leave()
            assert await edge.settle(blocks=False) == {}

    run(body())


def test_a_client_that_reads_nothing_is_left_after_the_deadline() -> None:
    async def body() -> None:
        async with Edge(timeouts={"idle_s": 0.3}) as edge:
            edge.d.script.add(Rule(Fault(status=200, body=LARGE, content_type="text/event-stream")))
            client = await Client.open(edge.port, receive_bytes=4096)
            await client.send(request("POST", PATH, STREAM))
            await client.reply(until_events=1)
            assert await edge.settle(10.0, blocks=False) == {}
            client.leave(reset=True)

    run(body())


def test_at_the_pools_limit_legs_wait_for_a_connection() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(queue_s=0.01)), limits={"pool_per_server": 2}) as edge:
            replies = await asyncio.gather(*(edge.ask(PATH, PROMPT) for _ in range(12)))
            assert {reply.status for reply in replies} == {200}
            assert max(len(edge.p.connections), len(edge.d.connections)) <= 2
            assert await edge.settle() == {}

    run(body())


def test_a_stop_finishes_what_was_begun_and_cuts_off_what_does_not_end() -> None:
    async def body() -> None:
        for hangs in (False, True):
            async with Edge(Fleet(1, 1, Options(token_s=0.01))) as edge:
                client, idle = await Client.open(edge.port), await Client.open(edge.port)
                await idle.send(request("GET", "/health"))
                await idle.reply()
                await client.send(request("POST", PATH, STREAM | {"max_tokens": 400 if hangs else 20}))
                begun = await client.reply(until_events=2)
                stopping = asyncio.ensure_future(edge.worker.stop(0.2 if hangs else 5.0))
                assert await idle.closed()
                with pytest.raises(ConnectionRefusedError):
                    await Client.open(edge.port)
                reply = await client.reply(begun)
                assert await stopping is not hangs
                assert reply.done is not hangs
                assert edge.left() == {}
                client.leave()
                idle.leave()

    run(body())


def certified(place: Path, name: str, days: int = 2) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that nobody else has signed, and a server's context with it."""
    key, cert = place / f"{name}.key", place / f"{name}.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", str(days)]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


def test_a_certificate_that_does_not_hold_means_unreached_on_either_leg(tmp_path: Path) -> None:
    """Signed by nobody we know, for another name, no TLS at all: nothing is sent, and P's blocks are not left behind for a D like that."""
    cert, known = certified(tmp_path, "known")
    _, unknown = certified(tmp_path, "unknown")

    async def body() -> None:
        loop = asyncio.get_running_loop()
        settings = {"tls": {"ca_file": str(cert)}, "timeouts": {"connect_s": 0.3}, "retries": {"prefill_attempts": 1, "decode_attempts": 1}}
        async with Edge(Fleet(1, 2), **settings) as edge:
            fleet = edge.worker.core.fleet
            fleet.remove(Side.DECODE, "decode-1")
            for side, fake in ((Side.PREFILL, edge.p), (Side.DECODE, edge.d)):
                server = fleet.servers(side)[0]
                usual = server.host, server.port, server.tls
                for context, host in ((unknown, "localhost"), (known, "127.0.0.1"), (None, "localhost")):
                    listener = await loop.create_server(lambda fake=fake: Connection(fake), "localhost", 0, ssl=context)
                    if server.pool is not None:
                        server.pool.close()
                        server.pool = None
                    server.host, server.port, server.tls = host, listener.sockets[0].getsockname()[1], True
                    before = fake.counts["requests"]
                    for asked in (PROMPT, STREAM):
                        reply = await edge.ask(PATH, asked)
                        assert (reply.status, reply.json["error"]["type"]) == (502, "upstream_unreachable"), (side, host, reply)
                        assert "localhost" not in reply.body.decode()
                    assert fake.counts["requests"] == before
                    listener.close()
                assert server.failures >= 3
                assert not edge.worker.core.fleet.ready()
                server.pool.close()
                server.pool = None
                server.host, server.port, server.tls = usual
                assert (await edge.ask(PATH, PROMPT)).status == 200, "the last server is tried whatever the breaker says"
            fake.malformed.clear()  # what the one without TLS was sent
            edge.p.malformed.clear()
            assert edge.left() == {}

    run(body())


def test_https_servers_are_checked_by_their_certificates(tmp_path: Path) -> None:
    cert, context = certified(tmp_path, "cert")

    async def body() -> None:
        async with Edge(tls={"ca_file": str(cert)}, retries={"prefill_attempts": 1}) as edge:
            listeners = []
            for side, fake in ((Side.PREFILL, edge.p), (Side.DECODE, edge.d)):
                listener = await asyncio.get_running_loop().create_server(lambda fake=fake: Connection(fake), "localhost", 0, ssl=context)
                listeners.append(listener)
                server = edge.worker.core.fleet.servers(side)[0]
                server.host, server.port, server.tls = "localhost", listener.sockets[0].getsockname()[1], True
            for asked in (PROMPT, STREAM, PROMPT):
                assert (await edge.ask(PATH, asked)).status == 200
            assert len(edge.d.connections) == 1
            client = await Client.open(edge.port)
            edge.d.script.add(Rule(Fault(hang=True)))
            await client.send(request("POST", PATH, STREAM))
            while not edge.d.counts["in_flight"]:
                await asyncio.sleep(0.002)
            client.leave()
            assert await edge.settle() == {}
            # By an address that the certificate does not name.
            edge.worker.core.fleet.servers(Side.PREFILL)[0].host = "127.0.0.1"
            edge.worker.core.fleet.servers(Side.PREFILL)[0].pool.close()
            reply = await edge.ask(PATH, PROMPT)
            assert (reply.status, reply.json["error"]["type"]) == (502, "upstream_unreachable")
            assert "127.0.0.1" not in reply.body.decode()
            for listener in listeners:
                listener.close()

    run(body())


def test_a_fault_of_ours_is_a_500_and_leaves_nothing() -> None:
    async def body() -> None:
        async with Edge() as edge:
            for where in ("leg_head", "leg_body", "leg_data"):

                def broken(*args: object) -> None:
                    raise KeyError("the prompt")

                kept = getattr(Exchange, where)
                setattr(Exchange, where, broken)
                try:
                    reply = await edge.ask(PATH, STREAM)
                finally:
                    setattr(Exchange, where, kept)
                assert (reply.status, reply.json["error"]["type"]) == (500, "internal_error")
                assert await edge.settle(blocks=False) == {}
            edge.worker._log_over()
            edge.log.flush()
            edge.log.close()
            said = [line for line in edge.logged() if line["event"] == "internal_error"]
            assert len(said) == 3
            assert "the prompt" not in str(edge.lines)
            edge.lines.clear()

    run(body())


def test_faults_reach_the_client_as_they_are() -> None:
    async def body() -> None:
        async with Edge(retries={"prefill_attempts": 1}) as edge:
            cases = (faults.html(503), faults.text(500), faults.empty(502), faults.status(429, Retry_After="7"), faults.status(400))
            for server in (edge.p, edge.d):
                for fault in cases:
                    for asked in (PROMPT, STREAM):
                        server.script.add(Rule(fault))
                        reply = await edge.ask(PATH, asked)
                        assert (reply.status, reply.body, reply.whole) == (fault.status, fault.body, True)
                        assert reply.header("content-type") == fault.content_type
                        assert reply.header("retry-after") == ("7" if fault.status == 429 else "")

    run(body())
