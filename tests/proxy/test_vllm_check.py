"""The check of real vLLM, tried on fake servers: what it looks at is seen to be wrong where it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_check import asking, model, scan
from vllm_check.relay import Relay

from expertwire.testing.http import faults
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.fake_vllm import Fleet, Options
from expertwire.testing.http.faults import Cut, Fault, Rule
from proxy.edge import Edge, run

BODY = {"model": MODEL, "prompt": "one two three", "max_tokens": 6}


def test_answers_are_compared() -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(token_s=0.001))) as edge:
            truth = await asyncio.to_thread(asking.ask, int(edge.p.url.rpartition(":")[2]), BODY)
            assert truth.status == 200
            for stream in (False, True):
                options = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
                assert (await asyncio.to_thread(asking.ask, edge.port, BODY | options)).same_as(truth)
            other = await asyncio.to_thread(asking.ask, edge.port, BODY | {"prompt": "one two four"})
            assert other.status == 200
            assert not other.same_as(truth)
            edge.d.script.add(Rule(faults.status(503)))
            edge.d.script.add(Rule(Fault(cut=Cut.AFTER_EVENTS, events=3)))
            refused = await asyncio.to_thread(asking.ask, edge.port, BODY)
            assert (refused.status, refused.ended, refused.same_as(truth)) == (503, True, False)
            broken = await asyncio.to_thread(asking.ask, edge.port, BODY | {"stream": True})
            assert (broken.status, broken.ended) == (200, False)
            assert broken.error is not None
            await asyncio.sleep(0)
            edge.fleet.world._blocks.clear()

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_the_relay_makes_as_many_failures_as_it_says(stream: bool) -> None:
    async def body() -> None:
        async with Fleet(0, 1, Options(token_s=0.001)) as fleet:
            server = int(fleet.decode[0].url.rpartition(":")[2])
            with Relay("d", server, faults=4, skip=3, every=2) as relay:
                replies = [await asyncio.to_thread(asking.ask, relay.port, BODY | {"stream": stream}) for _ in range(16)]
                assert await asyncio.to_thread(asking.get, relay.port, "/health") == (200, "")
            assert relay.failed == {"status": 2, "cut": 2}
            good = [reply.status == 200 and reply.ended for reply in replies]
            assert [number for number, each in enumerate(good) if not each] == [4, 6, 8, 10]
            assert {(reply.status, reply.ended) for reply in replies} == {(200, True), (500, True), (200, False)}
            assert all(reply.events > 1 for reply in replies if stream and reply.ended and reply.status == 200)

    run(body())


def test_numbers_are_read_from_prometheus_text() -> None:
    lines = ["# TYPE a counter", 'a{engine="0",source="x"} 3.0', 'a{engine="1",source="x"} 4', 'a{engine="0",source="y"} 5', "b 7"]
    text = "\n".join([*lines, 'a_created{engine="0"} 1e9', ""])
    assert asking.metric(text, "a") == 12
    assert asking.metric(text, "a", source="x") == 7
    assert asking.metric(text, "a", source="x", engine="1") == 4
    assert asking.metric(text, "b") == 7
    assert asking.metric(text, "none") == 0


SIGNS = [
    "Traceback (most recent call last):",
    "(EngineCore pid=1) ERROR 11-30 15:45:13 [core.py:1] EngineCore encountered a fatal error.",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "torch.OutOfMemoryError: out of memory",
    "TimeoutError: RPC call to sample_tokens timed out.",
    "Worker proc VllmWorker-0 died unexpectedly, shutting down executor.",
    "Segmentation fault (core dumped)",
    "terminate called after throwing an instance of 'std::runtime_error'",
    "ERROR 11-30 15:45:13 [core.py:1] request failed, timeout=5",
    '{"time":"2026-11-30T15:28:48","level":"error","event":"internal_error"}',
]
NO_SIGNS = [
    "INFO 11-30 15:21:09 [api.py:1] args: {'timeout': 5, 'shutdown_timeout': 0}",
    "INFO 11-30 15:21:09 [api.py:1] --request-timeout 5, VLLM_RPC_TIMEOUT: 10000",
    'INFO:     127.0.0.1:54364 - "GET /metrics HTTP/1.1" 200 OK',
    '{"level":"info","event":"request","status":200,"outcome":"done"}',
]


def test_signs_of_errors_are_found_in_logs(tmp_path: Path) -> None:
    assert scan.signs(SIGNS) == SIGNS
    assert scan.signs(NO_SIGNS) == []
    log = tmp_path / "server.log"
    log.write_text(SIGNS[0] + "\n")
    before = scan.ends([log, tmp_path / "none.log"])
    with log.open("a") as file:
        file.write(f"{NO_SIGNS[0]}\n{SIGNS[1]}\n")
    assert scan.of_logs([log], before) == [f"server.log: {SIGNS[1]}"]
    assert len(scan.of_logs([log])) == 2


def test_prompts_differ_and_stay() -> None:
    texts = {model.text(str(number)) for number in range(100)}
    assert len(texts) == 100
    assert model.text("1") in texts
    assert len(model.text("1").split()) == 120


@pytest.mark.parametrize("arguments", [["--parts", "nosuch"], ["--kv", "nosuch"]])
def test_what_cannot_be_meant_is_refused(arguments: list[str], tmp_path: Path) -> None:
    tools = Path(__file__).parents[2] / "tools"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tools), *sys.path])}
    command = [sys.executable, "-m", "vllm_check", *arguments]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "nosuch" in done.stderr


def test_the_script_is_one() -> None:
    script = Path(__file__).parents[2] / "scripts" / "vllm_check"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
