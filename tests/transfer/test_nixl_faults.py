"""What users of NIXL met, as far as it shows through its API: each must be right here, over both ways between processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy
import pytest
import torch

from expertwire.compat.nixl import (
    nixl_agent,
    nixl_agent_config,
    nixlBackendError,
    nixlNotFoundError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from transfer.nixl_peers import Process, done, eventually, serve

BLOCKS, NBYTES = 8, 4096
LOOK_S = 0.4  # how long it is looked whether something happens that must not


class World:
    """An agent of this process with one tensor, and others, which serve theirs."""

    def __init__(self, provider: str, stack: ExitStack, timeout_ms: int) -> None:
        self._stack, self.provider, self._timeout_ms = stack, provider, timeout_ms
        self.agent = stack.enter_context(nixl_agent("initiator", nixl_agent_config(capture_telemetry=True)))
        self.memory = torch.zeros(BLOCKS, NBYTES, dtype=torch.uint8)
        self.agent.register_memory(self.memory)
        self.local = self.agent.prep_xfer_dlist("", list(self.memory))

    def serve(self, name: str) -> tuple[Process, Any]:
        """A new process, which this one knows, and its prepared blocks."""
        process = self._stack.enter_context(Process(serve, name, BLOCKS, NBYTES, provider=self.provider, timeout_ms=self._timeout_ms))
        data, address = process.hear()
        assert self.agent.add_remote_agent(data) == name.encode()
        rows = [(address + index * NBYTES, NBYTES, 0) for index in range(BLOCKS)]
        return process, self.agent.prep_xfer_dlist(name, rows, "DRAM")

    def make(self, operation: str, remote: Any, index: int = 0, notif: bytes = b"") -> Any:
        return self.agent.make_prepped_xfer(operation, self.local, [index], remote, [index], notif)

    def move(self, operation: str, remote: Any, index: int = 0, notif: bytes = b"") -> None:
        handle = self.make(operation, remote, index, notif)
        self.agent.transfer(handle)
        done(self.agent, handle)
        handle.release()


@pytest.fixture(params=["local", "tcp"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("EXPERTWIRE_PROVIDER", request.param)
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "20000")
    with ExitStack() as stack:
        yield World(request.param, stack, 20_000)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Over tcp alone, where the other side has a part in it, with a deadline that passes."""
    monkeypatch.setenv("EXPERTWIRE_PROVIDER", "tcp")
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "600")
    with ExitStack() as stack:
        yield World("tcp", stack, 600)


def test_nothing_is_done_that_a_stopped_peer_has_not_got(tcp: World) -> None:
    """DONE is not said and the handle is not let go, until the peer goes on; then it is as if nothing had been."""
    process, remote = tcp.serve("target")
    tcp.move("WRITE", remote, 1)  # connected, and all is well
    tcp.memory[0] = 77
    handle = tcp.make("WRITE", remote, 0, b"written")
    process.signal(signal.SIGSTOP)
    try:
        assert tcp.agent.transfer(handle) == "PROC"
        ends = time.monotonic() + LOOK_S
        while time.monotonic() < ends:
            assert tcp.agent.check_xfer_state(handle) == "PROC"
        for _ in range(2):
            with pytest.raises(nixlRepostActiveError, match="'target' is on its way and owns its memory"):
                tcp.agent.release_xfer_handle(handle)
        with pytest.raises(nixlRepostActiveError, match="'target'"):
            tcp.agent.transfer(handle)
        eventually(lambda: handle.stalled)
        assert tcp.agent.check_xfer_state(handle) == "PROC", "stalled is told apart"
    finally:
        process.signal(signal.SIGCONT)
    done(tcp.agent, handle)
    assert not handle.stalled
    assert process.ask("block", 0) == [77]
    assert process.ask("wait", "initiator", 1) == [b"written"]
    assert tcp.agent.get_xfer_telemetry(handle).xferDuration >= LOOK_S * 1e6
    tcp.agent.release_xfer_handle(handle)


def test_a_notification_leaves_without_polling(world: World) -> None:
    process, remote = world.serve("target")
    handles = [world.make(operation, remote, 3, operation.encode()) for operation in ("READ", "WRITE")]
    for handle in handles:
        world.agent.transfer(handle)
    assert sorted(process.ask("wait", "initiator", 2)) == [b"READ", b"WRITE"], "and nobody has asked how they stand"
    for handle in handles:
        done(world.agent, handle)
        handle.release()


def test_a_dead_peer_is_nobody_elses_and_can_come_back(world: World) -> None:
    """Its error is its own transfers'; a post to it ends; its handles do no harm; restarted under its name it is reached again."""
    first, doomed = world.serve("doomed")
    _, healthy = world.serve("healthy")
    world.move("READ", doomed, 2)
    stale = world.make("READ", doomed, 2)
    good = world.make("READ", healthy, 4)
    first.signal(signal.SIGKILL)

    said = None

    def fails() -> bool:
        nonlocal said
        try:
            world.agent.transfer(stale)
            done(world.agent, stale)
        except (nixlRemoteDisconnectError, nixlBackendError, nixlRepostActiveError) as error:
            said = error
            return isinstance(error, nixlRemoteDisconnectError)
        return pytest.fail("a dead peer was read")

    eventually(fails)
    assert "'doomed'" in str(said)
    for _ in range(3):
        world.agent.transfer(good)
        done(world.agent, good)
    assert world.memory[4].unique().tolist() == [5]
    eventually(lambda: not connected(world.agent, "doomed"))
    assert connected(world.agent, "healthy")
    world.agent.remove_remote_agent("doomed")
    with pytest.raises((nixlNotFoundError, nixlRemoteDisconnectError), match="'doomed'"):
        world.agent.transfer(stale)
    eventually(lambda: released(stale))
    world.memory[2] = 0
    again, back = world.serve("doomed")
    world.move("READ", back, 2, b"back")
    assert world.memory[2].unique().tolist() == [3]
    assert again.ask("wait", "initiator", 1) == [b"back"]
    good.release()


def connected(agent: Any, name: str) -> bool:
    try:
        agent.make_connection(name)
    except nixlRemoteDisconnectError as error:
        return repr(name) not in str(error)
    return True


def released(handle: Any) -> bool:
    try:
        handle.release()
    except nixlRepostActiveError:
        return False
    return True


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps what was freed")
def test_writes_without_a_notification_leave_nothing_behind(world: World) -> None:
    process, remote = world.serve("target")
    handle = world.make("WRITE", remote, 5)

    def write(count: int) -> None:
        for _ in range(count):
            world.agent.transfer(handle)
            done(world.agent, handle)

    write(200)
    before = process.ask("resident")
    write(5000 if world.provider == "local" else 1000)
    world.agent.send_notif("target", b"last")
    assert process.ask("wait", "initiator", 1) == [b"last"]
    assert process.ask("notifs") == {}
    assert process.ask("resident") - before < 512 << 10
    handle.release()


def test_memory_that_was_deregistered_is_not_reached(world: World) -> None:
    """Whatever the initiator still believes: its transfer fails, and not a byte there changes."""
    process, remote = world.serve("target")
    before = process.ask("sum")
    process.ask("deregister")
    world.memory.fill_(255)
    for operation in ("WRITE", "READ"):
        with pytest.raises(nixlBackendError, match=r"'target'.*not registered any more"):
            world.move(operation, remote, 6, b"never")
    assert process.ask("sum") == before
    assert int(world.memory[6].sum()) == 255 * NBYTES
    assert process.ask("notifs") == {}
    world.agent.send_notif("target", b"alive")
    assert process.ask("wait", "initiator", 1) == [b"alive"]


def test_thousands_of_descriptors_in_one_transfer(world: World) -> None:
    """Hardly two of them neighbours, in one post, from lists that were prepared once. Over tcp a fifth, for the machine's sake."""
    count, each = 20_000 if world.provider == "local" else 4_000, 64
    with Process(serve, "wide", count, each, provider=os.environ["EXPERTWIRE_PROVIDER"]) as process:
        data, address = process.hear()
        world.agent.add_remote_agent(data)
        here = torch.zeros(count, each, dtype=torch.uint8)
        registered = world.agent.register_memory(here)
        table = numpy.zeros((count, 3), dtype=numpy.uint64)
        table[:, 1] = each
        table[:, 0] = address + numpy.arange(count, dtype=numpy.uint64) * each
        remote = world.agent.prep_xfer_dlist("wide", table, "DRAM")
        table[:, 0] = here.data_ptr() + numpy.arange(count, dtype=numpy.uint64) * each
        local = world.agent.prep_xfer_dlist("", table, "DRAM")
        order = numpy.random.default_rng(1).permutation(count).astype(numpy.int32)
        handle = world.agent.make_prepped_xfer("READ", local, numpy.arange(count, dtype=numpy.int32), remote, order, b"all")
        world.agent.transfer(handle)
        done(world.agent, handle)
        assert torch.equal(here[:, 0], torch.from_numpy((order % 251 + 1).astype(numpy.uint8)))
        assert world.agent.get_xfer_telemetry(handle).totalBytes == count * each
        assert process.ask("wait", "initiator", 1) == [b"all"]
        handle.release()
        world.agent.deregister_memory(registered)


def test_a_post_returns_before_its_bytes_are_moved(world: World) -> None:
    """16 MiB: were they moved inside, the post would always return with the end. A machine that takes the core away may make it so once."""
    nbytes = 16 << 20
    with Process(serve, "large", 1, nbytes, provider=world.provider) as process:
        data, address = process.hear()
        world.agent.add_remote_agent(data)
        here = torch.full((nbytes,), 9, dtype=torch.uint8)
        registered = world.agent.register_memory(here)
        there = world.agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
        handle = world.agent.initialize_xfer("WRITE", world.agent.get_xfer_descs(here), there, "large")
        seen = []
        while "PROC" not in seen:
            assert len(seen) < 5, "it is moved inside the post"
            seen.append(world.agent.transfer(handle))
            done(world.agent, handle)
        took = world.agent.get_xfer_telemetry(handle)
        assert took.totalBytes == nbytes
        assert process.ask("block", 0) == [9]
        handle.release()
        world.agent.deregister_memory(registered)


def test_threads_share_an_agent(world: World) -> None:
    """Each with transfers of its own to two agents, and notifications behind them: all arrive, and every byte is right."""
    names, rounds = ("left", "right"), 40
    served = {name: world.serve(name) for name in names}
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(rounds):
                world.move("READ", served[names[(index + turn) % 2]][1], index, b"%d.%d" % (index, turn))
                assert world.memory[index].unique().tolist() == [index + 1]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for side, name in enumerate(names):
        wanted = sorted(b"%d.%d" % (index, turn) for index in range(4) for turn in range(rounds) if (index + turn) % 2 == side)
        assert sorted(served[name][0].ask("wait", "initiator", len(wanted))) == wanted


def test_a_forked_child_is_told_so(world: World) -> None:
    """It reports nothing as done that never ran, and closes nothing of its parent's."""
    _, remote = world.serve("target")
    handle = world.make("READ", remote, 7)
    agent = world.agent
    calls = [
        lambda: agent.transfer(handle),
        lambda: agent.register_memory(world.memory),
        lambda: agent.send_notif("target", b""),
        agent.get_new_notifs,
        agent.get_agent_metadata,
        lambda: world.make("READ", remote, 7),
    ]
    child = os.fork()
    if child == 0:
        told = 0
        for call in calls:
            try:
                call()
            except nixlUnknownError as error:
                told += "fork" in str(error)
            except BaseException:
                os._exit(100)
        agent.close()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    world.agent.transfer(handle)
    done(world.agent, handle)
    assert world.memory[7].unique().tolist() == [8]
    handle.release()
