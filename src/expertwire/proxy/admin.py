"""Servers added and removed while the proxy runs: `GET /servers`, `POST /servers`, `DELETE /servers/{side}/{name}`.

    curl -d '{"side":"decode","url":"http://10.0.0.7:8000"}' http://127.0.0.1:9000/servers

Bound to loopback unless configured otherwise: whoever reaches it decides where prompts are sent. JSON in and out; nothing of it is kept
beyond the process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

import orjson

from expertwire.errors import InvalidArgumentError, NotFoundError
from expertwire.proxy import faults
from expertwire.proxy.faults import Fault
from expertwire.proxy.held import Held
from expertwire.proxy.http import render
from expertwire.proxy.http.front import Front
from expertwire.proxy.http.reply import Ask, FrontLimits, Known, Reply
from expertwire.proxy.http.wheel import Wheel
from expertwire.proxy.log import Log
from expertwire.proxy.policy import Fleet, Server, ServerConfig, Side
from expertwire.proxy.seam import Request

Message = dict[str, Any]
Handler = Callable[[Message], Awaitable[Message]]
LIMITS: Final = FrontLimits(65_536, 64, 65_536, 4, 64, 10.0, 30.0, 30.0, 65_536, sys.maxsize, sys.maxsize, 1)
_FIELDS: Final = {"side": str, "url": str, "name": str, "ranks": int}


def describe(server: Server) -> Message:
    """A server as JSON has it."""
    return {
        "side": server.side.value,
        "name": server.name,
        "url": server.origin.decode() + server.prefix.decode(),
        "ranks": server.ranks,
        "standing": server.standing.name.lower(),
        "in_flight": server.in_flight,
        "failures": server.failures,
    }


def apply(fleet: Fleet, message: Message, retire: Callable[[Server], None]) -> Message:
    """Do what a message asks of a fleet. Raises InvalidArgumentError, NotFoundError."""
    what = message.get("op")
    if what == "list":
        return {"servers": [describe(server) for side in Side for server in fleet.servers(side)]}
    if what == "add":
        return describe(fleet.add(Side(message["side"]), ServerConfig(message["url"], message["name"], message["ranks"])))
    server = fleet.remove(Side(message["side"]), message["name"])
    if server is None:
        raise NotFoundError(f"there is no {message['side']} server of the name {message['name']!r}")
    retire(server)
    return describe(server)


def read(request: Request) -> Message | Fault:
    """What a request to the admin endpoint asks for."""
    path = request.target.partition(b"?")[0].decode("latin-1")
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] != "servers" or len(parts) not in (1, 3):
        return Fault(404, "not_found", "there is /servers, and /servers/{side}/{name}")
    if len(parts) == 3:
        if request.method != b"DELETE":
            return Fault(405, "invalid_request_error", "a server can be deleted here: DELETE /servers/{side}/{name}")
        return {"op": "remove", "side": parts[1], "name": parts[2]} if parts[1] in tuple(Side) else _no_side(parts[1])
    if request.method == b"GET":
        return {"op": "list"}
    if request.method != b"POST":
        return Fault(405, "invalid_request_error", "there is GET /servers and POST /servers")
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        return faults.bad_request(f"the body is not valid JSON: {error.msg} at byte {error.pos}")
    return _added(body)


def _added(body: Any) -> Message | Fault:
    if not isinstance(body, dict):
        return faults.bad_request('give an object: {"side": …, "url": …}, and "name" and "ranks" where wanted')
    for name, value in body.items():
        if name not in _FIELDS:
            return faults.bad_request(f"there is no field {name}; there is {', '.join(_FIELDS)}", name)
        if type(value) is not _FIELDS[name]:
            return faults.bad_request(f"{name} is {value!r}; give {'a whole number' if _FIELDS[name] is int else 'a text'}", name)
    for name in ("side", "url"):
        if name not in body:
            return faults.bad_request(f"{name} is missing", name)
    if body["side"] not in tuple(Side):
        return _no_side(body["side"])
    return {"op": "add", "name": "", "ranks": 0, **body}


def _no_side(side: str) -> Fault:
    return faults.bad_request(f"side is {side!r}; give one of {', '.join(Side)}", "side")


def reason(error: OSError) -> str:
    """Why an address cannot be listened on; asyncio makes a long sentence of it that has the address again."""
    if error.errno == errno.EADDRINUSE:
        return "it is in use"
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error.strerror)


def taken(host: str, port: int, error: OSError) -> InvalidArgumentError:
    """What is said where the endpoint cannot be."""
    return InvalidArgumentError(f"admin.port {port} of {host} cannot be listened on: {reason(error)}; give another --admin-port")


def try_port(host: str, port: int) -> None:
    """Whether the endpoint could listen there now. Raises InvalidArgumentError."""
    try:
        for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            with socket.socket(family, kind, number) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
    except OSError as error:
        raise taken(host, port, error) from error


class AdminService:
    """`Service` of the admin endpoint's connections."""

    def __init__(self, handler: Handler, log: Log) -> None:
        """`handler` does what a message of `read` asks for; raises InvalidArgumentError, NotFoundError."""
        self.limits = LIMITS
        self.heads = render.Heads()
        self.fronts: set[Front] = set()
        self.known: dict[bytes, Known] = {}
        self.held = Held(LIMITS.connections * LIMITS.body_bytes)
        self.stopping = False
        self._handler = handler
        self._log = log
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises InvalidArgumentError where that cannot be."""
        loop = asyncio.get_running_loop()
        self.wheel = Wheel(loop)
        try:
            self._server = await loop.create_server(lambda: Front(self, loop), host, port)
        except OSError as error:
            raise taken(host, port, error) from error
        found = int(self._server.sockets[0].getsockname()[1])
        self._log.event("info", "admin_listening", host=host, port=found)
        return found

    async def close(self) -> None:
        """End, without waiting for anybody."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for front in list(self.fronts):
            front.drop()
        self.wheel.close()
        await asyncio.sleep(0)

    def open(self, front: Front, ask: Ask) -> Reply:
        """Service: what answers a request."""
        return Reply(front, ask)

    def answer(self, reply: Reply) -> None:
        """Service: answer it."""
        message = read(reply.request)
        if isinstance(message, Fault):
            reply.refuse(message)
            return
        task = asyncio.ensure_future(self._do(reply, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def out_of(self, what: str) -> Fault:
        """Service: there is always enough of everything here, by LIMITS."""
        return faults.no_room(self.held.limit, LIMITS.retry_after_s)

    async def _do(self, reply: Reply, message: Message) -> None:
        try:
            answer = await self._handler(message)
        except NotFoundError as error:
            reply.refuse(Fault(404, "not_found", str(error)))
        except InvalidArgumentError as error:
            reply.refuse(faults.bad_request(str(error)))
        except Exception as error:
            self._log.event("error", "admin_failed", error=type(error).__name__)
            reply.refuse(faults.internal())
        else:
            if message["op"] != "list":
                self._log.event("info", f"server_{message['op']}", side=answer["side"], server=answer["name"])
            status = 201 if message["op"] == "add" else 200
            reply.reply(status, b"content-type: application/json\r\n", orjson.dumps(answer))
