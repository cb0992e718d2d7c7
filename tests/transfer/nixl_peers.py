"""What tests of NIXL's agent share: waits with an end, and agents in processes of their own, which do as they are told."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness import server, stop

DEADLINE_S = 30.0
END_S = 5.0
PAUSE_S = 0.0005  # between two looks: the other processes have the same two cores


def eventually(true: Callable[[], Any]) -> None:
    """Ask until it is so."""
    ends = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < ends, "it is not so in time"
        time.sleep(PAUSE_S)


def done(agent: Any, handle: Any) -> None:
    """Poll as callers do. A state other than these two is none that callers expect."""
    ends = time.monotonic() + DEADLINE_S
    while (state := agent.check_xfer_state(handle)) != "DONE":
        assert state == "PROC"
        assert time.monotonic() < ends, "the transfer has not ended in time"


class Process:
    """A function of a module beside the tests, run as `function(connection, *arguments)` in a process of its own with that provider."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, provider: str, timeout_ms: int = 20_000) -> None:
        context = server()
        self.line, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, function, arguments, provider, timeout_ms), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """What it says next. Its exceptions are raised here."""
        assert self.line.poll(DEADLINE_S), "it says nothing in time"
        good, what = self.line.recv()
        assert good, what
        return what

    def ask(self, *command: Any) -> Any:
        """Tell it something, and what it answers."""
        self.line.send(command)
        return self.hear()

    def ask_for(self, what: Any) -> Any:
        """The same of one thing."""
        self.line.send(what)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT or SIGKILL; it has got the first and the last one when this returns."""
        assert self._process.pid is not None
        if number is signal.SIGSTOP:
            stop(self._process.pid)
            return
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join(END_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            self.signal(signal.SIGCONT)
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class Line:
    """A process's side: `say` and `hear` go to the test."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, what: Any = None) -> None:
        self._connection.send((True, what))

    def hear(self) -> Any:
        assert self._connection.poll(DEADLINE_S), "the test says nothing in time"
        return self._connection.recv()

    def commands(self) -> Any:
        """What the test asks, until it is over."""
        while True:
            try:
                yield self._connection.recv()
            except (EOFError, OSError):
                return


def _run(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], provider: str, timeout_ms: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server of all ranks may have been started by a test that blocks it
    os.environ["EXPERTWIRE_PROVIDER"] = provider
    os.environ["EXPERTWIRE_TIMEOUT_MS"] = str(timeout_ms)
    import torch

    torch.set_num_threads(1)
    try:
        function(Line(connection), *arguments)
        connection.send((True, "over"))
    except (EOFError, BrokenPipeError):
        pass  # the test is over before this is
    except BaseException:
        connection.send((False, traceback.format_exc()))


def serve(line: Line, name: str, blocks: int, nbytes: int) -> None:
    """An agent with one registered tensor [blocks, nbytes], whose block i is full of i + 1; it does what the test asks it to."""
    import torch

    from expertwire.compat.nixl import nixl_agent

    memory = (torch.arange(blocks, dtype=torch.int32) % 251 + 1).to(torch.uint8).repeat_interleave(nbytes).reshape(blocks, nbytes)
    with nixl_agent(name) as agent:
        registered = agent.register_memory(memory)
        line.say((agent.get_agent_metadata(), memory.data_ptr()))
        for command, *rest in line.commands():
            if command == "notifs":
                line.say(agent.get_new_notifs())
            elif command == "wait":  # as many from one agent as there are to be
                eventually(lambda rest=rest: len(agent.update_notifs().get(rest[0], [])) >= rest[1])
                line.say(agent.notifs.pop(rest[0]))
            elif command == "block":
                line.say(sorted({int(memory[rest[0]].min()), int(memory[rest[0]].max())}))
            elif command == "sum":
                line.say(int(memory.sum(dtype=torch.int64)))
            elif command == "deregister":
                agent.deregister_memory(registered)
                line.say()
            elif command == "resident":
                with open("/proc/self/statm") as file:
                    line.say(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
