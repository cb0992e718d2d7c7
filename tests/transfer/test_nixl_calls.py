"""Every method of NIXL's agent with its contract, between two agents of this process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from expertwire import errors
from expertwire.compat.nixl import (
    nixl_agent,
    nixl_agent_config,
    nixl_thread_sync_t,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from expertwire.compat.nixl._bindings import nixlRegDList, nixlXferDList
from expertwire.transfer import TransferState
from transfer.nixl_peers import done, eventually

BLOCK = 256
BLOCKS = 16


class Pair:
    """Two agents that know each other, each with one registered tensor of 16 blocks."""

    def __init__(self) -> None:
        config = nixl_agent_config(enable_listen_thread=True, listen_port=0, capture_telemetry=True)
        self.one, self.two = nixl_agent("one", config), nixl_agent("two", config)
        self.here = torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8)
        self.there = torch.arange(BLOCKS * BLOCK, dtype=torch.int32).to(torch.uint8).reshape(BLOCKS, BLOCK)
        self.one.register_memory(self.here)
        self.two.register_memory(self.there)
        assert self.one.add_remote_agent(self.two.get_agent_metadata()) == b"two"
        assert self.two.add_remote_agent(self.one.get_agent_metadata()) == b"one"
        self.local = self.one.prep_xfer_dlist("", list(self.here))
        self.remote = self.one.prep_xfer_dlist("two", list(self.there))
        # What an agent keeps once it has needed it: places for more registrations, and a connection to itself.
        self.one.deregister_memory(self.one.register_memory(list(torch.zeros(4, 64))))
        self.one.prep_xfer_dlist("one", [self.here[0]])

    def make(self, operation: str = "READ", indices: Any = (0,), notif: Any = b"", **options: Any) -> Any:
        return self.one.make_prepped_xfer(operation, self.local, list(indices), self.remote, list(indices), notif, **options)

    def close(self) -> None:
        self.one.close()
        self.two.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """The pair, with nothing on its way."""
    shared.here.zero_()
    shared.one.notifs.clear()
    shared.two.notifs.clear()
    for agent in (shared.one, shared.two):
        agent.get_new_notifs()
    return shared


def test_how_an_agent_is_configured() -> None:
    config = nixl_agent_config()
    assert (config.enable_pthread, config.enable_listen, config.port, config.capture_telemetry) == (True, False, 8888, False)
    assert (config.num_threads, config.backends, config.sync_mode) == (0, ["UCX"], None)
    config = nixl_agent_config(False, True, 0, True, 4, ["LIBFABRIC"], nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    assert (config.enable_pthread, config.enable_listen, config.port, config.capture_telemetry) == (False, True, 0, True)
    assert (config.num_threads, config.backends, config.sync_mode) == (4, ["LIBFABRIC"], 1)
    with pytest.raises(TypeError, match="sync_mode is a str"):
        nixl_agent_config(sync_mode="strict")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name, and this one's is empty"):
        nixl_agent("")


def test_backends_are_names(pair: Pair) -> None:
    agent = pair.one
    assert {"UCX", "LIBFABRIC"} <= set(agent.get_plugin_list())
    assert agent.get_plugin_mem_types("UCX") == agent.get_backend_mem_types("UCX") == ["DRAM_SEG"]
    assert agent.get_plugin_params("UCX") == {}
    assert agent.get_backend_params("UCX")["provider"] == agent._agent.provider
    for ask, empty in ((agent.get_plugin_mem_types, []), (agent.get_plugin_params, {}), (agent.get_backend_mem_types, [])):
        assert ask("NOSUCH") == empty
    assert agent.get_backend_params("NOSUCH") == {}
    agent.create_backend("Mooncake", {"threads": "4"})
    assert agent.get_backend_params("Mooncake")["threads"] == "4"
    assert agent.get_backend_mem_types("Mooncake") == ["DRAM_SEG"]
    assert agent.query_xfer_backend(pair.make()) == "UCX"
    assert agent.query_xfer_backend(pair.make(backends=["Mooncake"])) == "Mooncake"


def test_lists_of_descriptors(pair: Pair) -> None:
    agent, tensor = pair.one, pair.here
    row = (tensor.data_ptr(), tensor.numel(), 0)
    for given, kind in ((tensor, None), ([tensor], None), ([row], "DRAM"), (numpy.array([row], dtype=numpy.uint64), "cpu")):
        assert list(agent.get_xfer_descs(given, kind)) == [row]
        assert list(agent.get_reg_descs(given, kind)) == [(*row, b"")]
    made = agent.get_reg_descs([(*row, "tag")], "DRAM")
    assert isinstance(made, nixlRegDList)
    assert agent.get_reg_descs(made) is made
    assert list(made) == [(*row, b"tag")]
    moved = agent.get_xfer_descs(made)
    assert isinstance(moved, nixlXferDList)
    assert agent.get_xfer_descs(moved) is moved
    assert list(moved) == [row]
    for given in ([row], numpy.array([row])):
        with pytest.raises(nixlInvalidParamError, match="do not say what memory they are of"):
            agent.get_xfer_descs(given)
    assert list(agent.get_xfer_descs(numpy.array([[4096, 8, 0, 16, 2]]), "DRAM")) == [(4096, 8, 0), (4112, 8, 0)]
    with pytest.raises(nixlInvalidParamError, match="stride at least"):
        agent.get_xfer_descs(numpy.array([[4096, 8, 0, 4, 2]]), "DRAM")
    with pytest.raises(nixlInvalidParamError, match="'SSD' is not known"):
        agent.get_reg_descs([row], "SSD")


def test_lists_travel_and_are_no_pickles(pair: Pair) -> None:
    for made in (pair.one.get_xfer_descs(list(pair.here)), pair.one.get_reg_descs([(4096, 64, 0, "x")], "DRAM")):
        assert pair.two.deserialize_descs(pair.one.get_serialized_descs(made)) == made
    data = pair.one.get_serialized_descs(pair.one.get_xfer_descs(pair.here))
    for wrong in (b"", b"X", data[1:-1], b"\x80\x04\x95pickle", data + b"\0", b"Y" + data[1:]):
        with pytest.raises(nixlMismatchError):
            pair.two.deserialize_descs(wrong)


def test_memory_is_registered_and_not(pair: Pair) -> None:
    agent, memory = pair.one, torch.zeros(3, 64, dtype=torch.uint8)
    registered = agent.register_memory([memory[0], memory[1]], backends=["UCX"])
    asked = [(row.data_ptr(), 64, 0, "") for row in memory]
    assert agent.query_memory(asked, "UCX", "DRAM") == [{"size": "64"}, {"size": "64"}, None]
    agent.deregister_memory(registered)
    assert agent.query_memory(asked, "UCX", mem_type="DRAM") == [None] * 3
    with pytest.raises(nixlNotFoundError):
        agent.deregister_memory(registered)
    with pytest.raises(nixlNotSupportedError, match="FILE memory cannot be asked about with backend 'POSIX'"):
        agent.query_memory([(0, 0, 0, "/etc/passwd")], "POSIX", mem_type="FILE")


@pytest.mark.parametrize("kind", ["VRAM", "cuda", "FILE", "OBJ", "BLOCK"])
def test_memory_of_other_kinds_is_refused_in_words(pair: Pair, kind: str) -> None:
    with pytest.raises(nixlNotSupportedError, match="VRAM" if kind == "cuda" else kind):
        pair.one.register_memory([(4096, 64, 0, "")], kind)
    with pytest.raises(nixlNotSupportedError, match="VRAM" if kind == "cuda" else kind):
        pair.one.prep_xfer_dlist("", [(4096, 64, 0)], kind)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_prepared_transfers(pair: Pair, operation: str) -> None:
    before = pair.there.clone()
    pair.here[:] = 255
    handle = pair.one.make_prepped_xfer(operation, pair.local, [3, 4, 9], pair.remote, numpy.array([5, 4, 0], dtype=numpy.int32), "note")
    with pytest.raises(nixlNotPostedError):
        pair.one.check_xfer_state(handle)
    assert pair.one.transfer(handle) in ("PROC", "DONE")
    done(pair.one, handle)
    assert pair.one.check_xfer_state(handle) == "DONE"
    expected_here, expected_there = torch.full_like(pair.here, 255), before.clone()
    if operation == "READ":
        expected_here[[3, 4, 9]] = before[[5, 4, 0]]
    else:
        expected_there[[5, 4, 0]] = 255
    assert torch.equal(pair.here, expected_here)
    eventually(lambda: pair.two.check_remote_xfer_done("one", b"note"))
    assert torch.equal(pair.there, expected_there)
    pair.there.copy_(before)
    pair.one.release_xfer_handle(handle)
    handle.release()
    pair.one.release_xfer_handle(handle)


def test_all_at_once(pair: Pair) -> None:
    local, remote = pair.one.get_xfer_descs(list(pair.here)), pair.one.get_xfer_descs(list(pair.there))
    handle = pair.one.initialize_xfer("READ", local, remote, b"two", b"")
    pair.one.transfer(handle)
    done(pair.one, handle)
    assert torch.equal(pair.here, pair.there)
    handle.release()


def test_to_itself(pair: Pair) -> None:
    pair.here[0] = 9
    remote = pair.one.prep_xfer_dlist("one", [pair.here[1]])
    local = pair.one.prep_xfer_dlist("NIXL_INIT_AGENT", [pair.here[0]])
    handle = pair.one.make_prepped_xfer("WRITE", local, [0], remote, [0], b"mine")
    pair.one.release_dlist_handle(local)
    pair.one.release_dlist_handle(remote)
    remote.release()
    pair.one.transfer(handle)
    done(pair.one, handle)
    assert int(pair.here[1].sum()) == 9 * BLOCK
    eventually(lambda: pair.one.check_remote_xfer_done("one", b"mine"))


def test_an_empty_notification_keeps_the_earlier_one(pair: Pair) -> None:
    handle = pair.make(notif=b"first")
    for notif in (b"", b"second", b"", "third\0"):
        pair.one.transfer(handle, notif)
        done(pair.one, handle)
    came: list[bytes] = []
    eventually(lambda: came.extend(pair.two.get_new_notifs().get("one", [])) or len(came) == 4)
    assert came == [b"first", b"second", b"second", b"third\0"]


@pytest.mark.parametrize(
    ("operation", "local", "remote", "says"),
    [
        ("COPY", [0], [0], "operation 'COPY' is not known"),
        ("READ", [0, 1], [0], "2 local and 1 remote descriptors do not pair"),
        ("READ", [16], [0], "local index 0 is 16; the prepared list has 16"),
        ("READ", [0], [-1], "remote index 0 is -1"),
        ("READ", [], [], "no local indices"),
        ("READ", [0.5], [0], "whole numbers"),
    ],
)
def test_what_is_no_transfer(pair: Pair, operation: str, local: list[int], remote: list[int], says: str) -> None:
    with pytest.raises(nixlInvalidParamError, match=says):
        pair.one.make_prepped_xfer(operation, pair.local, local, pair.remote, remote)


def test_what_pairs_and_what_is_known(pair: Pair) -> None:
    agent, row = pair.one, [(pair.there.data_ptr(), 8, 0)]
    mine, foreign = [(pair.here.data_ptr(), 4, 0)], [(1 << 40, 8, 0)]
    as_list = lambda rows: agent.get_xfer_descs(rows, "DRAM")  # noqa: E731
    with pytest.raises(nixlInvalidParamError, match="descriptor 0 has 4 bytes here and 8 there"):
        agent.initialize_xfer("READ", as_list(mine), as_list(row), "two")
    with pytest.raises(nixlInvalidParamError, match="1 local and 2 remote"):
        agent.initialize_xfer("READ", as_list(mine), as_list(row * 2), "two")
    with pytest.raises(nixlNotFoundError, match="'three'"):
        agent.initialize_xfer("READ", as_list(mine), as_list(mine), "three")
    with pytest.raises(nixlNotFoundError, match=r"descriptor 0 .*0x10000000000"):
        agent.initialize_xfer("READ", as_list(mine), as_list(foreign), "two")
    with pytest.raises(nixlNotFoundError, match=r"descriptor 1 .*0x10000000000"):
        agent.prep_xfer_dlist("", mine + foreign, "DRAM")
    for ask in (
        lambda: agent.prep_xfer_dlist(b"three", row, "DRAM"),
        lambda: agent.send_notif("three", b""),
        lambda: agent.make_connection("three"),
    ):
        with pytest.raises(nixlNotFoundError, match="'three'"):
            ask()
    with pytest.raises(nixlNotFoundError, match="names are UTF-8"):
        agent.send_notif(b"\xff", b"")
    for wrong in (None, 5):
        with pytest.raises(nixlInvalidParamError, match="notification is a"):
            agent.send_notif("two", wrong)  # type: ignore[arg-type]
        with pytest.raises(nixlInvalidParamError, match="name is a"):
            agent.send_notif(wrong, b"")  # type: ignore[arg-type]


def test_standalone_notifications(pair: Pair) -> None:
    sent = [b"", b"\0", b"a\0b", bytes(range(256)), b"last"]
    for each in sent:
        pair.one.send_notif(b"two", each, backend="UCX")
    came: list[bytes] = []
    eventually(lambda: came.extend(pair.two.get_new_notifs(["UCX"]).get("one", [])) or len(came) == len(sent))
    assert came == sent
    assert pair.two.get_new_notifs() == {}
    pair.one.send_notif("two", "text")
    eventually(lambda: pair.two.update_notifs().get("one") == [b"text"])
    assert pair.two.notifs == {"one": [b"text"]}, "kept until the caller takes it out"


def test_a_tag_takes_its_notification_alone(pair: Pair) -> None:
    for each in (b"r1:3", b"", b"r2:x", b"r1:4"):
        pair.one.send_notif("two", each)
    eventually(lambda: len(pair.two.update_notifs().get("one", [])) == 4)
    assert not pair.two.check_remote_xfer_done("three", b"r1")
    assert not pair.two.check_remote_xfer_done("one", b":3")
    assert pair.two.check_remote_xfer_done("one", b":3", tag_is_prefix=False)
    assert pair.two.notifs["one"] == [b"", b"r2:x", b"r1:4"]
    assert pair.two.check_remote_xfer_done(b"one", "r2")
    assert pair.two.check_remote_xfer_done("one", b"")
    assert pair.two.notifs["one"] == [b"r1:4"], "an empty one is taken out, too"
    assert not pair.two.check_remote_xfer_done("one", b"r2")


def test_threads_share_the_notifications(pair: Pair) -> None:
    """vLLM asks from its worker's thread and from a handshake's. Each comes to one of them."""
    total, came, stop = 2000, [Counter[bytes]() for _ in range(4)], threading.Event()

    def take(into: Counter[bytes]) -> None:
        while not stop.is_set():
            into.update(each for notifs in pair.two.get_new_notifs().values() for each in notifs)

    threads = [threading.Thread(target=take, args=(into,)) for into in came]
    for thread in threads:
        thread.start()
    for number in range(total):
        pair.one.send_notif("two", b"%d" % number)
    try:
        eventually(lambda: sum(sum(each.values()) for each in came) == total)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sum(came, Counter()) == Counter({b"%d" % number: 1 for number in range(total)})


def test_telemetry_of_a_transfer(pair: Pair) -> None:
    handle = pair.make(indices=[1, 2, 9])
    with pytest.raises(nixlNoTelemetryError, match="the transfer is ready"):
        pair.one.get_xfer_telemetry(handle)
    before = time.time()
    pair.one.transfer(handle)
    done(pair.one, handle)
    found = pair.one.get_xfer_telemetry(handle)
    assert found.totalBytes == 3 * BLOCK
    assert 1 <= found.descCount <= 3
    assert 1 <= found.postDuration <= found.xferDuration + 1
    assert before - 1 <= found.startTime / 1e6 <= time.time() + 1
    handle.release()
    with nixl_agent("quiet") as quiet:
        memory = torch.zeros(2, 64)
        quiet.register_memory(memory)
        own = quiet.initialize_xfer("READ", quiet.get_xfer_descs(memory[0]), quiet.get_xfer_descs(memory[1]), "quiet")
        quiet.transfer(own)
        done(quiet, own)
        with pytest.raises(nixlNoTelemetryError, match="capture_telemetry=True"):
            quiet.get_xfer_telemetry(own)
        assert quiet.check_xfer_state(own) == "DONE", "and the transfer is as good as it was"


def test_counters_and_estimates(pair: Pair) -> None:
    with nixl_agent("fresh") as fresh:
        memory = torch.zeros(2, 64)
        fresh.register_memory(memory)
        own = fresh.initialize_xfer("WRITE", fresh.get_xfer_descs(memory[0]), fresh.get_xfer_descs(memory[1]), "fresh", b"n")
        with pytest.raises(nixlNotSupportedError, match="no transfer of this agent has ended yet"):
            fresh.estimate_xfer_cost(own)
        for _ in range(3):
            fresh.transfer(own)
            done(fresh, own)
            assert fresh.check_xfer_state(own) == "DONE"
        duration, margin, method = fresh.estimate_xfer_cost(own)
        assert duration >= 1
        assert margin >= 1
        assert method == "UNKNOWN"
        eventually(lambda: len(fresh.update_notifs().get("fresh", [])) == 3)
        text = fresh.prometheus()
    for line in (
        'expertwire_transfers_posted_total{agent="fresh",operation="WRITE"} 3',
        'expertwire_transfers_done_total{agent="fresh",operation="WRITE"} 3',
        f'expertwire_transfer_bytes_total{{agent="fresh",operation="WRITE"}} {3 * 256}',
        'expertwire_notifications_total{agent="fresh",direction="received"} 3',
        'expertwire_telemetry_faults_total{agent="fresh"} 0',
    ):
        assert line in text.splitlines()


def test_metadata_by_hand(pair: Pair) -> None:
    data = pair.two.get_agent_metadata()
    assert pair.one.add_remote_agent(data) == b"two", "again is fine"
    with pytest.raises(nixlInvalidParamError):
        pair.one.add_remote_agent(pair.one.get_agent_metadata())
    for garbage in (b"", b"nixl", data[:-1], data + b"\0"):
        with pytest.raises(nixlMismatchError):
            pair.one.add_remote_agent(garbage)
    assert pair.one.check_remote_metadata("two")
    assert pair.one.check_remote_metadata(b"two", pair.one.get_xfer_descs(list(pair.there)))
    assert not pair.one.check_remote_metadata("two", pair.one.get_xfer_descs([(1 << 40, 8, 0)], "DRAM"))
    assert not pair.one.check_remote_metadata("three")
    pair.one.make_connection("two", ["UCX"])


def test_metadata_in_parts() -> None:
    with nixl_agent("target") as target, nixl_agent("initiator") as initiator:
        memory, mine = torch.ones(2, 64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        registered = [target.register_memory(each) for each in memory]
        initiator.register_memory(mine)
        pieces = [each.trim() for each in registered]
        first = target.get_partial_agent_metadata(registered[0], True, ["UCX"])
        assert initiator.add_remote_agent(first) == b"target"
        assert [initiator.check_remote_metadata("target", each) for each in pieces] == [True, False]
        with pytest.raises(nixlNotFoundError):
            initiator.initialize_xfer("READ", initiator.get_xfer_descs(mine), pieces[1], "target")
        initiator.add_remote_agent(target.get_partial_agent_metadata(registered[1], inc_conn_info=False))
        assert [initiator.check_remote_metadata("target", each) for each in pieces] == [True, True], "merged"
        handle = initiator.initialize_xfer("READ", initiator.get_xfer_descs(mine), pieces[1], "target")
        initiator.transfer(handle)
        done(initiator, handle)
        assert int(mine.sum()) == 64
        handle.release()
        unregistered = target.get_reg_descs(torch.zeros(64))
        with pytest.raises(nixlNotFoundError):
            target.get_partial_agent_metadata(unregistered)
        initiator.remove_remote_agent("target")
        assert not initiator.check_remote_metadata("target")
        with pytest.raises(nixlNotFoundError):
            initiator.remove_remote_agent(b"target")
        initiator.add_remote_agent(target.get_partial_agent_metadata([], inc_conn_info=True))
        assert initiator.check_remote_metadata("target")
        assert not initiator.check_remote_metadata("target", pieces[0])


def test_metadata_by_socket() -> None:
    config = nixl_agent_config(enable_listen_thread=True, listen_port=0, listen_token="secret")
    with nixl_agent("target", config) as target, nixl_agent("initiator", nixl_agent_config(listen_token=b"secret")) as initiator:
        port = target.get_listen_port()
        memory = torch.ones(64)
        registered = target.register_memory(memory)
        initiator.fetch_remote_metadata("target", "127.0.0.1", port)
        assert initiator.check_remote_metadata("target", registered.trim())
        assert not target.check_remote_metadata("initiator")
        initiator.send_local_metadata("127.0.0.1", port)
        assert target.check_remote_metadata("initiator")
        with pytest.raises(nixlMismatchError, match=r"'other' was asked for at 127.0.0.1, and 'target' is what was found"):
            initiator.fetch_remote_metadata("other", "127.0.0.1", port)
        initiator.invalidate_local_metadata("127.0.0.1", port)
        assert not target.check_remote_metadata("initiator")
        initiator.invalidate_local_metadata("127.0.0.1", port)
        initiator.send_partial_agent_metadata([], True, ["UCX"], "127.0.0.1", port)
        assert target.check_remote_metadata("initiator")
        with nixl_agent("initiator", nixl_agent_config(listen_token="secret")) as impostor:
            for call in (impostor.send_local_metadata, impostor.invalidate_local_metadata):
                with pytest.raises(nixlNotAllowedError, match="'initiator'"):
                    call("127.0.0.1", port)
        with nixl_agent("stranger") as stranger:
            for call in (stranger.send_local_metadata, stranger.invalidate_local_metadata):
                with pytest.raises(nixlNotAllowedError, match="another token"):
                    call("127.0.0.1", port)
            with pytest.raises(nixlNotAllowedError, match="another token"):
                stranger.fetch_remote_metadata("target", "127.0.0.1", port)
        assert target.check_remote_metadata("initiator")
        with pytest.raises(nixlUnknownError, match="'initiator' does not listen"):
            initiator.get_listen_port()
        with pytest.raises(nixlNotSupportedError, match="cannot listen for metadata"):
            nixl_agent("second", nixl_agent_config(enable_listen_thread=True, listen_port=port))
    with nixl_agent("late") as late:
        late._directory._timeout_ms = 100
        with pytest.raises(nixlRemoteDisconnectError, match="nobody listens"):
            late.send_local_metadata("127.0.0.1", port)


def test_metadata_by_store() -> None:
    from expertwire.transfer.store import tcp_store

    store: Any = tcp_store("127.0.0.1", 0, serve=True)
    other: Any = tcp_store("127.0.0.1", store.port)
    with (
        nixl_agent("target", nixl_agent_config(store=store)) as target,
        nixl_agent("initiator", nixl_agent_config(store=other)) as initiator,
    ):
        memory = torch.ones(2, 64)
        registered = [target.register_memory(each) for each in memory]
        target.send_partial_agent_metadata(registered[0], True, ["UCX"], label="label_1")
        initiator.fetch_remote_metadata("target", label="label_1")
        assert [initiator.check_remote_metadata("target", each.trim()) for each in registered] == [True, False]
        target.send_local_metadata()
        initiator.fetch_remote_metadata("target")
        assert [initiator.check_remote_metadata("target", each.trim()) for each in registered] == [True, True]
        target.invalidate_local_metadata()
        assert not initiator.check_remote_metadata("target"), "it is looked up again"
        with pytest.raises(nixlNotFoundError, match="has withdrawn"):
            initiator.fetch_remote_metadata("target")
        target.send_local_metadata()
        initiator.fetch_remote_metadata("target")
        assert initiator.check_remote_metadata("target")
    with nixl_agent("alone") as alone:
        for call in (alone.send_local_metadata, alone.invalidate_local_metadata, lambda: alone.fetch_remote_metadata("target")):
            with pytest.raises(nixlNotSupportedError, match="no store for metadata, and no address"):
                call()


def test_another_process_under_the_name_is_added_after_the_old_one_was_removed() -> None:
    with nixl_agent("reader") as reader:
        mine = torch.zeros(64, dtype=torch.uint8)
        reader.register_memory(mine)
        handles = []
        for value in (1, 2):
            with nixl_agent("server") as server:
                memory = torch.full((64,), value, dtype=torch.uint8)
                registered = server.register_memory(memory)
                if value == 2:
                    with pytest.raises(nixlNotAllowedError, match="'server'"):
                        reader.add_remote_agent(server.get_agent_metadata())
                    reader.remove_remote_agent("server")
                reader.add_remote_agent(server.get_agent_metadata())
                handles.append(reader.initialize_xfer("READ", reader.get_xfer_descs(mine), registered.trim(), "server"))
                reader.transfer(handles[-1])
                done(reader, handles[-1])
                assert int(mine.sum()) == 64 * value
        for handle in handles:
            handle.release()


def test_memory_views_are_refused_in_words(pair: Pair) -> None:
    for call in (pair.one.prep_mem_view, pair.one.release_mem_view):
        with pytest.raises(nixlNotSupportedError, match="memory view"):
            call("anything", mem_type="VRAM")


class Stub:
    """A transfer that does what it is told to, since the real one's faults cannot be called for."""

    operation, nbytes, run_count, stalled, agent = "READ", 4096, 1, False, "two"
    posted_ns = post_duration_ns = start_wall_ns = 0
    ended_ns: int | None = None

    def __init__(self, error: errors.ExpertwireError | None, state: TransferState = TransferState.FAILED) -> None:
        self.raises, self.is_in = error, state

    def state(self) -> TransferState:
        return self.is_in

    def check(self) -> TransferState:
        if self.raises is not None:
            raise self.raises
        return self.is_in

    def release(self) -> None:
        if self.is_in is TransferState.ACTIVE:
            raise errors.ActiveError("the READ from 'two' is on its way and owns its memory")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.PeerError("agent 'two' has died"), nixlRemoteDisconnectError),
        (errors.TransferError("descriptor 3 of 'two': stale key"), nixlBackendError),
        (errors.CapacityError("70000 runs, the limit is 65536"), nixlBackendError),
        (errors.DeadlineError("no room by the deadline"), nixlBackendError),
        (errors.CancelledRequestError("given up"), nixlCancelledError),
        (errors.StateError("the agent is closed"), nixlUnknownError),
    ],
)
def test_a_failure_is_raised_with_its_words_and_counted_once(pair: Pair, error: errors.ExpertwireError, kind: type[Exception]) -> None:
    handle = pair.make()
    handle._transfer, handle._counted = Stub(error), False
    before = pair.one.prometheus()
    for _ in range(2):
        with pytest.raises(kind, match=str(error)) as caught:
            pair.one.check_xfer_state(handle)
        assert caught.value.__cause__ is error
    name = f'expertwire_transfer_errors_total{{agent="one",error="{type(error).__name__}"}} '
    assert f"{name}1" in pair.one.prometheus()
    assert f"{name}1" not in before


def test_what_is_on_its_way_is_not_let_go(pair: Pair) -> None:
    """vLLM keeps the handle and the blocks then, and tries again."""
    handle = pair.make()
    handle._transfer = Stub(None, TransferState.ACTIVE)
    assert pair.one.check_xfer_state(handle) == "PROC"
    for release in (handle.release, lambda: pair.one.release_xfer_handle(handle)):
        with pytest.raises(nixlRepostActiveError, match="from 'two' is on its way and owns its memory"):
            release()
    with pytest.raises(nixlNoTelemetryError, match="the transfer is active"):
        pair.one.get_xfer_telemetry(handle)
    handle._transfer.stalled = True
    assert handle.stalled
    assert pair.one.check_xfer_state(handle) == "PROC", "stalled is a flag, not an end"


def test_a_closed_agent_says_so() -> None:
    agent = nixl_agent("closing", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    port = agent.get_listen_port()
    agent.close()
    agent.close()
    with nixl_agent("visitor") as visitor:
        visitor._directory._timeout_ms = 100
        with pytest.raises(nixlRemoteDisconnectError, match="nobody listens"):
            visitor.fetch_remote_metadata("closing", "127.0.0.1", port)


def test_an_agent_that_is_dropped_listens_no_more() -> None:
    agent = nixl_agent("dropped", nixl_agent_config(enable_listen_thread=True, listen_port=0))
    thread = agent._directory._listener._thread  # type: ignore[union-attr]
    del agent
    thread.join(10)
    assert not thread.is_alive()
