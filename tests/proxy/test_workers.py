"""`expertwire proxy` as a process of several workers: one port, one end, numbers of all, servers added and removed, a worker that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from expertwire.cli.main import main
from expertwire.cli.report import Exit
from expertwire.proxy import config, workers
from expertwire.proxy.channel import Channel
from expertwire.proxy.log import Log
from expertwire.testing.http.client import Client, ask, request
from expertwire.testing.http.fake_vllm import Fleet
from proxy.edge import PROMPT, STREAM, run

PATH = "/v1/completions"
LIMIT_S = 60.0


class Command:
    """The command, its log read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    @classmethod
    async def start(cls, fleet: Fleet, *words: str) -> Command:
        servers = ["--prefill", *(server.url for server in fleet.prefill), "--decode", *(server.url for server in fleet.decode)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "expertwire.cli", "proxy", *servers, "--port", "0", *words]
        return cls(await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment))

    async def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """The count-th line of that event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = [line for line in self.lines if line["event"] == event]
                if len(found) >= count:
                    return found[count - 1]
                line = await self.process.stderr.readline()
                assert line.startswith(b"{"), (line, self.lines)
                self.lines.append(orjson.loads(line))

    async def end(self, number: int) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            assert self.process.stderr is not None
            for line in (await self.process.stderr.read()).splitlines():
                self.lines.append(orjson.loads(line))
            return await self.process.wait()


def counted(text: bytes, name: str) -> int:
    return sum(int(line.rpartition(b" ")[2]) for line in text.splitlines() if line.startswith(name.encode()))


def test_two_workers_are_one_proxy(tmp_path: Path) -> None:
    async def body() -> None:
        async with Fleet(1, 2) as fleet:
            command = await Command.start(fleet, "--workers", "2", "--admin-port", "0", "--json", str(tmp_path / "a.json"))
            try:
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
            finally:
                if command.process.returncode is None:
                    command.process.kill()
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
            command = await Command.start(fleet, "--workers", "2", "--admin-port", str(await free_port()))
            try:
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
                killed = (await children(command.process.pid))[0]
                os.kill(killed, signal.SIGKILL)
                await command.until("worker_died")
                await command.until("worker_started")
                # The new one knows what was changed before it was there.
                for _ in range(8):
                    assert (await ask(port, PATH, PROMPT)).status == 200
                assert [server.counts["requests"] for server in fleet.decode] == before
                assert await command.end(signal.SIGTERM) == Exit.OK
            finally:
                if command.process.returncode is None:
                    command.process.kill()

    run(body())


async def free_port() -> int:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    return port


async def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
        async with Fleet(1, 1) as fleet:
            command = await Command.start(fleet, "--log-level", "debug")
            try:
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
            finally:
                if command.process.returncode is None:
                    command.process.kill()

    run(body())


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
    path.write_text('[[prefill]]\nurl = "http://a:1"\n[[decode]]\nurl = "https://b"\n[timeouts]\nconnect_s = 2\n')
    assert main(["proxy", "--config", str(path), "--check"]) == Exit.OK
    assert "1 prefill and 1 decode" in capsys.readouterr().out


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
