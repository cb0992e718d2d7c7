"""What must hold of real servers behind the proxy. Each check takes a stage and gives findings; what it breaks it mends."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm_check import model
from vllm_check.asking import Open, Reply, ask, get, metric
from vllm_check.servers import LEASE_S, Proxy, Server, Stage, running, wait_until

CONCURRENCY = 8
TOKENS = 24
REFUSED = (500, 502, 503, 504)  # what a client may be told when a server has died
SHORT_LEASE_S = 8
SOURCES = "vllm:prompt_tokens_by_source_total"


class MissingError(Exception):
    """What a part needs is not here; the message says what."""


@dataclass(frozen=True)
class Finding:
    """One figure, and whether it is as it must be; `why` where it is not."""

    name: str
    value: float
    good: bool
    unit: str = ""
    why: str = ""


def body_of(topic: str, *, chat: bool = False, stream: bool = False, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """A request with a prompt of its own, its tokens chosen greedily unless `more` says otherwise."""
    words = model.text(topic)
    what: dict[str, Any] = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    streaming: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    common = {"model": model.NAME, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    return {**what, **common, **streaming, **more}


def all_asked(port: int, bodies: Sequence[dict[str, Any]], concurrency: int = CONCURRENCY) -> list[Reply]:
    """Their answers, in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: ask(port, body), bodies))


def different(stage: Stage, bodies: Sequence[dict[str, Any]], concurrency: int = CONCURRENCY) -> tuple[int, str]:
    """How many of those are not answered as the single server answers them, and the first of them."""
    replies = all_asked(stage.proxy.port, bodies, concurrency)
    truths = all_asked(stage.single.port, [{**body, "stream": False, "stream_options": None} for body in bodies], concurrency)
    wrong = [
        f"{json.dumps(body)[:100]}…: {reply.status} {list(reply.choices.values())[:2]} {reply.error or ''}, "
        f"alone {list(truth.choices.values())[:2]}"
        for body, reply, truth in zip(bodies, replies, truths, strict=True)
        if not reply.same_as(truth)
    ]
    return len(wrong), "; ".join(wrong[:1])


def tokens(stage: Stage) -> list[Finding]:
    """64 requests: completions and chats, streamed and not, each a quarter."""
    kinds = [(chat, stream) for chat in (False, True) for stream in (False, True)]
    bodies = [body_of(f"{stage.kv} tokens {number}", chat=chat, stream=stream) for number in range(16) for chat, stream in kinds]
    before = external(stage)
    wrong, why = different(stage, bodies)
    pulled = external(stage) - before
    return [
        Finding("requests_other_than_single_server", wrong, wrong == 0, f"of {len(bodies)}", why),
        Finding("tokens_of_prompts_pulled", pulled, pulled > 64 * 100, "tokens", "too few are counted as external_kv_transfer"),
    ]


def external(stage: Stage) -> float:
    """Tokens of prompts that decode servers had from prefill servers, by their own metric."""
    return sum(server.metric(SOURCES, source="external_kv_transfer") for server in stage.decode)


def choices(stage: Stage) -> list[Finding]:
    """Several prompts in a body, and several choices of one, greedy and by chance."""
    prompts = [model.text(f"{stage.kv} batch {number}") for number in range(4)]
    more_of: tuple[dict[str, Any], ...] = ({}, {"n": 2, "temperature": 1.0, "seed": 7})
    bodies = [body_of("", prompt=prompts, stream=stream, **more) for stream in (False, True) for more in more_of]
    bodies += [body_of(f"{stage.kv} choices", chat=chat, n=3, temperature=1.0, seed=11, stream=chat) for chat in (False, True)]
    wrong, why = different(stage, bodies, concurrency=2)
    return [Finding("batches_other_than_single_server", wrong, wrong == 0, f"of {len(bodies)}", why)]


def client_leaves(stage: Stage) -> list[Finding]:
    """A client closes its connection in the midst of a stream: both servers stop and free what they hold."""
    opened = Open(stage.proxy.port, body_of(f"{stage.kv} leaves", stream=True, tokens=1500, ignore_eos=True))
    for _, _ in zip(range(3), opened.events(), strict=False):
        pass
    running_then = stage.decode[0].busy()
    opened.close()
    took = stage.settled()
    return [Finding("idle_after_client_left", took, running_then >= 1, "s", "the request had ended before its client left")]


def held_by_hand(stage: Stage, seed: str) -> tuple[dict[str, Any], float]:
    """A prefill leg as a proxy sends it: the parameters, and when they came. Its blocks are held from then on."""
    params = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    body = {**body_of(seed, tokens=1), "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **params}}
    reply = ask(stage.prefill[0].port, body)
    return json.loads(reply.body)["kv_transfer_params"], time.monotonic()


def early_release(stage: Stage) -> list[Finding]:
    """What the proxy does with blocks that nobody comes for: a request that D refuses, with their parameters, frees them at once."""
    params, _ = held_by_hand(stage, f"{stage.kv} release {time.time()}")
    held = stage.prefill[0].metric("vllm:kv_cache_usage_perc")
    reply = ask(stage.decode[0].port, {**body_of("release"), "model": "no-such-model", "kv_transfer_params": params})
    took = wait_until("blocks are to be freed early", lambda: stage.prefill[0].busy() == 0, LEASE_S)
    good = held > 0 and reply.status == 404 and took < LEASE_S / 4
    return [Finding("freed_early_after", took, good, "s", f"held {held} before, refused with {reply.status}")]


def lease(stage: Stage) -> list[Finding]:
    """P has a short lease: blocks that nobody comes for are freed after it, and the proxy uses no parameters that are older."""
    p, d = stage.prefill[0], stage.decode[0]
    expired = p.metric("vllm:nixl_num_kv_expired_reqs_total")
    _, since = held_by_hand(stage, f"{stage.kv} expiry {time.time()}")
    held = p.metric("vllm:kv_cache_usage_perc")
    wait_until("an expired lease is to free its blocks", lambda: p.busy() == 0, p.lease_s + 30)
    after = time.monotonic() - since
    expiries = p.metric("vllm:nixl_num_kv_expired_reqs_total") - expired
    # Parameters may be used for half a second; D has one connection, which a long stream holds for longer.
    narrow = Proxy(
        stage.place, f"{stage.kv}_lease_proxy", stage.prefill, stage.decode,
        kv=f"lease_s = {p.lease_s}\nmargin_s = {p.lease_s - 0.5}", limits="pool_per_server = 1",
        timeouts="connect_s = 60\nrelease_s = 30", retries="reprefills = 8",
    )  # fmt: skip
    with running([narrow]):
        long = Open(narrow.port, body_of(f"{stage.kv} long", stream=True, tokens=1200, ignore_eos=True))
        next(long.events())
        late = body_of(f"{stage.kv} late")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, narrow.port, late)
            wait_until("P is to have computed it", lambda: p.metric("vllm:kv_cache_usage_perc") > 0, 60)
            time.sleep(2)  # four times as long as its parameters may be used
            long.close()
            reply = asked.result()
        truth = ask(stage.single.port, late)
        seen = narrow.metric("expertwire_proxy_expiries_total")
        told = json.dumps(reply.error) if reply.error else ""
        good = reply.same_as(truth) or (reply.status == 503 and "prefill_expired" in told)
        stage.settled(p.lease_s + 30)
    return [
        Finding("blocks_freed_after_lease", after, held > 0 and expiries == 1 and after >= p.lease_s - 1, "s", f"{expiries} expiries"),
        Finding("late_parameters_not_used", seen, good and seen >= 1 and d.healthy(), "expiries", f"{reply.status} {told}"),
    ]


def p_killed(stage: Stage) -> list[Finding]:
    """P is killed with requests on their way, and comes back with a short lease under the same port."""
    p = stage.prefill[0]
    bodies = [body_of(f"{stage.kv} p killed {number}", stream=number % 2 == 1, tokens=64) for number in range(16)]
    truths = all_asked(stage.single.port, [{**body, "stream": False, "stream_options": None} for body in bodies])
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(ask, stage.proxy.port, body) for body in bodies]
        wait_until("a first request is to be at P", lambda: p.busy() > 0 or any(each.done() for each in asked), 30, 0.02)
        p.kill()
        replies = [each.result() for each in asked]
    wrong = [
        reply for reply, truth in zip(replies, truths, strict=True)
        if not (reply.same_as(truth) or reply.status in REFUSED or (reply.status == 200 and not reply.ended and reply.error))
    ]  # fmt: skip
    without = ask(stage.proxy.port, body_of("without p"))
    p.lease_s = SHORT_LEASE_S
    back, why = came_back(stage, p, f"{stage.kv} p back")
    return [
        Finding("wrong_answers_as_p_died", len(wrong), not wrong, f"of {len(bodies)}", str(wrong[:1])),
        Finding("status_without_p", without.status, without.status in REFUSED),
        Finding("wrong_answers_after_p_came_back", back, back == 0 and stage.decode[0].healthy(), "of 8", why),
    ]


def d_killed(stage: Stage) -> list[Finding]:
    """D is killed in the midst of streams: each ends with an error event and without an end; P frees its blocks; D comes back."""
    d = stage.decode[0]
    bodies = [body_of(f"{stage.kv} d killed {number}", stream=True, tokens=1500, ignore_eos=True) for number in range(4)]
    opened = [Open(stage.proxy.port, body) for body in bodies]
    streams = [each.events() for each in opened]
    for events in streams:
        for _, _ in zip(range(3), events, strict=False):
            pass
    threading.Timer(0.2, d.kill).start()
    for events in streams:
        try:
            for _ in events:
                pass
        except (OSError, http.client.HTTPException):
            pass  # as it was to be expected; what it was told before is in `reply`
    wrong = [each.reply for each in opened if each.reply.ended or not each.reply.error]
    for each in opened:
        each.close()
    without = ask(stage.proxy.port, body_of("without d"))
    freed = wait_until("P is to free what D did not take", lambda: stage.prefill[0].busy() == 0, stage.prefill[0].lease_s + 30)
    back, why = came_back(stage, d, f"{stage.kv} d back")
    return [
        Finding("streams_that_looked_whole_as_d_died", len(wrong), not wrong, f"of {len(opened)}", str(wrong[:1])[:300]),
        Finding("status_without_d", without.status, without.status in REFUSED),
        Finding("p_freed_after_d_died", freed, True, "s"),
        Finding("wrong_answers_after_d_came_back", back, back == 0 and stage.prefill[0].healthy(), "of 8", why),
    ]


def came_back(stage: Stage, server: Server, seed: str) -> tuple[int, str]:
    """Start a killed server again, and compare eight answers."""
    server.start()
    server.wait_ready()
    server.warm_up()
    wait_until("the proxy is to use it again", lambda: ask(stage.proxy.port, body_of(f"{seed} first")).status == 200, 30)
    return different(stage, [body_of(f"{seed} {number}", stream=number % 2 == 1) for number in range(8)])


def two_and_two(stage: Stage) -> list[Finding]:
    """Every server takes part; with one D dead the other answers, and blocks meant for the dead one are freed early."""
    bodies = [body_of(f"{stage.kv} two {number}", stream=number % 2 == 1) for number in range(32)]
    wrong, why = different(stage, bodies)
    text = stage.proxy.metrics()
    used = [metric(text, "expertwire_proxy_legs_total", server=server.name) for server in stage.servers]
    dead = stage.decode[1]
    dead.kill()
    less, less_why = different(stage, [body_of(f"{stage.kv} one d {number}", stream=number % 2 == 1) for number in range(8)])
    text = stage.proxy.metrics()
    released = metric(text, "expertwire_proxy_releases_total", outcome="released")
    took = wait_until("blocks meant for a dead D are to be freed", lambda: sum(p.busy() for p in stage.prefill) == 0, LEASE_S + 15)
    return [
        Finding("requests_other_than_single_server", wrong, wrong == 0, f"of {len(bodies)}", why),
        Finding("legs_of_the_least_used_server", min(used), min(used) > 0, "legs", f"{used}"),
        Finding("requests_other_with_one_d_dead", less, less == 0, "of 8", less_why),
        Finding("releases_for_a_dead_d", released, released >= 1, "releases"),
        Finding("freed_after_d_died", took, True, "s"),
    ]


def ranks(stage: Stage) -> list[Finding]:
    """Servers of two data-parallel ranks: the proxy names one to each leg, and each rank works."""
    bodies = [body_of(f"{stage.kv} rank {number}", stream=number % 2 == 1) for number in range(16)]
    wrong, why = different(stage, bodies)
    least = min(server.metric("vllm:prompt_tokens_total", engine=str(rank)) for server in stage.servers for rank in range(server.ranks))
    return [
        Finding("requests_other_than_single_server", wrong, wrong == 0, f"of {len(bodies)}", why),
        Finding("tokens_of_the_least_used_rank", least, least > 0, "tokens"),
    ]


def openai_client(stage: Stage) -> list[Finding]:
    """OpenAI's own client: models, completions, chats, streams, and an error that is the server's."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{stage.proxy.port}/v1", api_key="secret", max_retries=0)
    alone = openai.OpenAI(base_url=f"http://127.0.0.1:{stage.single.port}/v1", api_key="secret", max_retries=0)
    words = model.text(f"{stage.kv} openai")
    said = [{"role": "user", "content": words}]

    def texts(which: Any) -> list[Any]:
        plain = which.completions.create(model=model.NAME, prompt=words, max_tokens=TOKENS, temperature=0)
        chat = which.chat.completions.create(model=model.NAME, messages=said, max_tokens=TOKENS, temperature=0)
        flow = which.chat.completions.create(model=model.NAME, messages=said, max_tokens=TOKENS, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in flow if chunk.choices)
        try:
            which.completions.create(model="no-such-model", prompt=words)
        except openai.NotFoundError as error:
            refused = error.status_code
        models = [each.id for each in which.models.list()]
        return [plain.choices[0].text, chat.choices[0].message.content, streamed, refused, models, plain.usage, chat.usage]

    found, truth = texts(client), texts(alone)
    wrong = [f"{mine!r}, alone {theirs!r}" for mine, theirs in zip(found, truth, strict=True) if mine != theirs]
    return [Finding("openai_calls_other_than_single_server", len(wrong), not wrong, f"of {len(truth)}", "; ".join(wrong))]


def own_engine(stage: Stage) -> list[Finding]:
    """With KV moved by ours: our engine has counted the bytes, none failed, and vLLM's metric says the same."""
    time.sleep(1.5)  # of files that are written once a second
    moved, failed = (now - then for now, then in zip(stage.counted(), stage.counted_before, strict=True))
    theirs = sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in stage.decode)
    mine = [moved > 0, failed == 0, theirs > 0] if stage.kv == "ours" else [moved == 0]
    said = f"moved {moved:.0f}, failed {failed:.0f}, vLLM's own count {theirs:.0f}"
    return [
        Finding("bytes_moved_by_expertwire", moved, all(mine), "B", said),
        Finding("bytes_moved_by_vllms_count", theirs, theirs > 0, "B"),
    ]


def alive(stage: Stage) -> list[Finding]:
    """All servers and the proxy answer, and nothing is left running or held."""
    took = stage.settled(LEASE_S + 15)
    ready = all(each.healthy() for each in stage.servers) and get(stage.proxy.port, "/ready")[0] == 200
    return [Finding("idle_after_the_last_request", took, ready, "s")]


PLAIN: dict[str, Callable[[Stage], list[Finding]]] = {
    "tokens": tokens,
    "choices": choices,
    "openai": openai_client,
    "client_leaves": client_leaves,
    "early_release": early_release,
    "own_engine": own_engine,
}
FAULTS: dict[str, Callable[[Stage], list[Finding]]] = {"p_killed": p_killed, "lease": lease, "d_killed": d_killed, "alive": alive}
