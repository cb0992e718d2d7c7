"""NIXL's documented two-agent flows, and what vLLM's NixlConnector calls, in its order: real processes, both ways between them."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch

from expertwire.compat.nixl import nixl_agent, nixl_agent_config, nixlNotFoundError
from transfer.nixl_peers import Line, Process, done, eventually

HOST = "127.0.0.1"
PROVIDERS = pytest.mark.parametrize("provider", ["local", "tcp"])

# What the target of the longer flow is told by notifications: reads, then writes, then the same reads again.
READS = [b"Read %d,%d,%d" % (index, index + 4, index + 8) for index in range(4)]
WRITES = [b"Write 12,13", b"Write 14,15"]


@contextmanager
def initiator_of(body: Callable[[Line], None], provider: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Process, nixl_agent]]:
    """A target that does `body` in a process of its own, and an agent here, with a listener each."""
    monkeypatch.setenv("EXPERTWIRE_PROVIDER", provider)
    with Process(body, provider=provider) as target, nixl_agent("initiator", nixl_agent_config(True, True, 0)) as agent:
        yield target, agent


def first_word(agent: nixl_agent) -> bytes:
    """The first notification of the target's, once it is here."""
    came: dict[str, list[bytes]] = {}
    eventually(lambda: came.update(agent.get_new_notifs()) or came)
    return came["target"][0]


def basic_target(line: Line) -> None:
    agent = nixl_agent("target", nixl_agent_config(True, True, 0))
    rows = torch.ones(10, 16)
    registered = agent.register_memory(rows)
    line.say(agent.get_listen_port())
    described = agent.get_serialized_descs(agent.get_xfer_descs([rows[index] for index in range(10)]))
    eventually(lambda: agent.check_remote_metadata("initiator"))
    agent.send_notif("initiator", described)
    eventually(lambda: b"Done_reading" in agent.get_new_notifs().get("initiator", []))
    line.hear()
    line.say(agent.check_remote_metadata("initiator"))
    agent.deregister_memory(registered)
    agent.close()


@PROVIDERS
def test_the_basic_flow(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads what the other has registered, told where it lies by a notification; metadata by the target's listener."""
    with initiator_of(basic_target, provider, monkeypatch) as (target, agent):
        port = target.hear()
        rows = torch.zeros(10, 16)
        registered = agent.register_memory(rows)
        assert registered
        agent.fetch_remote_metadata("target", HOST, port)
        agent.send_local_metadata(HOST, port)
        theirs = agent.deserialize_descs(first_word(agent))
        mine = agent.get_xfer_descs([rows[index] for index in range(10)])
        eventually(lambda: agent.check_remote_metadata("target"))
        handle = agent.initialize_xfer("READ", mine, theirs, "target", "Done_reading")
        assert agent.transfer(handle) != "ERR"
        done(agent, handle)
        assert torch.equal(rows, torch.ones(10, 16))
        agent.remove_remote_agent("target")
        agent.release_xfer_handle(handle)
        agent.invalidate_local_metadata(HOST, port)
        assert target.ask() is False, "the target knows the initiator no more"
        agent.deregister_memory(registered)
        assert target.hear() == "over"


def expanded_target(line: Line) -> None:
    agent = nixl_agent("target", nixl_agent_config(True, True, 0, backends=["UCX"]))
    rows = torch.ones(16, 32)
    registered = agent.register_memory(rows)
    line.say(agent.get_listen_port())
    eventually(lambda: agent.check_remote_metadata("initiator"))
    agent.send_notif("initiator", agent.get_serialized_descs(agent.get_xfer_descs([rows[index] for index in range(16)])))
    line.say((rows.data_ptr(), rows.shape[1] * rows.element_size()))
    expected, came = [*READS, *WRITES, *(each + b" again" for each in READS)], []
    eventually(lambda: came.extend(agent.get_new_notifs().get("initiator", [])) or len(came) == len(expected))
    line.say((sorted(came) == sorted(expected), [int(row.sum()) for row in rows]))
    line.hear()
    agent.deregister_memory(registered)
    agent.close()


@PROVIDERS
def test_the_longer_flow(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared lists by index, whole lists as tuples and arrays, several on their way, and the same handles posted again."""
    with initiator_of(expanded_target, provider, monkeypatch) as (target, agent):
        port = target.hear()
        rows = torch.zeros(16, 32)
        registered = agent.register_memory(rows)
        agent.send_local_metadata(HOST, port)
        agent.fetch_remote_metadata("target", HOST, port)
        described = first_word(agent)
        base, nbytes = target.hear()
        local = agent.prep_xfer_dlist("", agent.get_xfer_descs([rows[index] for index in range(16)]))
        remote = agent.prep_xfer_dlist("target", agent.deserialize_descs(described))
        reads = []
        for index, notif in enumerate(READS):
            chosen = [index, index + 4, index + 8]
            reads.append(agent.make_prepped_xfer("READ", local, chosen, remote, chosen[::-1], notif))
        half = nbytes // 2
        writes = []
        for notif, pair in zip(WRITES, ((12, 13), (14, 15)), strict=True):
            mine = [(rows[index].data_ptr() + half * (index % 2), half, 0) for index in pair]
            theirs = [(base + index * nbytes + half * (index % 2), half, 0) for index in pair]
            given: list[Any] = [mine, theirs] if pair[0] == 12 else [numpy.array(each, dtype=numpy.uint64) for each in (mine, theirs)]
            lists = [agent.get_xfer_descs(each, mem_type="cpu") for each in given]
            writes.append(agent.initialize_xfer("WRITE", *lists, "target", notif))
        for handles in (reads, writes):
            for handle in handles:
                assert agent.transfer(handle) != "ERR"
            for handle in handles:
                done(agent, handle)
        for handle, notif in zip(reads, READS, strict=True):
            agent.transfer(handle, notif + b" again")
        for handle in reads:
            done(agent, handle)
        assert [int(row.sum()) for row in rows] == [32] * 12 + [0] * 4
        assert target.hear() == (True, [32] * 12 + [16] * 4)
        for handle in (*reads, *writes):
            agent.release_xfer_handle(handle)
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
        agent.invalidate_local_metadata(HOST, port)
        target.line.send(None)
        agent.deregister_memory(registered)
        assert target.hear() == "over"


def parts_target(line: Line) -> None:
    agent = nixl_agent("target", nixl_agent_config(True, True, 0))
    memory = torch.arange(20, dtype=torch.uint8).repeat_interleave(256).reshape(20, 256)
    sets = [agent.register_memory([(row.data_ptr(), 256, 0, "test") for row in half], "DRAM") for half in (memory[:10], memory[10:])]
    line.say([agent.get_serialized_descs(each.trim()) for each in sets])
    for port, index in line.commands():
        agent.send_partial_agent_metadata(sets[index], True, ["UCX"], HOST, port)
        line.say()
        eventually(lambda: agent.check_remote_xfer_done("initiator", b"UUID"))
        line.say("told")
    agent.close()


@PROVIDERS
def test_the_flow_of_metadata_in_parts(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not sent is not found; once it was, it is."""
    with initiator_of(parts_target, provider, monkeypatch) as (target, agent):
        theirs = [agent.deserialize_descs(each) for each in target.hear()]
        memory = torch.zeros(10, 256, dtype=torch.uint8)
        mine = agent.register_memory([(row.data_ptr(), 256, 0, "test") for row in memory], "DRAM").trim()
        for index in range(2):
            with pytest.raises(nixlNotFoundError):
                agent.initialize_xfer("READ", mine, theirs[index], "target", b"UUID1")
            target.ask(agent.get_listen_port(), index)
            assert agent.check_remote_metadata("target", theirs[index])
            handle = agent.initialize_xfer("READ", mine, theirs[index], "target", b"UUID1")
            agent.transfer(handle)
            done(agent, handle)
            assert target.hear() == "told"
            assert memory[:, 0].tolist() == list(range(10 * index, 10 * index + 10))
            agent.release_xfer_handle(handle)


# vLLM's NixlConnector: layers of one tensor each, cut into blocks; D pulls P's blocks, or P pushes into D's.

LAYERS, VLLM_BLOCKS, BLOCK_BYTES = 3, 24, 2048


class Worker:
    """One side, as vLLM sets its connector up."""

    def __init__(self, fill: int, **options: Any) -> None:
        self.agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(capture_telemetry=True, **options))
        self.caches = [torch.full((VLLM_BLOCKS, BLOCK_BYTES), fill + layer, dtype=torch.uint8) for layer in range(LAYERS)]
        ranges = [(cache.data_ptr(), cache.numel(), 0, "") for cache in self.caches]
        self.registered = self.agent.get_reg_descs(ranges, "DRAM")
        self.agent.register_memory(self.registered, backends=["UCX"])
        self.addresses = [cache.data_ptr() for cache in self.caches]
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.blocks(self.addresses))

    def blocks(self, addresses: list[int]) -> Any:
        """Of all layers, layer by layer, as the array that vLLM makes."""
        table = numpy.zeros((len(addresses) * VLLM_BLOCKS, 3), dtype=numpy.uint64)
        table[:, 0] = (numpy.array(addresses)[:, None] + numpy.arange(VLLM_BLOCKS) * BLOCK_BYTES).ravel()
        table[:, 1] = BLOCK_BYTES
        return self.agent.get_xfer_descs(table, "DRAM")

    def add(self, metadata: bytes, addresses: list[int]) -> tuple[Any, Any]:
        """(name as `add_remote_agent` gives it, prepared blocks)."""
        name = self.agent.add_remote_agent(metadata)
        return name, self.agent.prep_xfer_dlist(name, self.blocks(addresses))

    @staticmethod
    def ids(blocks: list[int]) -> Any:
        """Of those blocks in every layer."""
        return (numpy.arange(LAYERS)[:, None] * VLLM_BLOCKS + numpy.array(blocks)).ravel()

    def close(self) -> None:
        self.agent.release_dlist_handle(self.local)
        self.agent.deregister_memory(self.registered)
        self.agent.close()


def prefill(line: Line, rank: int) -> None:
    worker = Worker(10 * rank + 1, num_threads=4)
    line.say((worker.agent.get_agent_metadata(), worker.addresses))
    came: Counter[bytes] = Counter()
    stop, held = threading.Event(), threading.Lock()

    def look() -> None:
        for notifs in worker.agent.get_new_notifs().values():
            with held:
                came.update(notifs)

    def beat() -> None:
        while not stop.wait(0.001):
            look()

    thread = threading.Thread(target=beat)
    thread.start()
    for command in line.commands():
        if command == "pushed":
            line.say([int(cache[0, 0]) for cache in worker.caches])
        else:
            eventually(lambda command=command: look() or came == command)
            line.say(dict(came))
            with held:
                came.clear()
    stop.set()
    thread.join()
    worker.close()


@PROVIDERS
def test_vllm_pulls_and_pushes_blocks(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_PROVIDER", provider)
    with Process(prefill, 0, provider=provider) as p0, Process(prefill, 1, provider=provider) as p1:
        decode = Worker(100, backends=["UCX"])
        remotes = []
        for process in (p0, p1):
            name, side = decode.add(*process.hear())
            assert isinstance(name, bytes)
            remotes.append((process, name, side))
        running: dict[str, list[Any]] = {}
        for rank, (_, _, side) in enumerate(remotes):
            for request in range(4):
                mine, theirs = [4 * request + 12 * rank % 8, 4 * request + 1], [request, 20 + request]
                handle = decode.agent.make_prepped_xfer(
                    "READ", decode.local, decode.ids(mine), side, decode.ids(theirs), notif_msg=f"req{rank}.{request}:2".encode()
                )
                decode.agent.transfer(handle)
                running.setdefault(f"req{rank}.{request}", []).append(handle)
        moved = 0
        while running:
            for request, handles in list(running.items()):
                left = []
                for handle in handles:
                    state = decode.agent.check_xfer_state(handle)
                    if state == "DONE":
                        took = decode.agent.get_xfer_telemetry(handle)
                        assert took.xferDuration > 0
                        assert took.postDuration > 0
                        assert took.descCount > 0
                        moved += took.totalBytes
                        decode.agent.release_xfer_handle(handle)
                    else:
                        assert state == "PROC"
                        left.append(handle)
                running[request] = left
                if not left:
                    del running[request]
        assert moved == 2 * 4 * 2 * LAYERS * BLOCK_BYTES
        assert {int(value) for value in decode.caches[2].unique()} == {3, 13, 102}
        for rank, (process, name, _) in enumerate(remotes):
            decode.agent.send_notif(name, notif_msg=b"HB:all is well")
            decode.agent.send_notif(name, notif_msg=f"req{rank}.9:2".encode())  # all of its blocks were cached: nothing is moved
            wanted = Counter({f"req{rank}.{request}:2".encode(): 1 for request in (0, 1, 2, 3, 9)})
            wanted[b"HB:all is well"] += 1
            assert process.ask_for(wanted) == dict(wanted)
        handle = decode.agent.make_prepped_xfer(
            "WRITE", decode.local, decode.ids([23]), remotes[0][2], decode.ids([0]), notif_msg=b"pushed"
        )
        decode.agent.transfer(handle)
        assert p0.ask_for(Counter({b"pushed": 1})) == {b"pushed": 1}
        assert p0.ask_for("pushed") == [100, 101, 102]
        done(decode.agent, handle)
        decode.agent.release_xfer_handle(handle)
        for _, name, side in remotes:
            decode.agent.release_dlist_handle(side)
            decode.agent.remove_remote_agent(name)
        decode.close()
