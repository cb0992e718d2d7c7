"""Driven by a client that is not ours: OpenAI's own. Where it is not installed this is skipped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from expertwire.testing.http import faults
from expertwire.testing.http.answers import MODEL
from expertwire.testing.http.fake_vllm import Fleet, Options
from expertwire.testing.http.faults import Cut, Fault, Rule
from proxy.edge import Edge, run

openai = pytest.importorskip("openai")


def client_of(edge: Edge) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="secret", max_retries=0)


MESSAGES = [{"role": "user", "content": "one two three"}]


def test_it_gets_what_one_server_says() -> None:
    async def body() -> None:
        async with Edge(Fleet(2, 2)) as edge, client_of(edge) as client:
            direct = openai.AsyncOpenAI(base_url=f"{edge.d.url}/v1", api_key="secret")
            assert [model.id async for model in client.models.list()] == [MODEL]
            whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, n=2)
            truth = await direct.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, n=2)
            assert [choice.message.content for choice in whole.choices] == [choice.message.content for choice in truth.choices]
            assert whole.usage.completion_tokens == truth.usage.completion_tokens
            text = ""
            async for chunk in await client.completions.create(model=MODEL, prompt="one two", max_tokens=4, stream=True):
                text += chunk.choices[0].text
            known = await direct.completions.create(model=MODEL, prompt="one two", max_tokens=4)
            assert text == known.choices[0].text
            made = await client.responses.create(model=MODEL, input="a b", max_output_tokens=3)
            assert (await client.responses.retrieve(made.id)).output_text == made.output_text
            await direct.close()
            for server in edge.fleet.servers:
                assert all(seen.head.get("authorization") == "Bearer secret" for seen in server.seen)

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_it_counts_every_failure_and_no_other(stream: bool) -> None:
    async def body() -> None:
        async with Edge(Fleet(1, 1, Options(token_s=0.002))) as edge, client_of(edge) as client:
            broken = Fault(cut=Cut.AFTER_EVENTS, events=3)
            for skip, fault in (
                (2, faults.status(400)),
                (3, faults.html(503)),
                (4, broken),
                (5, Fault(cut=Cut.IN_HEAD)),
            ):
                edge.d.script.add(Rule(fault, skip=skip))
            failed = 0
            for _ in range(20):
                try:
                    reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=stream)
                    if stream:
                        async for _ in reply:
                            pass
                except openai.APIError:
                    failed += 1
            assert failed == 4
            await asyncio.sleep(0)
            edge.fleet.world._blocks.clear()

    run(body())
