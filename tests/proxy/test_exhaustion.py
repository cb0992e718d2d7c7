"""What the proxy itself runs out of, and what clients could make it hold: told as our own, with the limit, and nobody else is troubled."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from expertwire.cli.report import Exit
from expertwire.proxy.held import FREE_BYTES
from expertwire.testing.http.client import Client, Reply, ask, request
from expertwire.testing.http.fake_vllm import Fleet, Options
from expertwire.testing.http.faults import Fault, Framing, Rule
from proxy.command import Command, counted
from proxy.edge import PROMPT, STREAM, Edge, run

PATH = "/v1/completions"
FILES = 80
AT_MOST = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def prompt(size: int) -> bytes:
    """A body of about that many bytes."""
    return json.dumps(PROMPT | {"user": "u" * size}).encode()


def said_by_us(reply: Reply, *words: str) -> bool:
    return (
        (reply.status, reply.whole, reply.header("retry-after")) == (503, True, "1")
        and reply.json["error"]["type"] == "service_unavailable"
        and all(word in reply.json["error"]["message"] for word in words)
    )


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_clients_for_whom_there_is_no_descriptor_are_told_so_and_nothing_spins() -> None:
    async def body() -> None:
        async with Fleet(1, 1) as fleet, Command.running(fleet, before=AT_MOST) as command:
            port = (await command.until("listening"))["port"]
            clients = [await Client.open(port) for _ in range(FILES + 20)]
            # Those that came first are served as ever, over connections to servers for which descriptors are left.
            for client in clients[:20]:
                await client.send(request("POST", PATH, PROMPT))
                assert (await client.reply()).status == 200
            refused = [client for client in clients if client.reader._buffer]  # type: ignore[attr-defined]
            assert FILES // 4 < len(refused) < FILES
            for client in refused:
                assert said_by_us(await client.reply(), f"{FILES} open files")
                assert await client.closed()
            async with asyncio.timeout(10):
                while not sleeps(command.process.pid):
                    await asyncio.sleep(0.001)
            assert 0 < (await command.until("exhausted"))["refused"]["descriptors"] <= len(refused)
            for client in clients:
                client.leave()
            async with asyncio.timeout(10):
                while (found := await ask(port, "/metrics")).status != 200:
                    await asyncio.sleep(0.01)
            assert counted(found.body, 'expertwire_proxy_exhausted_total{what="descriptors"}') >= len(refused)
            assert await command.end(signal.SIGTERM) == Exit.OK

    run(body())


def test_a_server_is_not_blamed_where_we_have_no_descriptor_for_it() -> None:
    async def body() -> None:
        async with Fleet(1, 1, Options(queue_s=0.2)) as fleet, Command.running(fleet, before=AT_MOST) as command:
            port = (await command.until("listening"))["port"]
            clients = [await Client.open(port) for _ in range(FILES // 2)]
            for client in clients:
                await client.send(request("POST", PATH, PROMPT))
            replies = [await client.reply() for client in clients]
            refused = [reply for reply in replies if reply.status != 200]
            assert 0 < len(refused) < len(clients), "connections that P's legs had left open are closed for those of D's"
            for reply in refused:
                assert said_by_us(reply, f"{FILES} open files"), reply
            for client in clients[:3]:
                await client.send(request("POST", PATH, STREAM))
                assert (await client.reply()).done
            await clients[0].send(request("GET", "/metrics"))
            text = (await clients[0].reply()).body
            assert counted(text, "expertwire_proxy_breaker_trips_total{") == 0
            assert counted(text, "expertwire_proxy_server_up{") == 2
            assert counted(text, "expertwire_proxy_retries_total{") == 0
            for client in clients:
                client.leave()
            assert await command.end(signal.SIGTERM) == Exit.OK

    run(body())


def test_bodies_of_all_connections_together_have_a_limit() -> None:
    async def body() -> None:
        limits = {"body_bytes": 250_000, "reply_bytes": 250_000, "held_bytes": 300_000}
        async with Edge(limits=limits) as edge:
            edge.p.script.add(Rule(Fault(hang=True)))
            first = await Client.open(edge.port)
            await first.send(request("POST", PATH, prompt(200_000)))
            while not edge.p.counts["in_flight"]:
                await asyncio.sleep(0.002)
            held = edge.worker.held.total
            assert held == len(prompt(200_000))
            # At its head, before a byte of it has come; and what has no length as soon as it is too much.
            for data in (
                HEAD + b"Content-Length: 200000\r\nExpect: 100-continue\r\n\r\n",
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % 150_000 + b"a" * 120_000,
            ):
                (reply,), client = await edge.say(data)
                assert said_by_us(reply, "300000 bytes"), reply
                assert reply.interim == []
                assert edge.worker.held.total == held
                client.leave()
            # Small ones are not counted, and one that fits is served.
            for size in (10, FREE_BYTES - 200, FREE_BYTES + 10):
                assert (await edge.ask(PATH, prompt(size))).status == 200
            assert edge.worker.held.total == held
            first.leave()
            assert await edge.settle() == {}
            assert (await edge.ask(PATH, prompt(200_000))).status == 200
            # A client that leaves in the middle of its body takes that along.
            client = await Client.open(edge.port)
            await client.send(HEAD + b"Content-Length: 200000\r\n\r\n" + b"a" * 150_000)
            while not edge.worker.held.total:
                await asyncio.sleep(0.002)
            client.leave()
            assert await edge.settle() == {}
            text = (await edge.ask("/metrics")).body
            assert counted(text, 'expertwire_proxy_exhausted_total{what="bodies"}') == 2

    run(body())


def test_answers_count_too_and_what_is_announced_as_too_large_is_not_read() -> None:
    async def body() -> None:
        limits = {"body_bytes": 100_000, "reply_bytes": 250_000, "held_bytes": 250_000}
        async with Edge(limits=limits, retries={"prefill_attempts": 1}) as edge:
            answer = b'{"choices":[],"a":"' + b"x" * 180_000 + b'"}'
            first = await Client.open(edge.port)
            await first.send(HEAD + b"Content-Length: 90000\r\n\r\n" + b"a" * 89_000)
            while edge.worker.held.total < 89_000:
                await asyncio.sleep(0.002)
            for server in (edge.p, edge.d):
                for framing in (Framing.USUAL, Framing.CHUNKED):
                    server.script.add(Rule(Fault(status=200, body=answer, content_type="application/json", framing=framing)))
                    reply = await edge.ask(PATH, PROMPT)
                    assert said_by_us(reply, "250000 bytes"), (server.name, framing, reply)
                # The length alone is enough to refuse an answer: the rest of this one never comes.
                stuck = Fault(status=200, body=b"{" * 10, content_type="application/json", length_off=250_000)
                server.script.add(Rule(stuck))
                reply = await edge.ask(PATH, PROMPT)
                assert (reply.status, reply.json["error"]["type"]) == (502, "upstream_too_large"), reply
            first.leave()
            assert await edge.settle(blocks=False) == {}

    run(body())


def test_a_client_that_sends_and_never_reads_is_held_back() -> None:
    """Its replies were made and kept, one after the other, for as long as it went on asking."""

    async def body() -> None:
        async with Edge(limits={"pipelined": 4}, timeouts={"idle_s": 1.0}) as edge:
            edge.d.script.add(Rule(Fault(status=200, body=b'{"choices":[{}],"a":"' + b"x" * 400_000 + b'"}'), times=None))
            client = await Client.open(edge.port, receive_bytes=4096)
            sending = asyncio.ensure_future(client.send(request("POST", PATH, PROMPT) * 200))
            (front,) = [front async for front in _until(edge)]
            while not front.stalled:
                await asyncio.sleep(0.002)
            asked = edge.d.counts["requests"]
            assert asked < 30, "what the kernel's buffers take, and one reply more"
            assert edge.worker.held.total >= front._transport.get_write_buffer_size() > 0
            assert edge.worker.held.total < 1_000_000
            assert (await edge.ask("/v1/models")).status == 200
            # After `idle_s` without a byte taken it is left.
            async with asyncio.timeout(10):
                while edge.worker.fronts:
                    await asyncio.sleep(0.01)
            assert edge.d.counts["requests"] <= asked + 2
            sending.cancel()
            client.leave(reset=True)
            assert await edge.settle(blocks=False) == {}

    async def _until(edge: Edge):  # type: ignore[no-untyped-def]
        while not edge.worker.fronts:
            await asyncio.sleep(0.002)
        yield next(iter(edge.worker.fronts))

    run(body())


def test_an_expectation_behind_another_request_is_met_when_its_turn_comes() -> None:
    async def body() -> None:
        async with Edge() as edge:
            raw = json.dumps(PROMPT).encode()
            client = await Client.open(edge.port)
            await client.send(request("POST", PATH, PROMPT) + HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(raw))
            async with asyncio.timeout(5):
                first = await client.reader.readuntil(b"}HTTP/1.1 100 Continue\r\n\r\n")
            assert first.startswith(b"HTTP/1.1 200 OK\r\n")
            await client.send(raw)
            assert (await client.reply()).status == 200
            client.leave()

    run(body())


def test_a_p_that_has_not_taken_the_request_is_not_waited_for_when_the_client_leaves() -> None:
    """It has no answer to what it has not read, and what it did not read would be held for as long."""

    async def body() -> None:
        async with Edge(timeouts={"release_s": 30.0}) as edge:
            silent = asyncio.Event()

            async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                reached.set()
                await silent.wait()
                writer.close()

            reached = asyncio.Event()
            async with await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024) as server:
                edge.worker.core.fleet.servers("prefill")[0].port = server.sockets[0].getsockname()[1]
                client = await Client.open(edge.port)
                await client.send(request("POST", PATH, prompt(30 << 20)))
                await reached.wait()
                client.leave()
                assert await edge.settle(5.0) == {}
                silent.set()

    run(body())


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_memory_of_large_bodies_is_given_back() -> None:
    size, at_once = 500_000, 96

    async def body() -> None:
        async with Fleet(1, 1, Options(queue_s=0.05, keepalive_s=300.0)) as fleet, Command.running(fleet) as command:
            port = (await command.until("listening"))["port"]
            assert (await ask(port, PATH, PROMPT)).status == 200
            before = resident_bytes(command.process.pid)
            data, kept = request("POST", PATH, prompt(size)), []
            for _ in range(2):
                clients = [await Client.open(port) for _ in range(at_once)]
                await asyncio.gather(*(client.send(data) for client in clients))
                for client in clients:
                    assert (await client.reply()).status == 200
                kept += clients
            async with asyncio.timeout(10):
                while resident_bytes(command.process.pid) > before + at_once * size // 2:
                    await asyncio.sleep(0.02)
            for client in kept:
                client.leave()
            assert await command.end(signal.SIGTERM) == Exit.OK

    run(body())
