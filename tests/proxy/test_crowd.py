"""Many at once: nobody is lost, and nothing outlives its request."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
from collections.abc import Iterator

import pytest

from expertwire.proxy.conversation import Conversation
from expertwire.testing.http.client import Client, ask, request
from expertwire.testing.http.fake_vllm import Fleet, Options
from proxy.edge import PROMPT, STREAM, Edge, run


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Clients, proxies and servers of a test are one process: as many files as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sockets() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    )


async def leave_at(port: int, draw: random.Random) -> None:
    """One request, whose client leaves at some moment between its first byte and its last."""
    client = await Client.open(port)
    raw = request("POST", "/v1/completions", STREAM | {"max_tokens": 50})
    when = draw.randrange(5)
    if when == 0:
        await client.send(raw[: draw.randrange(1, len(raw))])
    else:
        await client.send(raw)
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        if when > 2:
            await client.reply(until_events=when - 2)
    client.leave(reset=draw.random() < 0.5)


async def leave_all(count: int, at_once: int) -> None:
    before, draw = sockets(), random.Random(count)
    async with Edge(Fleet(2, 2, Options(token_s=0.002)), log_level="error") as edge:
        tasks = len(asyncio.all_tasks())
        gate = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with gate:
                await leave_at(edge.port, draw)

        await asyncio.gather(*(one() for _ in range(count)))
        assert await edge.fleet.settle(20.0, sockets=False) == {}
        async with asyncio.timeout(20):
            while edge.left():
                await asyncio.sleep(0.01)
        core = edge.worker.core
        assert core.in_flight == core.open_legs == 0
        assert all(server.in_flight == 0 for side in ("prefill", "decode") for server in core.fleet.servers(side))
        assert core.metrics.value("requests_total", "completions", "gone") > count // 4
        assert edge.fleet.total("wrong_texts") == edge.fleet.total("engine_deaths") == 0
        assert len(asyncio.all_tasks()) <= tasks + len(edge.fleet.servers) * 50  # the fakes' own, of connections that are kept
        assert (await ask(edge.port, "/v1/completions", PROMPT)).status == 200
    await asyncio.sleep(0)
    assert sockets() <= before
    gc.collect()
    assert not [item for item in gc.get_objects() if isinstance(item, Conversation) and not item.over]


def test_a_thousand_clients_that_leave() -> None:
    run(leave_all(1_000, 100))


@pytest.mark.long
def test_ten_thousand_clients_that_leave() -> None:
    run(leave_all(10_000, 500))


async def leave_nothing_to_the_collector() -> None:
    """Over sockets: request, connection and conversation, too, hold each other no longer than the request lasts."""

    def held() -> list[Conversation]:
        return [item for item in gc.get_objects() if isinstance(item, Conversation)]

    async with Edge(log_level="error") as edge:
        gc.collect()
        gc.disable()
        try:
            for path, body in (
                ("/v1/completions", PROMPT),
                ("/v1/completions", STREAM),
                ("/tokenize", PROMPT),
                ("/v1/completions", {"n": 999}),
            ):
                await ask(edge.port, path, body)
            async with asyncio.timeout(20):
                while held():
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


def test_nothing_is_left_to_the_collector() -> None:
    run(leave_nothing_to_the_collector())


class Shared(Fleet):
    """Servers that two proxies stand before: started and ended by none of them."""

    async def __aenter__(self) -> Shared:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


async def two_proxies(count: int) -> None:
    fleet = Shared(2, 2, Options(token_s=0.001))
    for server in fleet.servers:
        await server.start()
    async with Edge(fleet, log_level="error") as one, Edge(fleet, log_level="error") as other:

        async def ask_one(number: int) -> bool:
            body = (STREAM if number % 3 else PROMPT) | {"prompt": f"request number {number}"}
            found = await ask((one, other)[number % 2].port, "/v1/completions", body, deadline_s=120)
            return found.status == 200 and found.whole and "WRONG" not in str(found.texts())

        assert all(await asyncio.gather(*(ask_one(number) for number in range(count))))
        assert fleet.total("pull_right") == count
        assert fleet.blocks().total() == count
    for server in fleet.servers:
        await server.close()


def test_two_proxies_before_the_same_servers_lose_none() -> None:
    run(two_proxies(256))


@pytest.mark.long
def test_two_proxies_and_two_times_2048_requests() -> None:
    run(two_proxies(4096))
