"""A load generator: one thread, epoll, no parser but its own, so that it is seldom what limits; and it says how near it was to doing so.

    python -m expertwire.testing.http.load --port 8000 --concurrency 256 --stream --tokens 200 --seconds 5

Every answer is checked: its status, its framing, of a stream the number of events and the [DONE] behind them. What is told is what came in
the measured stretch, after the warm-up; `busy` is the share of it in which this process had the CPU, so rate / busy is what it could have
asked of a server that takes no time. `--watch PID` reads the CPU time of others at both ends of the stretch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import re
import resource
import select
import socket
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

from expertwire.testing.http.mock import DONE, NOW_DIGITS, NOW_KEY

ERROR = b'data: {"error"'
LAG_EVERY = 8  # of so many streams one is asked how late its events are
SLOW_BYTES, SLOW_S = 512, 0.01  # how a slow reader reads
_HEAD = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
_LENGTH = re.compile(rb"content-length: *([0-9]+)\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"transfer-encoding: *chunked\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"connection: *close\r\n", re.IGNORECASE)
PROMPT = " ".join(f"word{k}" for k in range(120))


@dataclass(frozen=True)
class Load:
    """What is asked. Either `requests` in all, or `seconds` after `warmup_s`."""

    ports: tuple[int, ...]
    concurrency: int = 64
    requests: int = 0
    seconds: float = 0.0
    warmup_s: float = 0.0
    ramp_s: float = 0.0  # over which the connections are begun, so that streams of one length do not begin and end together
    stream: bool = False
    tokens: int = 1  # of a stream: events that are to come before its [DONE]; 0: any number
    abort_after: int = -1  # leave after that many events, or at once (0); −1: never
    abort_s: float = 0.0  # and then only after that time
    slow: int = 0  # so many of the connections read slowly
    path: str = "/v1/completions"
    model: str = "mock"
    prompt: str = PROMPT
    watch: tuple[int, ...] = ()
    deadline_s: float = 120.0


@dataclass
class Outcome:
    """What came of it, in the measured stretch. Times of answers are in ms."""

    done: int = 0
    failed: int = 0
    aborted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    watched_cpu_s: list[float] = field(default_factory=list)  # one for each of `watch`
    why: dict[str, int] = field(default_factory=dict)  # of failures
    ttft_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    lag_ms: list[float] = field(default_factory=list)
    unfinished: int = 0  # asked, and neither answered nor given up when the stretch ended


class _Broken(Exception):  # noqa: N818  (never leaves this file)
    """An answer that is not as it must be."""


@dataclass(slots=True, eq=False)
class _Caller:
    """One connection."""

    number: int
    port: int
    endpoint: socket.socket
    asked_at: float = 0.0
    first_at: float = 0.0
    received: bytes = b""
    in_body: bool = False
    left: int = -1  # bytes of a body with a length, or of a chunk; −1: chunked, between two chunks
    chunked: bool = False
    closes: bool = False
    status: int = 0
    events: int = 0
    tail: bytes = b""  # of the events so far, as much as [DONE] is long
    asking: bool = False


def cpu_s(pid: int) -> float:
    """CPU time that this process, all its threads, has had until now: the scheduler's own account (ns)."""
    total = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(stat.read_text(encoding="ascii").split()[0])
    return total / 1e9


class Generator:
    """Runs one load. `run` blocks; it may be called in a thread."""

    def __init__(self, load: Load) -> None:
        self._load = load
        body = {"model": load.model, "prompt": load.prompt, "max_tokens": load.tokens or 16}
        if load.stream:
            body["stream"] = True
        raw = json.dumps(body).encode()
        head = f"POST {load.path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nAuthorization: Bearer key\r\n"
        self._request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
        self._epoll = select.epoll()
        self._callers: dict[int, _Caller] = {}
        self._slow: list[_Caller] = []
        self._leaving: list[tuple[float, _Caller]] = []
        self._asked = 0
        self._ended = 0
        self._out = Outcome()
        self._why: Counter[str] = Counter()
        self._heads: dict[bytes, tuple[int, bool, int]] = {}  # that were read before
        self._frame = (0, b"")  # of the chunk before: its bytes in all, and the line of its size
        self._pending: deque[tuple[float, int]] = deque()  # (when, number) of connections to be begun
        self._measuring = False
        self._start = 0.0
        self._used: list[float] = []

    def run(self) -> Outcome:
        """Ask until everything is asked and answered, or the time is over."""
        load, begin = self._load, time.monotonic()
        for number in range(load.concurrency):
            self._pending.append((begin + load.ramp_s * number / load.concurrency, number))
        if not load.warmup_s:
            self._begin_measuring()
        slow_at = begin
        while True:
            now = time.monotonic()
            if not self._measuring and now >= begin + load.warmup_s:
                self._begin_measuring()
            timed_out = load.seconds and self._measuring and now >= self._start + load.seconds
            if timed_out or (load.requests and self._ended >= load.requests) or now - begin > load.deadline_s:
                break
            while self._pending and self._pending[0][0] <= now:
                number = self._pending.popleft()[1]
                self._connect(number, load.ports[number % len(load.ports)])
            for descriptor, events in self._epoll.poll(0.005 if self._leaving or self._slow or self._pending else 0.05, 1024):
                caller = self._callers.get(descriptor)
                if caller is not None:
                    self._ready(caller, events)
            if self._leaving:
                self._leave_in_time()
            if self._slow and time.monotonic() >= slow_at:
                slow_at = time.monotonic() + SLOW_S
                for caller in list(self._slow):
                    self._read(caller, SLOW_BYTES)
        return self._over()

    def _begin_measuring(self) -> None:
        self._out, self._why, self._measuring, self._start = Outcome(), Counter(), True, time.monotonic()
        self._used = [_own_cpu_s(), *(cpu_s(pid) for pid in self._load.watch)]

    def _over(self) -> Outcome:
        out = self._out
        out.seconds = time.monotonic() - self._start
        used = [_own_cpu_s(), *(cpu_s(pid) for pid in self._load.watch)]
        own, *out.watched_cpu_s = (now - then for now, then in zip(used, self._used, strict=True))
        out.busy = own / out.seconds
        out.unfinished = sum(caller.asking for caller in self._callers.values())
        out.why = dict(self._why)
        for caller in list(self._callers.values()):
            self._close(caller)
        self._epoll.close()
        return out

    # ---- connections

    def _connect(self, number: int, port: int) -> None:
        if self._load.requests and self._asked >= self._load.requests:
            return
        endpoint = socket.socket()
        endpoint.setblocking(False)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if number < self._load.slow:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        result = endpoint.connect_ex(("127.0.0.1", port))
        caller = _Caller(number, port, endpoint)
        self._callers[endpoint.fileno()] = caller
        if result not in (0, errno.EINPROGRESS):
            self._asked += 1
            self._fail(caller, errno.errorcode.get(result, "connect"))
            return
        self._asked += 1
        caller.asking = True
        self._epoll.register(endpoint.fileno(), select.EPOLLOUT | select.EPOLLIN)

    def _ready(self, caller: _Caller, events: int) -> None:
        if not caller.asked_at:
            if error := caller.endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._fail(caller, errno.errorcode.get(error, "connect"))
                return
            if events & select.EPOLLOUT:
                if caller.number < self._load.slow:
                    self._epoll.unregister(caller.endpoint.fileno())
                    self._slow.append(caller)
                else:
                    self._epoll.modify(caller.endpoint.fileno(), select.EPOLLIN)
                self._ask(caller)
            return
        self._read(caller, 1 << 16)

    def _ask(self, caller: _Caller) -> None:
        caller.asked_at, caller.first_at, caller.events, caller.in_body = time.monotonic(), 0.0, 0, False
        caller.tail = b""
        try:
            caller.endpoint.send(self._request)
        except OSError as error:
            self._fail(caller, errno.errorcode.get(error.errno or 0, "send"))
            return
        if self._load.abort_after == 0:
            if self._load.abort_s:
                self._leaving.append((caller.asked_at + self._load.abort_s, caller))
            else:
                self._abort(caller)

    def _leave_in_time(self) -> None:
        now = time.monotonic()
        due = [caller for at, caller in self._leaving if at <= now]
        self._leaving = [(at, caller) for at, caller in self._leaving if at > now]
        for caller in due:
            if caller.endpoint.fileno() in self._callers:
                self._abort(caller)

    def _abort(self, caller: _Caller) -> None:
        self._out.aborted += 1
        self._again(caller)

    def _fail(self, caller: _Caller, why: str) -> None:
        self._out.failed += 1
        self._why[why] += 1
        self._again(caller)

    def _again(self, caller: _Caller) -> None:
        """This connection is of no use any more; another takes its place."""
        self._ended += 1
        self._close(caller)
        self._connect(caller.number, caller.port)

    def _close(self, caller: _Caller) -> None:
        self._callers.pop(caller.endpoint.fileno(), None)
        if caller in self._slow:
            self._slow.remove(caller)
        caller.endpoint.close()

    # ---- answers

    def _read(self, caller: _Caller, most: int) -> None:
        try:
            data = caller.endpoint.recv(most)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(caller, errno.errorcode.get(error.errno or 0, "recv"))
            return
        if not data:
            self._fail(caller, "closed in the midst" if caller.in_body else "closed before an answer")
            return
        if caller.received:
            data = caller.received + data
            caller.received = b""
        try:
            if not caller.in_body:
                at = data.find(b"\r\n\r\n")
                if at < 0:
                    caller.received = data
                    return
                self._head(caller, data[: at + 2])
                data = data[at + 4 :]
            over = self._chunks(caller, data) if caller.chunked else self._length(caller, data)
        except _Broken as broken:
            self._fail(caller, str(broken))
            return
        if 0 < self._load.abort_after <= caller.events:
            self._abort(caller)  # also where the rest has come with it
        elif over:
            self._answered(caller)

    def _head(self, caller: _Caller, head: bytes) -> None:
        known = self._heads.get(head)
        if known is None:
            if len(self._heads) > 1000:
                self._heads.clear()
            known = self._heads[head] = _parse(head)
        caller.status, caller.closes, caller.left = known
        caller.chunked, caller.in_body = caller.left < 0, True

    def _length(self, caller: _Caller, data: bytes) -> bool:
        if not caller.first_at:
            caller.first_at = time.monotonic()
            self._out.ttft_ms.append((caller.first_at - caller.asked_at) * 1e3)
        caller.left -= len(data)
        if caller.left < 0:
            raise _Broken("bytes behind the answer")
        return not caller.left

    def _chunks(self, caller: _Caller, data: bytes) -> bool:
        """Events out of whole and half chunks; True behind the last."""
        frame = self._frame
        if caller.left < 0 and len(data) == frame[0] and data.startswith(frame[1]):  # one whole chunk, of a size that came before
            self._events(caller, data[len(frame[1]) : -2])
            return False
        at, size_of_data = 0, len(data)
        while at < size_of_data:
            if caller.left < 0:
                end = data.find(b"\r\n", at)
                if end < 0:
                    break
                try:
                    size = int(data[at:end], 16)
                except ValueError:
                    raise _Broken("a chunk without a size") from None
                if not size:
                    if size_of_data < end + 4:
                        break
                    return True
                caller.left = size + 2  # with its CRLF
                self._frame = (end + 2 - at + caller.left, data[at : end + 2])
                at = end + 2
            piece = data[at : at + caller.left]
            at += len(piece)
            caller.left -= len(piece)
            # Its CRLF is no part of the events: what has been read of it is cut off, which "\n\n" never ends in.
            self._events(caller, piece[: len(piece) - max(0, 2 - caller.left)] if caller.left < 2 else piece)
            if not caller.left:
                caller.left = -1
        caller.received = data[at:]
        return False

    def _events(self, caller: _Caller, text: bytes) -> None:
        if not text:
            return
        seam = 1 if caller.tail[-1:] == b"\n" and text[:1] == b"\n" and caller.tail[-2:] != b"\n\n" else 0
        found = text.count(b"\n\n") + seam
        caller.tail = text[-len(DONE) :] if len(text) >= len(DONE) else (caller.tail + text)[-len(DONE) :]
        if ERROR in text:
            raise _Broken("an error event")
        if found:
            now = time.monotonic()
            if not caller.first_at:
                caller.first_at = now
                self._out.ttft_ms.append((now - caller.asked_at) * 1e3)
            caller.events += found
            self._out.tokens += found - (caller.tail == DONE)
            if caller.number % LAG_EVERY == 0 and (mark := text.rfind(NOW_KEY)) >= 0:
                stamp = text[mark + len(NOW_KEY) : mark + len(NOW_KEY) + NOW_DIGITS]
                if len(stamp) == NOW_DIGITS:
                    self._out.lag_ms.append((now * 1e9 - int(stamp)) / 1e6)

    def _answered(self, caller: _Caller) -> None:
        now, load = time.monotonic(), self._load
        if caller.status != 200:
            self._fail(caller, f"status {caller.status}")
            return
        if caller.chunked and load.stream:
            if caller.tail != DONE:
                self._fail(caller, "no [DONE] at the end")
                return
            if load.tokens and caller.events != load.tokens + 1:
                self._fail(caller, f"{caller.events - 1} events")
                return
        elif load.stream:
            self._fail(caller, "not streamed")
            return
        else:
            self._out.tokens += 1
        self._out.done += 1
        self._out.whole_ms.append((now - caller.asked_at) * 1e3)
        caller.in_body = False
        if caller.closes:
            self._again(caller)
            return
        self._ended += 1
        if load.requests and self._asked >= load.requests:
            caller.asking = False
            self._close(caller)
            return
        self._asked += 1
        self._ask(caller)


def _parse(head: bytes) -> tuple[int, bool, int]:
    """Status, whether the connection ends with the answer, and its length (−1: chunked)."""
    first = _HEAD.match(head)
    if first is None:
        raise _Broken("no status line")
    chunked, length = _CHUNKED.search(head) is not None, _LENGTH.search(head)
    if not chunked and length is None:
        raise _Broken("neither a length nor chunks")
    return int(first[1]), _CLOSES.search(head) is not None, -1 if chunked or length is None else int(length[1])


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: list[float], percent: float) -> float:
    """The nearest rank; 0 of nothing."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else 0.0


def summary(outcome: Outcome) -> dict[str, object]:
    """The outcome with percentiles in place of every time."""
    found = asdict(outcome)
    for name in ("ttft", "whole", "lag"):
        values = found.pop(f"{name}_ms")
        found |= {f"{name}_p{percent}_ms": percentile(values, percent) for percent in (50, 99)}
    return found


def main() -> None:
    """A process of its own; the summary of the outcome as JSON on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, action="append", required=True, help="again for each server; connections take them in turn")
    for name in ("concurrency", "requests", "tokens", "abort-after", "slow"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Load, name.replace("-", "_")))
    for name in ("seconds", "warmup-s", "ramp-s", "abort-s", "deadline-s"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Load, name.replace("-", "_")))
    for name in ("path", "model", "prompt"):
        parser.add_argument(f"--{name}", default=getattr(Load, name))
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--watch", type=int, action="append", default=[])
    args = vars(parser.parse_args())
    ports, watch = tuple(args.pop("port")), tuple(args.pop("watch"))
    print(json.dumps(summary(Generator(Load(ports=ports, watch=watch, **args)).run())))


if __name__ == "__main__":
    main()
