"""`vllm bench serve`, a client that we did not write: many requests at once, a known number of failures, and set-ups beside each other."""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_check import model
from vllm_check.checks import SOURCES, Finding, MissingError, alive, body_of
from vllm_check.relay import Relay
from vllm_check.servers import Place, Process, Proxy, Stage, Toy, running

FIGURES = {  # of its result: ours
    "request_throughput": ("requests_per_s", "/s"),
    "output_throughput": ("output_tokens_per_s", "/s"),
    "median_ttft_ms": ("first_token_p50_ms", "ms"),
    "p99_ttft_ms": ("first_token_p99_ms", "ms"),
    "median_itl_ms": ("between_tokens_p50_ms", "ms"),
}
INPUT_TOKENS, OUTPUT_TOKENS = 128, 16
LIMIT_S = 900


def bench(place: Place, port: int, name: str, *, requests: int, concurrency: int, seed: int, output: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """Its result file. Raises RuntimeError where it ends otherwise than well."""
    result = place.folder / f"bench_{name}.json"
    log = place.folder / f"bench_{name}.log"
    command = [
        str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", f"http://127.0.0.1:{port}", "--model", model.NAME, "--tokenizer", str(place.model),
        "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(output), "--ignore-eos",
        "--num-prompts", str(requests), "--max-concurrency", str(concurrency), "--seed", str(seed), "--disable-tqdm",
        "--save-result", "--result-dir", str(place.folder), "--result-filename", result.name,
    ]  # fmt: skip
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve ended with {done.returncode}; its log is {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _computed_by_decode(stage: Stage) -> float:
    """Tokens of prompts; the rest was pulled, or pulled before."""
    return sum(server.metric(SOURCES, source="local_compute") for server in stage.decode)


def crowd(stage: Stage, requests: int, concurrency: int) -> list[Finding]:
    """All of many succeed, each pulled its blocks, and everything is well after it."""
    before = _computed_by_decode(stage)
    found = bench(stage.place, stage.proxy.port, f"{stage.kv}_crowd", requests=requests, concurrency=concurrency, seed=1)
    computed = (_computed_by_decode(stage) - before) / max(1, found["total_input_tokens"])
    return [
        Finding("bench_completed", found["completed"], found["completed"] == requests, f"of {requests}"),
        Finding("bench_failed", found["failed"], found["failed"] == 0, f"of {requests}"),
        Finding("share_of_prompts_computed_by_decode", computed, computed < 0.05, "", f"{computed}"),
        *(Finding(f"bench_{ours}", found[theirs], True, unit) for theirs, (ours, unit) in FIGURES.items()),
        *alive(stage),
    ]


def counted(stage: Stage, requests: int = 400, faults: int = 12) -> list[Finding]:
    """With k failures injected before D `vllm bench serve` counts k, streaming as it does; OpenAI's client likewise without streaming."""
    return [
        _counted(stage, name, ask_all, requests, faults) for name, ask_all in (("bench", _failed_in_bench), ("openai", _failed_in_openai))
    ]


def aiperf(stage: Stage, requests: int = 128, faults: int = 8) -> list[Finding]:
    """The same of aiperf, streaming and not. Raises `MissingError` where it is not installed."""
    return [
        _counted(stage, f"aiperf_{name}", functools.partial(_failed_in_aiperf, streaming), requests, faults)
        for name, streaming in (("streaming", ["--streaming"]), ("whole", []))
    ]


def _counted(stage: Stage, name: str, ask_all: Callable[[Stage, int, int], int], requests: int, faults: int) -> Finding:
    """`ask_all` sends so many requests to a port, and says how many failed, −1 where they do not add up."""
    with Relay(stage.decode[0].name, stage.decode[0].port, faults=faults, skip=requests // 10, every=requests // faults // 2) as relay:
        proxy = Proxy(stage.place, f"{stage.kv}_counted_{name}_proxy", stage.prefill, [_Behind(relay)])
        with running([proxy]):
            failed = ask_all(stage, proxy.port, requests)
    made = sum(relay.failed.values())
    return Finding(f"failures_counted_by_{name}", failed, failed == made == faults, f"of {faults}", f"{made} were made: {relay.failed}")


class _Behind(Process):
    """A relay, as a server of the proxy's."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay.name, [], Path(), relay.port)


def _failed_in_bench(stage: Stage, port: int, requests: int) -> int:
    found = bench(stage.place, port, f"{stage.kv}_counted", requests=requests, concurrency=32, seed=2)
    return int(found["failed"]) if found["completed"] + found["failed"] == requests else -1


def _failed_in_aiperf(streaming: list[str], stage: Stage, port: int, requests: int) -> int:
    program = os.environ.get("AIPERF") or shutil.which("aiperf")
    if program is None:
        raise MissingError("aiperf is not installed: pip install aiperf in an environment of its own, AIPERF=its program")
    folder = stage.place.folder / f"{stage.kv}_aiperf{len(streaming)}"
    command = [
        program, "profile", "--model", model.NAME, "--url", f"http://127.0.0.1:{port}", "--endpoint-type", "chat", *streaming,
        "--tokenizer", f"./{stage.place.model.name}", "--concurrency", "16", "--request-count", str(requests),
        "--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none",
    ]  # fmt: skip
    with (stage.place.folder / f"{folder.name}.log").open("wb") as file:  # of a tokenizer it takes no absolute path
        subprocess.run(command, cwd=stage.place.folder, stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    good, bad = (int((found.get(name) or {}).get("avg", 0)) for name in ("request_count", "error_request_count"))
    return bad if good + bad == requests else -1


def _failed_in_openai(stage: Stage, port: int, requests: int) -> int:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)

    def fails(number: int) -> bool:
        body = body_of(f"{stage.kv} counted {number}", tokens=4)
        try:
            client.completions.create(model=model.NAME, prompt=body["prompt"], max_tokens=4, temperature=0)
        except openai.OpenAIError:
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(fails, range(requests)))


def side_by_side(place: Place, stages: dict[str, Stage], rounds: int, requests: int, concurrency: int) -> list[tuple[str, list[Finding]]]:
    """NIXL behind vLLM's example proxy, NIXL behind ours, ours behind ours: in turn, round by round; medians, with the least and largest.

    All servers run all the while; those that are not asked are idle. Every round has prompts of its own.
    """
    toys: list[Process] = []
    proxies: dict[str, Process] = {}
    if place.toy is not None and "nixl" in stages:
        toys = [Toy(place, "beside_toy", stages["nixl"].prefill, stages["nixl"].decode)]
        proxies["nixl behind vLLM's example proxy"] = toys[0]
    proxies |= {f"{kv} behind ours": found.proxy for kv, found in stages.items()}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in proxies}
    with running(toys):
        for round_number in range(rounds + 1):  # the first is a warm-up
            names = list(proxies)
            shift = round_number % len(names)
            for name in names[shift:] + names[:shift]:
                size = requests if round_number else max(concurrency, requests // 4)
                seed = 100 + 10 * round_number + names.index(name)
                found = bench(place, proxies[name].port, f"beside_{seed}", requests=size, concurrency=concurrency, seed=seed)
                if round_number:
                    results[name].append(found)
    return [(name, _medians(found)) for name, found in results.items()]


def _medians(found: list[dict[str, Any]]) -> list[Finding]:
    findings = [Finding("failed", sum(each["failed"] for each in found), not any(each["failed"] for each in found), "requests")]
    for theirs, (ours, unit) in FIGURES.items():
        values = [each[theirs] for each in found]
        spread = f"{min(values):.2f} to {max(values):.2f}"
        findings.append(Finding(ours, statistics.median(values), True, unit, spread))
    return findings
