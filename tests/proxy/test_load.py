"""The load generator sees what is wrong with an answer, and the mock counts what it was sent: what `bench proxy` and soaks rest on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from expertwire.testing.http import faults
from expertwire.testing.http.fake_vllm import Fleet
from expertwire.testing.http.faults import After, Cut, Fault, Framing, Rule
from expertwire.testing.http.load import Generator, Load, Outcome
from expertwire.testing.http.mock import Counts, Mock


@contextmanager
def mocked(tokens: int) -> Iterator[tuple[Mock, list[Counts]]]:
    mock, counts = Mock(tokens, 0.001), list[Counts]()
    read, write = os.pipe()
    thread = threading.Thread(target=lambda: counts.append(mock.run(read)))
    thread.start()
    try:
        yield mock, counts
    finally:
        os.close(write)
        thread.join()
        os.close(read)


def test_every_request_is_answered_and_counted_once() -> None:
    with mocked(5) as (mock, counts):
        port = mock.ports["decode"]
        whole = Generator(Load((port,), concurrency=8, requests=100)).run()
        streams = Generator(Load((port,), concurrency=8, requests=24, stream=True, tokens=5, slow=2)).run()
        left = Generator(Load((port,), concurrency=4, requests=10, stream=True, tokens=5, abort_after=2)).run()
        timed = Generator(Load((port,), concurrency=2, seconds=0.1, warmup_s=0.05, ramp_s=0.02, watch=(os.getpid(),))).run()
    assert (whole.done, whole.failed, whole.tokens, len(whole.ttft_ms)) == (100, 0, 100, 100)
    assert (streams.done, streams.failed, streams.tokens) == (24, 0, 120)
    assert streams.lag_ms
    assert all(0 <= lag < 60_000 for lag in streams.lag_ms)
    assert (left.done, left.aborted) == (0, 10)
    assert timed.done > 0
    assert timed.seconds >= 0.1
    assert timed.watched_cpu_s[0] > 0
    assert counts[0].odd == 0
    assert counts[0].decodes >= 100 + 24 + 10 + timed.done
    assert counts[0].closed <= 10  # where this machine stood still meanwhile, all was sent


def test_parameters_of_a_prefill_count_once() -> None:
    with mocked(1) as (mock, counts):
        params = '"kv_transfer_params": {"remote_request_id": "cmpl-mock-7"}'
        for prompt in ("x", "y"):
            load = Load((mock.ports["decode"],), concurrency=1, requests=1)
            generator = Generator(load)
            body = b'{"prompt": "%s", %s}' % (prompt.encode(), params.encode())
            generator._request = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            assert generator.run().done == 1
        asked = Generator(Load((mock.ports["prefill"],), concurrency=1, requests=3)).run()
    assert asked.done == 3
    assert (counts[0].prefills, counts[0].decodes, counts[0].with_params, counts[0].repeated) == (3, 2, 1, 1)


BROKEN = {
    "status 502": faults.html(502),
    "closed before an answer": Fault(cut=Cut.BEFORE_HEAD),
    "closed in the midst": Fault(cut=Cut.AFTER_EVENTS, events=2),
    "ECONNRESET": Fault(cut=Cut.AFTER_EVENTS, events=2, reset=True),
    "no status line": Fault(raw=b"HTTP/2 200\r\n\r\n"),
    "a chunk without a size": Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "neither a length nor chunks": Fault(framing=Framing.CLOSE),
    "an error event": Fault(error_after=1),
    "1 events": Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n18\r\ndata: {}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"),
    "not streamed": Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"),
}
FINE = [Fault(chunk_bytes=1), Fault(segment_bytes=5), Fault(chunk_bytes=3, segment_bytes=4), Fault(after=After.KEEP)]


def test_what_is_wrong_with_an_answer_is_seen() -> None:
    async def body() -> dict[str, Outcome]:
        found = {}
        async with Fleet() as fleet:
            server = fleet.decode[0]
            load = Load((server.port,), concurrency=1, requests=1, stream=True, tokens=2, model="fake/model", prompt="a b")
            for why, fault in BROKEN.items():
                server.script.add(Rule(fault))
                found[why] = await asyncio.to_thread(Generator(load).run)
            for fault in FINE:
                server.script.add(Rule(fault))
                found[str(fault)] = await asyncio.to_thread(Generator(load).run)
            await server.refuse()
            found["ECONNREFUSED"] = await asyncio.to_thread(Generator(load).run)
            found["many"] = await asyncio.to_thread(Generator(replace(load, requests=20, concurrency=4)).run)
        return found

    found = asyncio.run(body())
    assert found.pop("many").failed == 20
    for fault in FINE:
        fine = found.pop(str(fault))
        assert (fine.done, fine.tokens, fine.why) == (1, 2, {}), fault
    assert {why: (outcome.failed, outcome.why) for why, outcome in found.items()} == {why: (1, {why: 1}) for why in found}


@pytest.mark.parametrize("ports", [1, 3])
def test_connections_take_servers_in_turn(ports: int) -> None:
    async def body() -> list[int]:
        async with Fleet(prefill=0, decode=ports) as fleet:
            load = Load(tuple(server.port for server in fleet.decode), concurrency=6, requests=6, model="fake/model", prompt="a", tokens=1)
            outcome = await asyncio.to_thread(Generator(load).run)
            assert (outcome.done, outcome.why) == (6, {})
            return [server.counts["requests"] for server in fleet.decode]

    assert asyncio.run(body()) == [6 // ports] * ports
