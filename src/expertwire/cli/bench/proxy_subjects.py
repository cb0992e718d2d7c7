"""What `bench proxy` measures: processes between the load generator and the mock servers, each on a core of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from expertwire.errors import DeadlineError, PeerError

READY_S = 30.0
STOP_S = 5.0
LOG_BYTES = 2000
PLAIN, TWO_LEGS = "plain", "prefill_decode"

NGINX = """\
daemon off; master_process off; pid {place}/pid; error_log {place}/error.log warn;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi; client_max_body_size 64m; client_body_buffer_size 64k;
  keepalive_requests 1000000000; keepalive_timeout 75s; tcp_nodelay on;
  upstream decode {{ server 127.0.0.1:{decode}; keepalive 4096; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


@dataclass(frozen=True)
class Engine:
    """One way to stand between a client and the servers."""

    name: str
    flow: str  # what a request goes through
    modules: tuple[str, ...] = ()  # that it needs

    def missing(self) -> str:
        """Why it cannot run here, or ""."""
        if self.name == "nginx" and _nginx() is None:
            return "nginx is not installed (Debian: apt-get install nginx-light)"
        absent = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"{', '.join(absent)} not installed (pip install {' '.join(absent)})" if absent else ""

    def identity(self) -> str:
        """Its version."""
        if self.name == "nginx":
            said = subprocess.run([_nginx() or "nginx", "-v"], capture_output=True, text=True, timeout=10, check=False).stderr
            return said.strip().rpartition("/")[2]
        return ", ".join(f"{module} {metadata.version(module)}" for module in self.modules)

    def command(self, port: int, prefill: int, decode: int, place: Path) -> list[str]:
        """What starts it, in the foreground, as one process."""
        urls = [f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"]
        if self.name == "nginx":
            config = place / "nginx.conf"
            config.write_text(NGINX.format(place=place, port=port, decode=decode), encoding="utf-8")
            return [_nginx() or "nginx", "-p", str(place), "-c", str(config)]
        if self.name == "aiohttp":
            return [sys.executable, "-m", "expertwire.cli.bench.proxy_aiohttp", str(port), *urls]
        words = ["--prefill", urls[0], "--decode", urls[1], "--port", str(port), "--log-level", "warning"]
        return [sys.executable, "-m", "expertwire.cli", "proxy", *words]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("expertwire", TWO_LEGS, ("uvloop", "httptools", "orjson")),
        Engine("nginx", PLAIN),
        Engine("aiohttp", TWO_LEGS, ("aiohttp", "uvloop")),
        Engine("direct", PLAIN),  # nothing between: what load generator and mocks can do at most
    )
}


def _nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that are begun inside have that core alone (sched_setaffinity(2) is inherited)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Running:
    """A subject that takes connections."""

    port: int
    pid: int  # 0: there is none


@dataclass
class Servers:
    """The mock servers of one run; `counts` once they have ended."""

    prefill: int
    decode: int
    pid: int
    counts: dict[str, Any]


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mocks(core: int, tokens: int, interval_ms: float) -> Iterator[Servers]:
    """Prefill and decode in one process on that core."""
    words = ["-m", "expertwire.testing.http.mock", "--tokens", str(tokens), "--interval-ms", str(interval_ms)]
    with on_core(core):
        process = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ports = json.loads(process.stdout.readline() or "{}")
        if not ports:
            raise PeerError("the mock servers ended before they listened; their message is above")
        servers = Servers(ports["prefill"], ports["decode"], process.pid, {})
        yield servers
        process.stdin.close()
        servers.counts |= json.loads(process.stdout.readline() or "{}")
    finally:
        _end(process)


@contextmanager
def subject(engine: Engine, servers: Servers, core: int) -> Iterator[Running]:
    """The engine between, on that core; for `direct` the decode server itself."""
    if engine.name == "direct":
        yield Running(servers.decode, 0)
        return
    with tempfile.TemporaryDirectory(prefix="ew-") as name:
        place, port = Path(name), free_port()
        command = engine.command(port, servers.prefill, servers.decode, place)
        with (place / "log").open("wb") as log, on_core(core):
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(port, process, place / "log", engine.name)
            yield Running(port, process.pid)
        finally:
            _end(process)


def wait_for(port: int, process: subprocess.Popen[Any], log: Path, name: str) -> None:
    """Until it takes connections. Raises `PeerError` with its last words where it ends before, `DeadlineError` where it does neither."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None:
            said = log.read_text(encoding="utf-8", errors="replace")[-LOG_BYTES:].strip()
            raise PeerError(f"{name} ended with status {process.returncode} before it took connections: {said}")
        time.sleep(0.02)
    raise DeadlineError(f"{name} takes no connections on port {port} after {READY_S:.0f} s")


def load(port: int, core: int, words: Sequence[str], watch: tuple[int, ...], limit_s: float) -> dict[str, Any]:
    """Run the load generator on that core, and what it found. Raises `DeadlineError` and `PeerError`."""
    command = [sys.executable, "-m", "expertwire.testing.http.load", "--port", str(port), *words, *(f"--watch={pid}" for pid in watch)]
    with on_core(core):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"the load generator has not ended after {limit_s:.0f} s") from None
    finally:
        _end(process)
    if process.returncode:
        raise PeerError(f"the load generator ended with status {process.returncode}; its message is above")
    found: dict[str, Any] = json.loads(said)
    return found


def _end(process: subprocess.Popen[Any]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
        process.wait()
