"""`expertwire proxy` as a process of several workers: one port, one end, numbers of all, servers added and removed, a worker that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertwire.cli.main import main
from expertwire.cli.report import Exit
from expertwire.proxy import config, workers
from expertwire.proxy.channel import Channel
from expertwire.proxy.log import Log
from expertwire.testing.http.client import Client, ask, request
from expertwire.testing.http.fake_vllm import Fleet, Options
from proxy.command import LIMIT_S, Command, alive, children, counted, free_port
from proxy.edge import PROMPT, STREAM, run

PATH = "/v1/completions"


def test_two_workers_are_one_proxy(tmp_path: Path) -> None:
    async def body() -> None:
        async with Fleet(1, 2) as fleet:
            async with Command.running(fleet, "--workers", "2", "--admin-port", "0", "--json", str(tmp_path / "a.json")) as command:
                port = (await command.until("listening"))["port"]
                for _ in range(12):
                    assert (await ask(port, PATH, PROMPT)).status == 200
                for _ in range(3):
                    text = (await ask(port, "/metrics")).body
                    assert counted(text, 'expertwire_proxy_requests_total{endpoint="completions",outcome="done"}') == 12
                client = await Client.open(port)
                await client.send(request("POST", PATH, STREAM))
                assert (await client.reply()).done
                # To the whole group, as Ctrl-C in a terminal: once is in order.
                assert await command.end(signal.SIGINT) == Exit.OK
                assert await client.closed()
                client.leave()
            assert await fleet.settle(sockets=True) == {}
        rows = json.loads((tmp_path / "a.json").read_text())["rows"]
        assert {(row["name"], row.get("outcome"), row["value"]) for row in rows} == {("requests", "done", 13), ("shutdown", None, 1)}
        numbers = {line["worker"] for line in command.lines if line["event"] == "request"}
        assert numbers <= {0, 1}

    run(body())


def test_servers_are_added_and_removed_everywhere_and_a_dead_worker_is_replaced() -> None:
    async def body() -> None:
        async with Fleet(1, 2) as fleet, Fleet(0, 1) as more:
            more.decode[0].world = fleet.world
            async with Command.running(fleet, "--workers", "2", "--admin-port", str(await free_port())) as command:
                port = (await command.until("listening"))["port"]
                admin = (await command.until("admin_listening"))["port"]
                listed = (await ask(admin, "/servers")).json["servers"]
                assert [server["name"] for server in listed] == ["prefill-0", "decode-0", "decode-1"]
                added = await ask(admin, "/servers", {"side": "decode", "url": more.decode[0].url, "name": "late"})
                assert (added.status, added.json["standing"]) == (201, "serving")
                for name in ("decode-0", "decode-1"):
                    assert (await ask(admin, f"/servers/decode/{name}", method="DELETE")).status == 200
                before = [server.counts["requests"] for server in fleet.decode]
                for _ in range(8):
                    assert (await ask(port, PATH, PROMPT)).status == 200
                assert [server.counts["requests"] for server in fleet.decode] == before
                assert more.decode[0].counts["requests"] == 8
                for target, asked, method, status in (
                    ("/servers/decode/nobody", None, "DELETE", 404),
                    ("/servers", {"side": "decode", "url": "ftp://a"}, "POST", 400),
                    ("/servers", {"side": "decode", "url": more.decode[0].url, "name": "late"}, "POST", 400),
                    ("/servers", {"side": "middle", "url": "http://a"}, "POST", 400),
                    ("/servers", {"side": "decode", "uri": "http://a"}, "POST", 400),
                    ("/servers", b"{", "POST", 400),
                    ("/", None, "GET", 404),
                    ("/servers", None, "PUT", 405),
                ):
                    reply = await ask(admin, target, asked, method=method)
                    assert reply.status == status, (target, reply)
                    assert reply.json["error"]["message"]
                killed = children(command.process.pid)[0]
                os.kill(killed, signal.SIGKILL)
                await command.until("worker_died")
                await command.until("worker_started")
                # The new one knows what was changed before it was there.
                for _ in range(8):
                    assert (await ask(port, PATH, PROMPT)).status == 200
                assert [server.counts["requests"] for server in fleet.decode] == before
                assert await command.end(signal.SIGTERM) == Exit.OK

    run(body())


def test_a_worker_that_hangs_is_replaced_and_the_others_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK_S", 0.05), ("HUNG_S", 0.5), ("NUMBERS_S", 0.1), ("AGAIN_S", 0.01)):
        monkeypatch.setattr(workers, name, seconds)

    async def body() -> None:
        made = config.from_table(
            {"port": 0, "workers": 2, "prefill": [{"url": "http://127.0.0.1:1"}], "decode": [{"url": "http://127.0.0.1:1"}]}
        )
        lines: list[bytes] = []
        parent = workers.Parent(made, Log(lines.append, "info"))
        serving = asyncio.ensure_future(parent.serve())
        async with asyncio.timeout(LIMIT_S):
            while b'"listening"' not in b"".join(lines):
                await asyncio.sleep(0.01)
            old = parent._children[0]
            assert old.process is not None
            old.process.send_signal(signal.SIGSTOP)
            assert len(await parent._asked({"op": "metrics"})) == 1
            while b'"worker_started"' not in b"".join(lines):
                await asyncio.sleep(0.01)
            assert b'"worker_hung"' in b"".join(lines)
            assert len(await parent._asked({"op": "metrics"})) == 2
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await serving)[0]

    run(body())


def test_one_worker_ends_in_order_and_a_second_signal_ends_it_at_once() -> None:
    async def body() -> None:
        async with Fleet(1, 1) as fleet, Command.running(fleet, "--log-level", "debug") as command:
            port = (await command.until("listening"))["port"]
            client = await Client.open(port)
            fleet.decode[0].script.add(hanging())
            await client.send(request("POST", PATH, PROMPT))
            while not fleet.decode[0].counts["in_flight"]:
                await asyncio.sleep(0.005)
            command.process.send_signal(signal.SIGTERM)
            await command.until("stopping")
            assert await command.end(signal.SIGTERM) == Exit.FAILED
            assert (await client.reply()).fault
            client.leave()

    run(body())


def test_workers_whose_parent_is_killed_finish_what_was_begun_and_end(tmp_path: Path) -> None:
    """SIGKILL: the parent says nothing. What ends is finished, what hangs is cut off as a failure, and nobody keeps the port."""
    settings = tmp_path / "proxy.toml"
    settings.write_text("[timeouts]\nshutdown_s = 2.0\nrelease_s = 1.0\n")

    async def body() -> None:
        async with Fleet(1, 1, Options(token_s=0.02)) as fleet:
            workers_of: list[int] = []
            async with Command.running(fleet, "--workers", "2", "--config", str(settings)) as command:
                with killed_at_the_end(workers_of):
                    port = (await command.until("listening"))["port"]
                    workers_of += children(command.process.pid)
                    clients = [await Client.open(port) for _ in range(12)]
                    for client in clients:
                        await client.send(request("POST", PATH, STREAM | {"max_tokens": 40}))
                    begun = [await client.reply(until_events=2) for client in clients]
                    stuck = await Client.open(port)
                    await stuck.send(request("POST", PATH, STREAM | {"max_tokens": 2000}))
                    endless = await stuck.reply(until_events=2)
                    command.process.kill()
                    for client, reply in zip(clients, begun, strict=True):
                        assert (await client.reply(reply)).done
                        assert await client.closed()
                        client.leave()
                    endless = await stuck.reply(endless)
                    assert endless.fault
                    assert not endless.done
                    stuck.leave()
                    async with asyncio.timeout(LIMIT_S):
                        while any(alive(pid) for pid in workers_of):
                            await asyncio.sleep(0.02)
                    with pytest.raises(ConnectionRefusedError):
                        await Client.open(port)
                    assert await fleet.settle(sockets=True) == {}

    run(body())


@contextlib.contextmanager
def killed_at_the_end(pids: list[int]) -> Iterator[None]:
    """What the list holds by then."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def hanging() -> Any:
    from expertwire.testing.http.faults import Fault, Rule

    return Rule(Fault(hang=True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --prefill URL and --decode URL, or --config FILE"),
        (("--prefill", "http://a:1"), "give --prefill URL"),
        (("--prefill", "a:1", "--decode", "http://b:1"), "http://HOST:PORT"),
        (("--prefill", "http://a:1", "--decode", "http://b:1", "--port", "70000"), "port is 70000"),
        (("--prefill", "http://a:1", "--decode", "http://b:1", "--workers", "0"), "workers is 0"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--prefill", "http://a:1", "--decode", "http://[::1"), "decode[0].url is 'http://[::1'"),
        (("--prefill", "http://a:1", "--decode", "http://b:1", "--host", "256.1.1.1", "--port", "0"), "no address to listen on"),
    ],
)
def test_settings_that_cannot_be_meant_are_status_2(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", *words]) == Exit.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_admin_port_in_use_is_status_2_and_says_so(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--prefill", "http://a:1", "--decode", "http://b:1", "--port", "0", "--admin-port", str(port), "--workers", workers)
        assert main(["proxy", *words]) == Exit.USAGE
    said = f"admin.port {port} of 127.0.0.1 cannot be listened on: it is in use; give another --admin-port"
    assert said in capsys.readouterr().err


def test_check_says_that_settings_can_be_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text('port = 0\n[[prefill]]\nurl = "http://a:1"\n[[decode]]\nurl = "https://b"\n[timeouts]\nconnect_s = 2\n')
    assert main(["proxy", "--config", str(path), "--check"]) == Exit.OK
    assert "1 prefill and 1 decode" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"])
def test_check_says_all_that_is_taken(workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.pem").write_text("nothing\n")
    (tmp_path / "proxy.toml").write_text(f'[tls]\nca_file = "{tmp_path}/no.pem"\n')  # the servers are flags'
    with socket.socket() as one, socket.create_server(("127.0.0.1", 0)) as other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as workers of another proxy have it
        one.bind(("127.0.0.1", 0))
        one.listen()
        ports = [str(each.getsockname()[1]) for each in (one, other)]
        words = ["--prefill", "http://a:1", "--decode", "https://b:1", "--port", ports[0], "--admin-port", ports[1], "--workers", workers]
        assert main(["proxy", *words, "--config", str(tmp_path / "proxy.toml"), "--check"]) == Exit.USAGE
        said = capsys.readouterr().err
        assert f"port {ports[0]} of 127.0.0.1 cannot be listened on: it is in use; give another --port" in said
        assert f"admin.port {ports[1]} of 127.0.0.1 cannot be listened on: it is in use; give another --admin-port" in said
        assert "no.pem', which has no certificates that can be read" in said
        # And without --check the same, before anything is started.
        assert main(["proxy", *words[:6], "--workers", workers]) == Exit.USAGE
        assert f"port {ports[0]} of 127.0.0.1 cannot be listened on: it is in use" in capsys.readouterr().err


def test_a_channel_carries_calls_both_ways_and_errors_and_ends() -> None:
    from expertwire.errors import DeadlineError, InvalidArgumentError, PeerError

    async def body() -> None:
        async def handle(message: dict[str, Any]) -> Any:
            if message["op"] == "fail":
                raise InvalidArgumentError("no")
            if message["op"] == "wait":
                await asyncio.sleep(10)
            return message["op"] * 2

        one, other = socket.socketpair()
        ends = Channel(handle), Channel(handle)
        for end, sock in zip(ends, (one, other), strict=True):
            await end.open(sock)
        running = [asyncio.ensure_future(end.run()) for end in ends]
        assert await asyncio.gather(ends[0].call({"op": "a"}, 5.0), ends[1].call({"op": "b"}, 5.0)) == ["aa", "bb"]
        with pytest.raises(InvalidArgumentError, match="no"):
            await ends[0].call({"op": "fail"}, 5.0)
        with pytest.raises(DeadlineError):
            await ends[0].call({"op": "wait"}, 0.02)
        waiting = asyncio.ensure_future(ends[0].call({"op": "wait"}, 5.0))
        await asyncio.sleep(0)
        ends[1].close()
        with pytest.raises(PeerError):
            await waiting
        await asyncio.wait(running, timeout=5.0)
        with pytest.raises(PeerError):
            await ends[0].call({"op": "a"}, 5.0)

    run(body())
