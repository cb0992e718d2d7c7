"""The least that a prefill and a decode server can be, as fast as Python allows: what a proxy is measured in front of.

One thread, epoll, no parser: it believes that heads are well formed and that bodies have a Content-Length, and counts what has not. A
prefill answers at once, with parameters that bear a number; a decode answers one token at once, or a stream of `tokens` events one each
`interval_s`, and notes whether it was sent the parameters of a prefill, each number once.

    python -m expertwire.testing.http.mock --tokens 200 --interval-ms 5

prints {"prefill": PORT, "decode": PORT}, and what it counted when its stdin ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import resource
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

BACKLOG = 4096
TICK_S = 0.001
NOW_KEY = b'"t":'  # of an event: when it was handed to the socket, ns of the monotonic clock
NOW_DIGITS = 19
_LENGTH = re.compile(rb"content-length: *([0-9]+)\r\n", re.IGNORECASE)
_NUMBER = re.compile(rb'"remote_request_id": *"cmpl-mock-([0-9]+)"')
_STREAM = re.compile(rb'"stream": *true')

PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6,7,8]],"remote_engine_id":'
    b'"a6c0f5d2-8f5c-4d5f-9d1e-6b1f0a2c3d4e","remote_request_id":"cmpl-mock-%d","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,'
    b'"dcp_size":1,"pp_size":1,"remote_num_tokens":120,"remote_blocks_expiry_time":%d.5,"transfer_mode":"read"}'
)
ANSWER = (
    b'{"id":"cmpl-mock","object":"text_completion","created":1796000000,"model":"mock","choices":[{"index":0,"text":" token",'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":{"prompt_tokens":120,"total_tokens":121,"completion_tokens":1},'
    b'"kv_transfer_params":%s}'
)
EVENT = (
    b'data: {"id":"cmpl-mock","object":"text_completion","created":1796000000,"model":"mock","t":%019d,"choices":[{"index":0,'
    b'"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def framed(body: bytes) -> bytes:
    """A whole answer."""
    return HEAD % len(body) + body


PLAIN = framed(ANSWER % b"null")


@dataclass
class Counts:
    """What came."""

    prefills: int = 0
    decodes: int = 0
    with_params: int = 0  # decodes that were sent a prefill's, each number once
    repeated: int = 0  # with a number that came before: wrong tokens, in a real server
    tokens: int = 0
    odd: int = 0  # requests that could not be understood
    closed: int = 0  # connections that ended in the midst of a stream
    late_ms_max: float = 0.0  # of a tick: this process could not keep up
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: socket.socket
    decodes: bool
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    left: int = 0  # tokens of a stream


class Mock:
    """Both servers, in the calling thread."""

    def __init__(self, tokens: int = 200, interval_s: float = 0.005) -> None:
        self.counts = Counts()
        self._tokens, self._ticks = tokens, max(1, round(interval_s / TICK_S))
        self._epoll = select.epoll()
        self._listeners = {0: socket.socket(), 1: socket.socket()}
        self._peers: dict[int, _Peer] = {}
        self._due: list[list[_Peer]] = [[] for _ in range(self._ticks)]
        self._numbers: set[int] = set()
        self._streams = 0
        self._tick = 0
        self._of_listener: dict[int, int] = {}
        for side, listener in self._listeners.items():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(("127.0.0.1", 0))
            listener.listen(BACKLOG)
            self._epoll.register(listener.fileno(), select.EPOLLIN)
            self._of_listener[listener.fileno()] = side

    @property
    def ports(self) -> dict[str, int]:
        """Where the two listen."""
        return {"prefill": self._listeners[0].getsockname()[1], "decode": self._listeners[1].getsockname()[1]}

    def run(self, until: int) -> Counts:
        """Serve until that descriptor is readable."""
        self._epoll.register(until, select.EPOLLIN)
        begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        origin, over = begin, False
        while not over:
            wait = TICK_S if self._streams else -1.0
            for descriptor, _ in self._epoll.poll(wait, 1024):
                if (peer := self._peers.get(descriptor)) is not None:
                    self._serve(peer)
                elif descriptor in self._of_listener:
                    self._accept(self._of_listener[descriptor])
                else:
                    over = True
            if not self._streams:
                origin = time.monotonic() - self._tick * TICK_S
                continue
            elapsed = time.monotonic() - origin
            while self._tick < elapsed / TICK_S - 1:
                self._advance()
                self.counts.late_ms_max = max(self.counts.late_ms_max, (elapsed / TICK_S - self._tick) * TICK_S * 1e3)
        now = resource.getrusage(resource.RUSAGE_SELF)
        self.counts.cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        self.counts.wall_s = time.monotonic() - begin
        self.close()
        return self.counts

    def close(self) -> None:
        """Every socket."""
        for peer in self._peers.values():
            peer.endpoint.close()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()

    def _accept(self, side: int) -> None:
        while True:
            try:
                endpoint, _ = self._listeners[side].accept()
            except BlockingIOError:
                return
            endpoint.setblocking(False)
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[endpoint.fileno()] = _Peer(endpoint, bool(side))
            self._epoll.register(endpoint.fileno(), select.EPOLLIN)

    def _end(self, peer: _Peer) -> None:
        if peer.left:
            self.counts.closed += 1
            self._streams -= 1
            peer.left = 0
        with contextlib.suppress(OSError):
            self._epoll.unregister(peer.endpoint.fileno())
        self._peers.pop(peer.endpoint.fileno(), None)
        peer.endpoint.close()

    def _serve(self, peer: _Peer) -> None:
        try:
            data = peer.endpoint.recv(1 << 16)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            self._end(peer)
            return
        if peer.unsent:
            self._send(peer, b"")
        if data is None:
            return
        if peer.received:
            peer.received += data
            data = bytes(peer.received)
            peer.received.clear()
        while data:
            at = data.find(b"\r\n\r\n")
            length = _LENGTH.search(data, 0, at + 2) if at >= 0 else None
            if at >= 0 and length is None:
                self.counts.odd += 1
                self._end(peer)
                return
            end = at + 4 + int(length[1]) if length else 0
            if length is None or len(data) < end:
                peer.received += data
                return
            self._answer(peer, data[at + 4 : end] if len(data) != end else data[at + 4 :])
            data = data[end:]

    def _answer(self, peer: _Peer, body: bytes) -> None:
        counts = self.counts
        if not peer.decodes:
            counts.prefills += 1
            self._send(peer, framed(ANSWER % (PARAMS % (counts.prefills, time.time() + 30))))
            return
        counts.decodes += 1
        if (number := _NUMBER.search(body)) is not None:
            value = int(number[1])
            counts.repeated += value in self._numbers
            counts.with_params += value not in self._numbers
            self._numbers.add(value)
        if _STREAM.search(body) is None:
            counts.tokens += 1
            self._send(peer, PLAIN)
            return
        event = EVENT % time.monotonic_ns()
        counts.tokens += 1
        peer.left = self._tokens - 1
        self._send(peer, STREAM_HEAD + b"%x\r\n%s\r\n" % (len(event), event))
        if peer.left:
            self._streams += 1
            self._due[self._tick % self._ticks].append(peer)
        else:
            self._send(peer, b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE))

    def _advance(self) -> None:
        """One tick: an event for each stream whose turn it is."""
        self._tick += 1
        slot = self._tick % self._ticks
        due = self._due[slot]
        if not due:
            return
        event = EVENT % time.monotonic_ns()
        usual = b"%x\r\n%s\r\n" % (len(event), event)
        last = usual + b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE)
        kept = []
        for peer in due:
            if not peer.left:
                continue  # it has left
            peer.left -= 1
            self.counts.tokens += 1
            if peer.left:
                kept.append(peer)
                self._send(peer, usual)
            else:
                self._streams -= 1
                self._send(peer, last)
        self._due[slot] = kept

    def _send(self, peer: _Peer, data: bytes) -> None:
        if peer.unsent:
            peer.unsent += data
            data = bytes(peer.unsent)
        try:
            sent = peer.endpoint.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # its end is read next
        waits, was = sent < len(data), bool(peer.unsent)
        if waits or was:
            peer.unsent[:] = data[sent:]
        if waits is not was:
            self._epoll.modify(peer.endpoint.fileno(), select.EPOLLIN | (select.EPOLLOUT if waits else 0))


def main() -> None:
    """A process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--interval-ms", type=float, default=5.0)
    args = parser.parse_args()
    mock = Mock(args.tokens, args.interval_ms / 1e3)
    print(json.dumps(mock.ports), flush=True)
    print(json.dumps(asdict(mock.run(sys.stdin.fileno()))), flush=True)


if __name__ == "__main__":
    main()
