"""Metadata by a store: torch's own, and one that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from expertwire.errors import CapacityError, InvalidArgumentError, MismatchError, NotFoundError, PeerError
from expertwire.transfer.metadata import CARD_BYTES_MAX
from expertwire.transfer.store import MetadataStore, tcp_store

RECORD = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def served() -> Any:
    return tcp_store("127.0.0.1", 0, serve=True)


def test_records_by_name_and_label(served: Any) -> None:
    writer, reader = MetadataStore(served), MetadataStore(tcp_store("127.0.0.1", served.port))
    writer.publish("prefill", RECORD)
    writer.publish("prefill", b"part", "layer 1")
    writer.publish("prefill/layer 1", b"another agent")
    assert reader.fetch("prefill") == RECORD
    assert reader.fetch("prefill", "layer 1") == b"part"
    assert reader.fetch("prefill/layer 1") == b"another agent"
    writer.publish("prefill", b"newer")
    assert reader.fetch("prefill") == b"newer"
    assert not reader.withdrawn("prefill")
    writer.withdraw("prefill")
    assert reader.withdrawn("prefill")
    assert reader.withdrawn("prefill", "layer 1")
    assert not reader.withdrawn("prefill/layer 1")
    assert not reader.withdrawn("nobody")
    with pytest.raises(NotFoundError, match="agent 'prefill' has withdrawn what it had published under label 'layer 1'"):
        reader.fetch("prefill", "layer 1")
    writer.publish("prefill", b"back")
    assert reader.fetch("prefill") == b"back"
    writer.withdraw("nobody")


def test_who_asks_first_waits(served: Any) -> None:
    reader, answers = MetadataStore(tcp_store("127.0.0.1", served.port), "waits"), []
    begun = time.monotonic()
    with pytest.raises(NotFoundError, match="agent 'late' has published nothing within 60 ms"):
        reader.fetch("late", timeout_ms=60)
    assert time.monotonic() - begun < 5
    thread = threading.Thread(target=lambda: answers.append(reader.fetch("late", timeout_ms=10_000)))
    thread.start()
    MetadataStore(served, "waits").publish("late", RECORD)
    thread.join(10)
    assert answers == [RECORD]


def test_two_users_of_one_store_do_not_meet(served: Any) -> None:
    one, other = MetadataStore(served, "one"), MetadataStore(served, "other")
    one.publish("a", b"1")
    other.publish("a", b"2")
    one.withdraw("a")
    assert other.fetch("a") == b"2"


def test_what_is_not_ours_is_refused(served: Any) -> None:
    store = MetadataStore(served, "odd")
    served.set("odd/1/a/", b"pickle?")
    with pytest.raises(MismatchError, match="there are 7 bytes that no agent has published"):
        store.fetch("a")
    with pytest.raises(CapacityError, match=f"{CARD_BYTES_MAX + 1} bytes of agent 'a' is not published"):
        store.publish("a", bytes(CARD_BYTES_MAX + 1))
    with pytest.raises(InvalidArgumentError, match="a dict is no store: it has no method set"):
        MetadataStore({})  # type: ignore[arg-type]


def test_a_store_that_fails_says_so() -> None:
    class Failing:
        def set(self, key: str, value: bytes) -> None:
            raise dist.DistNetworkError("gone\nwith a long trace")

        def get(self, key: str) -> bytes:
            raise RuntimeError

        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("gone\nwith a long trace")

    store = MetadataStore(Failing())
    with pytest.raises(PeerError, match=r"did not take the metadata of agent 'a': gone$"):
        store.publish("a", b"")
    for ask in (store.fetch, store.withdrawn):
        with pytest.raises(PeerError, match=r"was asked for 'expertwire/transfer/1/a/' and does not answer: gone$"):
            ask("a")
    with pytest.raises(PeerError, match=r"the store at 127.0.0.1:1 cannot be reached"):
        tcp_store("127.0.0.1", 1, timeout_ms=200)


def test_the_room_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from expertwire.errors import UnavailableError\n"
        "from expertwire.transfer import listener, metadata, store, telemetry\n"
        "class Own(dict):\n    set = dict.__setitem__\n    get = dict.__getitem__\n"
        "    check = lambda self, keys: all(k in self for k in keys)\n"
        "own = store.MetadataStore(Own()); own.publish('a', b'1'); assert own.fetch('a') == b'1'\n"
        "try:\n    store.tcp_store('127.0.0.1', 1)\n"
        "except UnavailableError as error:\n    assert 'install torch' in str(error)\nelse:\n    raise SystemExit(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
