"""Fake vLLM servers, prefill and decode, over real sockets: what the contract says of real ones, without a model.

    async with Fleet(prefill=2, decode=2) as fleet:
        fleet.decode[0].script.add(Rule(Fault(cut=Cut.AFTER_EVENTS, events=3)))
        ...                                  # a proxy between fleet.prefill[k].url and fleet.decode[k].url
        assert fleet.left() == {}            # no socket, request or block is left

A decode server that pulls what is no longer held, or was held for another prompt, answers 200 with a text of "WRONG"s; parameters that end
a real engine end this one (`counts["engine_deaths"]`). Servers of one fleet know each other's blocks; all run on one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from expertwire.testing.http import answers
from expertwire.testing.http.answers import Api, Refusal
from expertwire.testing.http.blocks import Pull, State, World
from expertwire.testing.http.connection import Connection, Exchange
from expertwire.testing.http.faults import DROP, Fault, Script
from expertwire.testing.http.wire import Head

SIDE_CHANNEL_S = 5.0  # until a decode server gives up on a prefill server's side channel; twice that where it streams
APIS = {api.value: api for api in Api}


@dataclass(frozen=True)
class Options:
    """What the servers of a fleet are like. Times are real seconds."""

    lease_s: float = 30.0  # vLLM's default
    token_s: float = 0.0  # between two tokens
    queue_s: float = 0.0  # before a request is scheduled
    keepalive_s: float = 5.0  # uvicorn's, after which an idle connection is closed
    side_channel_s: float = SIDE_CHANNEL_S
    cached_tokens: int = 0  # as prefill servers count them
    clock: Callable[[], float] = time.time  # of leases alone


@dataclass
class Seen:
    """One request as it came."""

    head: Head
    body: bytes = b""
    outcome: str = "in flight"  # then: answered, refused, cut, aborted (its client left), killed

    @property
    def json(self) -> Any:
        """The body's object."""
        return json.loads(self.body)

    @property
    def params(self) -> dict[str, Any] | None:
        """The kv_transfer_params that it carried."""
        found = self.json.get("kv_transfer_params")
        return found if isinstance(found, dict) else None


@dataclass
class Story:
    """What a server makes of one request as far as it has come: needed where it is aborted."""

    params: dict[str, Any] | None = None
    pulled: bool = False
    wrong: frozenset[int] = field(default_factory=frozenset)


class FakeServer:
    """One server. `role` is "prefill" or "decode" and only names it: as with vLLM, the request says what it is to do."""

    def __init__(self, role: str, number: int, world: World, options: Options) -> None:
        self.name = f"{role}-{number}"
        self.engine = str(uuid.uuid4())
        self.world, self.options = world, options
        self.script = Script()
        self.counts: Counter[str] = Counter()
        self.seen: deque[Seen] = deque(maxlen=100_000)
        self.made: dict[str, dict[str, Any]] = {}  # answers of the Responses API, by id
        self.connections: set[Connection] = set()
        self.malformed: list[str] = []  # what was wrong with requests that broke RFC 9112
        self.close_on_accept = 0  # so many connections are closed as soon as they come
        self.alive = True
        self.port = 0
        self._server: asyncio.Server | None = None

    # ---- the socket

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the port that it had before, if any."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port, backlog=4096, reuse_address=True)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Listen no more: whoever connects is refused. Connections that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)

    async def kill(self, last: Connection | None = None) -> None:
        """End as a killed process does: its connections (but for the `last`) are reset, its blocks are out of reach."""
        self.alive = False
        self.world.dead.add(self.engine)
        await self.refuse()
        for connection in self.connections - {last}:
            connection.drop(reset=True)

    async def close(self) -> None:
        """End everything, and wait for it."""
        await self.refuse()
        for connection in list(self.connections):
            connection.transport.abort()
        while self.connections:
            await asyncio.sleep(0.001)

    # ---- requests

    async def answer(self, exchange: Exchange, head: Head, body: bytes) -> None:
        """Answer one request; cancelled where its connection is lost."""
        seen = Seen(head, body)
        self.seen.append(seen)
        self.counts["requests"] += 1
        self.counts["in_flight"] += 1
        story = Story()
        exchange.fault = fault = self.script.of(head)
        try:
            await exchange.before_head()
            if fault.status:
                await exchange.canned(fault)
            elif not fault.raw:
                await self._route(exchange, head, body, story)
            seen.outcome = "cut" if exchange.was_cut else "refused" if exchange.status >= 400 else "answered"
        except asyncio.CancelledError:
            seen.outcome = "cut" if exchange.was_cut else "aborted" if self.alive else "killed"
            if story.params is None and head.method == "POST":  # it was waiting, as a request does that is not scheduled yet
                with contextlib.suppress(ValueError, AttributeError):
                    story.params = json.loads(body).get("kv_transfer_params")
            self._abandon(story)
            raise
        finally:
            self.counts["in_flight"] -= 1
            self.counts[seen.outcome] += 1
        if fault.dies:
            exchange.stays = False
            await self.kill(exchange.connection)

    async def _route(self, exchange: Exchange, head: Head, body: bytes, story: Story) -> None:
        path = head.target.partition("?")[0]
        if head.method == "POST" and path in APIS:
            await self._generate(exchange, APIS[path], head, body, story)
            return
        status, found = self._other(head.method, path, body)
        exchange.head_only = head.method == "HEAD"
        await exchange.json(status, found)

    def _other(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Every endpoint that generates nothing."""
        get, post = method in ("GET", "HEAD"), method == "POST"
        if path in ("/health", "/ping"):
            return (200 if self.alive else 503), None
        if path == "/version" and get:
            return 200, {"version": "0.32.0"}
        if path == "/v1/models" and get:
            return 200, {"object": "list", "data": [{"id": answers.MODEL, "object": "model", "owned_by": "vllm", "served_by": self.name}]}
        if path.startswith("/v1/responses/"):
            found = self.made.get(path.split("/")[3])
            missing = Refusal(404, f"Response with id '{path.split('/')[3]}' not found.").body()
            return (404, missing) if found is None else (200, found | ({"status": "cancelled"} if path.endswith("/cancel") else {}))
        if path in ("/tokenize", "/v1/embeddings", "/echo") and post:
            return self._of_text(path, body)
        known = path in {"/version", "/v1/models", "/tokenize", "/v1/embeddings", *APIS}
        return (405, {"detail": "Method Not Allowed"}) if known else (404, {"detail": "Not Found"})

    def _of_text(self, path: str, body: bytes) -> tuple[int, Any]:
        try:
            asked = json.loads(body)
        except ValueError:
            return 400, Refusal(400, "the body is no JSON").body()
        if path == "/echo":
            return 200, asked
        text = str(asked.get("prompt", asked.get("input", answers.text_of_chat(asked["messages"]) if "messages" in asked else "")))
        tokens = list(answers.tokens_of(text))
        if path == "/tokenize":
            return 200, {"count": len(tokens), "max_model_len": answers.MODEL_LENGTH, "tokens": tokens}
        vector = [float(token % 97) / 97 for token in tokens[:4]]
        return 200, {"object": "list", "model": answers.MODEL, "data": [{"index": 0, "object": "embedding", "embedding": vector}]}

    async def _generate(self, exchange: Exchange, api: Api, head: Head, body: bytes, story: Story) -> None:
        request_id = head.get("x-request-id") or uuid.uuid4().hex
        try:
            asked = json.loads(body)
            if isinstance(asked, dict):
                story.params = asked.get("kv_transfer_params") or None
            job = answers.understand(api, asked, request_id)
        except ValueError:
            await exchange.json(400, Refusal(400, "the body is no JSON").body())
            return
        except Refusal as refusal:
            if refusal.status == 404:  # what the engine never saw was seen by its connector: it gives the blocks back
                self._abandon(story)
            await exchange.json(refusal.status, refusal.body())
            return
        if self.options.queue_s:
            await asyncio.sleep(self.options.queue_s)
        if job.pulls:
            refused = await self._pull(exchange, job, story)
            if refused:
                return
        elif not job.prefills:
            self.counts["computed_alone"] += 1
        choices = answers.choices_of(job, story.wrong, exchange.fault.stops)
        self.counts["tokens"] += sum(len(choice.pieces) for choice in choices)
        if job.stream:
            await self._stream(exchange, job, choices)
        else:
            if self.options.token_s:
                await asyncio.sleep(self.options.token_s * job.max_tokens)
            await exchange.json(200, self._whole(exchange.fault, job, choices, request_id))

    def _whole(self, fault: Fault, job: answers.Job, choices: list[answers.Choice], request_id: str) -> dict[str, Any]:
        params = None
        if job.prefills and all(choice.finish == "length" for choice in choices):
            self.counts["prefilled"] += 1
            if job.max_tokens > 1 or job.count > 1 or len(job.prompts) > 1:
                self.counts["prefilled_too_much"] += 1
            params = self._hold(f"{job.ident}-0-{request_id[-4:]}{len(self.seen)}", job.prompts[0])
            params = None if fault.params is None else {k: v for k, v in (params | fault.params).items() if v is not DROP}
        found = answers.whole(job, choices, self._cached(job), params)
        if job.api is Api.RESPONSES:
            self.made[job.ident] = found
        return found

    def _cached(self, job: answers.Job) -> int:
        return len(job.prompts[0]) - 1 if job.pulls else self.options.cached_tokens

    def _hold(self, request: str, tokens: tuple[int, ...]) -> dict[str, Any]:
        blocks = self.world.hold(self.engine, request, tokens, self.options.clock(), self.options.lease_s)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [blocks.numbers], "remote_engine_id": self.engine,
            "remote_request_id": request, "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": len(tokens), "remote_blocks_expiry_time": blocks.until, "transfer_mode": "read",
            "of_a_later_version": {"opaque": ["é", 1, None]},
        }  # fmt: skip

    async def _pull(self, exchange: Exchange, job: answers.Job, story: Story) -> bool:
        """Fetch what the parameters name; True where the request has been answered with an error."""
        assert story.params is not None
        outcome = self.world.pull(story.params, job.prompts[0], self.options.clock())
        story.pulled = True
        self.counts[f"pull_{outcome.replace(' ', '_')}"] += 1
        if job.recomputes:
            self.counts["recomputed"] += 1
        if outcome is Pull.ENGINE_DIES:
            self.counts["engine_deaths"] += 1
            self.alive = False
        if outcome in (Pull.RIGHT, Pull.WRONG):
            every = range(len(job.prompts) * job.count)
            story.wrong = frozenset(every if outcome is Pull.WRONG else every[1:])  # one set of blocks serves one text
            self.counts["wrong_texts"] += len(story.wrong)
            return False
        if outcome is Pull.UNREACHABLE:
            await asyncio.sleep(self.options.side_channel_s * (2 if job.stream else 1))
        if not job.stream:
            await exchange.json(500, Refusal(500, "EngineCore encountered an issue.").body())
            return True
        choices = answers.choices_of(job)
        await exchange.begin_stream()
        for chunk in answers.first_chunks(job, choices):
            await exchange.event(chunk)
        await exchange.event(Refusal(500, "EngineCore encountered an issue.").body())
        await exchange.end_stream()
        return True

    async def _stream(self, exchange: Exchange, job: answers.Job, choices: list[answers.Choice]) -> None:
        await exchange.begin_stream()
        cached = self._cached(job)
        if job.api is Api.RESPONSES:
            self.made[job.ident] = answers.whole(job, choices, cached, None)
            for name, data in answers.response_events(job, choices[0], cached):
                await self._pace()
                await exchange.event(data, name)
            await exchange.end_stream(done=False)
            return
        for chunk in answers.first_chunks(job, choices):
            await exchange.event(chunk)
        for k in range(max(1, *(len(choice.pieces) for choice in choices))):
            await self._pace()
            for choice in choices:
                await exchange.event(answers.token_chunk(job, choice, k))
        if last := answers.last_chunk(job, choices, cached):
            await exchange.event(last)
        await exchange.end_stream()

    async def _pace(self) -> None:
        if self.options.token_s:
            await asyncio.sleep(self.options.token_s)

    def _abandon(self, story: Story) -> None:
        """A request that ends before it pulled: its blocks are given back."""
        if story.params and story.params.get("do_remote_prefill") and not story.pulled:
            if self.world.release(story.params, self.options.clock()):
                self.counts["released"] += 1


class Fleet:
    """Prefill and decode servers that know each other's blocks."""

    def __init__(self, prefill: int = 1, decode: int = 1, options: Options | None = None) -> None:
        self.options = options or Options()
        self.world = World()
        self.prefill = [FakeServer("prefill", k, self.world, self.options) for k in range(prefill)]
        self.decode = [FakeServer("decode", k, self.world, self.options) for k in range(decode)]

    @property
    def servers(self) -> list[FakeServer]:
        """All of them."""
        return [*self.prefill, *self.decode]

    async def __aenter__(self) -> Self:
        for server in self.servers:
            await server.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for server in self.servers:
            await server.close()

    def blocks(self) -> Counter[State]:
        """How many requests' blocks are held, pulled, released and expired."""
        return self.world.count(self.options.clock())

    def total(self, what: str, side: str = "") -> int:
        """That count over all servers, or those of one side."""
        return sum(server.counts[what] for server in self.servers if server.name.startswith(side))

    def left(self, *, sockets: bool = True) -> dict[str, int]:
        """What is not over: requests in flight, blocks held, sockets open (those of an idle pool count too). Empty if nothing is."""
        found = {"in_flight": self.total("in_flight"), "blocks_held": self.blocks()[State.HELD]}
        if sockets:
            found["sockets"] = sum(len(server.connections) for server in self.servers)
        return {name: value for name, value in found.items() if value}

    async def settle(self, deadline_s: float = 5.0, *, sockets: bool = False) -> dict[str, int]:
        """Wait until nothing is left, or the deadline has passed; what is left then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self.left(sockets=sockets):
                    await asyncio.sleep(0.005)
        return self.left(sockets=sockets)
