"""Processes of one set-up: vLLM's servers, a proxy before them, their logs, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_check import model
from vllm_check.asking import ask, get, metric

READY_S = float(os.environ.get("VLLM_CHECK_READY_S", "900"))
SEQUENCES = 64
BLOCKS = 2048  # of 128 tokens: vLLM would take a whole GiB for each server, and the machine would have no memory left for pages of programs
BATCHED_TOKENS = 8192  # so that no prompt is computed in parts: vLLM 0.32 on CPU ends at one whose request has a seed
LEASE_S = 120  # four times vLLM's default: five servers and a crowd on two cores, and D may come for its blocks after half a minute
PR_SET_PDEATHSIG = 1
SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,shm,self",
    "UCX_NET_DEVICES": "lo",
}


PORTS = range(10_000, 30_000)  # below those that the kernel gives to connections, any of which may take one before its server does
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Of the loopback, none of them twice. Another program may take one before it is used; then a server's start fails and says so."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
            _given.add(port)
    return found


def wait_until(what: str, met: Callable[[], bool], limit_s: float, step_s: float = 0.25) -> float:
    """Seconds until it was met. Raises TimeoutError that says what was waited for."""
    begun = time.monotonic()
    while not met():
        if time.monotonic() - begun > limit_s:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(step_s)
    return time.monotonic() - begun


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Process:
    """One process in a group of its own, with its log."""

    name: str
    command: Sequence[str]
    log: Path
    port: int
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin it; what it says is added to its log."""
        with self.log.open("ab") as file:
            self.running = subprocess.Popen(
                self.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                # Not a session: Linux shares out processors by session first (sched(7), autogroup), and on 6.18 one server's threads
                # that look for work all the time kept another's from theirs for up to two minutes.
                process_group=0,
                preexec_fn=_die_with_parent,
            )

    def healthy(self) -> bool:
        """Whether it answers 200. Raises RuntimeError where it has ended."""
        if self.running is None or self.running.poll() is not None:
            raise RuntimeError(f"{self.name} has ended, with {self.running and self.running.returncode}; its log is {self.log}")
        return get(self.port, self.health)[0] == 200

    def wait_ready(self) -> None:
        """Until it answers."""
        wait_until(f"{self.name} is to be ready, its log is {self.log}", self.healthy, READY_S, 1.0)

    def metrics(self) -> str:
        """Its counters. Raises RuntimeError where it gives none: of a dead server nothing is 0."""
        status, text = get(self.port, "/metrics")
        if status != 200:
            raise RuntimeError(f"{self.name} gives no metrics: {status} {text[:200]}; its log is {self.log}")
        return text

    def metric(self, name: str, **labels: str) -> float:
        """One of them."""
        return metric(self.metrics(), name, **labels)

    def kill(self) -> None:
        """At once, with all that it started."""
        if self.running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()

    def stop(self, limit_s: float = 30) -> int | None:
        """As an operator does; its exit status, None where it had to be killed."""
        if self.running is None:
            return 0
        status: int | None = None
        if self.running.poll() is None:
            self.running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.running.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):  # of its children nobody may be left
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()
        return status


class Server(Process):
    """A vLLM server on CPU. `role` is kv_producer, kv_consumer, or "" for one that does all itself."""

    def __init__(self, place: Place, name: str, role: str, kv: str, ranks: int = 0) -> None:
        port, side = free_ports(2)
        self.role, self.lease_s, self.ranks = role, LEASE_S, ranks
        self.place = place
        ours = {"EXPERTWIRE_VLLM": "nixl", "EXPERTWIRE_TELEMETRY_FOLDER": str(place.folder / "telemetry")}
        env = SERVER_ENV | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)} | (ours if kv == "ours" else {"EXPERTWIRE_VLLM": "0"})
        super().__init__(name, [], place.folder / f"{name}.log", port, env)

    def start(self) -> None:
        """With the lease that it has by now."""
        self.command = [
            str(Path(sys.executable).parent / "vllm"), "serve", str(self.place.model),
            "--served-model-name", model.NAME, "--host", "127.0.0.1", "--port", str(self.port),
            "--enforce-eager", "--dtype", "float32", "--num-gpu-blocks-override", str(BLOCKS),
            "--max-model-len", str(model.CONTEXT_TOKENS), "--max-num-seqs", str(SEQUENCES),
            "--max-num-batched-tokens", str(BATCHED_TOKENS),
            *(["--data-parallel-size", str(self.ranks)] if self.ranks else []),
        ]  # fmt: skip
        if self.role:
            config: dict[str, Any] = {
                "kv_connector": "NixlConnector",
                "kv_role": self.role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"kv_lease_duration": self.lease_s},
            }
            self.command += ["--kv-transfer-config", json.dumps(config)]
        super().start()

    def busy(self) -> float:
        """Requests that run or wait, and a thousandth for each part of its blocks that is held."""
        text = self.metrics()
        return sum(metric(text, f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))

    def warm_up(self) -> None:
        """An ordinary first request: some of vLLM's CPU kernels end the process at an odd one."""
        body = {"model": model.NAME, "prompt": model.text(f"warm {self.name} {time.time()}"), "max_tokens": 4}
        if (reply := ask(self.port, body)).status != 200:
            raise RuntimeError(f"{self.name} answers {reply.status} to an ordinary request; its log is {self.log}")


@dataclass
class Place:
    """Where a run leaves its files."""

    folder: Path
    toy: Path | None = None  # vLLM's example proxy

    def __post_init__(self) -> None:
        (self.folder / "telemetry").mkdir(parents=True, exist_ok=True)
        self.model = self.folder / "model"

    def moved(self, name: str) -> float:
        """That counter over all our agents of this run."""
        return sum(metric(path.read_text(), name) for path in (self.folder / "telemetry").glob("*.prom"))


class Proxy(Process):
    """Ours. `table` is added to its settings."""

    def __init__(self, place: Place, name: str, prefill: Sequence[Process], decode: Sequence[Process], **table: str) -> None:
        port = free_ports(1)[0]
        lines = [f"port = {port}", "show_servers = true"]
        for side, servers in (("prefill", prefill), ("decode", decode)):
            for server in servers:
                lines += [f"[[{side}]]", f'name = "{server.name}"', f'url = "http://127.0.0.1:{server.port}"']
                lines += [f"ranks = {ranks}" for ranks in [getattr(server, "ranks", 0)] if ranks]
        for section, text in table.items():
            lines += [f"[{section}]", text]
        settings = place.folder / f"{name}.toml"
        settings.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "expertwire.cli", "proxy", "--config", str(settings)]
        super().__init__(name, command, place.folder / f"{name}.log", port, health="/ready")


class Toy(Process):
    """vLLM's own example proxy."""

    def __init__(self, place: Place, name: str, prefill: Sequence[Process], decode: Sequence[Process]) -> None:
        port = free_ports(1)[0]
        command = [sys.executable, str(place.toy), "--port", str(port)]
        command += ["--prefiller-hosts", *["127.0.0.1"] * len(prefill), "--prefiller-ports", *[str(server.port) for server in prefill]]
        command += ["--decoder-hosts", *["127.0.0.1"] * len(decode), "--decoder-ports", *[str(server.port) for server in decode]]
        super().__init__(name, command, place.folder / f"{name}.log", port, health="/healthcheck")


@dataclass
class Stage:
    """Servers of one kind of KV transfer, warm, and our proxy before them."""

    place: Place
    kv: str
    prefill: list[Server]
    decode: list[Server]
    proxy: Proxy
    single: Server
    counted_before: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.counted_before = self.counted()

    def counted(self) -> tuple[float, float]:
        """Bytes moved by our agents of this run, and their transfers that failed."""
        return self.place.moved("expertwire_transfer_bytes_total"), self.place.moved("expertwire_transfers_failed_total")

    @property
    def servers(self) -> list[Server]:
        """All but the single one."""
        return [*self.prefill, *self.decode]

    def settled(self, limit_s: float = 10) -> float:
        """Seconds until no server runs, queues or holds anything."""
        return wait_until("servers are to be idle, their blocks free", lambda: all(each.busy() == 0 for each in self.servers), limit_s)


@contextlib.contextmanager
def running(processes: Sequence[Process]) -> Iterator[None]:
    """Start them together, end them in the other order. vLLM's are warm before this goes on."""
    try:
        for each in processes:
            each.start()
        for each in processes:
            each.wait_ready()
        for each in processes:
            if isinstance(each, Server):
                each.warm_up()
        yield
    finally:
        for each in reversed(processes):
            each.stop()


@contextlib.contextmanager
def stages(
    place: Place, kinds: Sequence[str], single: Server, prefill: int = 1, decode: int = 1, ranks: int = 0
) -> Iterator[dict[str, Stage]]:
    """Of each kind so many servers of each side and a proxy, all started at once."""
    made: dict[str, Stage] = {}
    for kv in kinds:
        tag = f"{kv}_{prefill}x{decode}" + (f"_ranks{ranks}" if ranks else "")
        ps = [Server(place, f"{tag}_prefill{number}", "kv_producer", kv, ranks) for number in range(prefill)]
        ds = [Server(place, f"{tag}_decode{number}", "kv_consumer", kv, ranks) for number in range(decode)]
        made[kv] = Stage(place, kv, ps, ds, Proxy(place, f"{tag}_proxy", ps, ds), single)
    with running([each for found in made.values() for each in (*found.servers, found.proxy)]):
        yield made
