"""Keys that are of no registration any more, or never were of one: an error of who uses them, whatever the provider would do with them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from expertwire import _native
from expertwire.errors import ExpertwireError
from fabric.provider_peer import DATA, DATA_BYTES, Pair, Side, pair
from fabric.provider_setups import SETUPS, Setup

OTHER = 5
# Where in a key which number stands: (offset, format, what is added).
LIBFABRIC_FIELDS = {"registration": (8, "<I", 1), "base": (16, "<Q", 4096), "bytes": (24, "<Q", 4096), "key": (32, "<Q", 1000)}
LOCAL_FIELDS = {"registration": (16, "<Q", 1), "offset": (24, "<Q", 4096), "bytes": (32, "<Q", 4096), "fd": (4, "<i", 1)}


@pytest.fixture(params=["local", "tcp-system-message", "tcp-wheel-atomic", "shm-wheel"])
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    setup: Setup = SETUPS[request.param]
    setup.require()
    with pair(setup.kind, setup.options) as found:
        yield found


def connection_is_well(both: Pair) -> None:
    both.side.store(0, b"\x21" * 4096)
    assert both.run("write", local=DATA, remote=DATA, bytes=4096) == "ok"
    assert both.ask("load", 0, 4096) == b"\x21" * 4096


def test_a_key_that_is_heard_of_only_after_it_was_taken_back_is_an_error_and_no_more(both: Pair) -> None:
    key = both.ask("register", OTHER, DATA_BYTES)
    both.ask("deregister", OTHER)
    both.probe.add_remote_region(0, OTHER, key)
    for kind in ("write", "read"):
        assert both.run(kind, local=DATA, remote=OTHER, bytes=4096) == "bad_key"
    assert both.run("signal", remote=OTHER, operand=1) == "bad_key"
    connection_is_well(both)
    both.probe.add_remote_region(0, OTHER, both.ask("register", OTHER, DATA_BYTES))
    assert both.run("write", local=DATA, remote=OTHER, bytes=4096) == "ok"


def test_a_key_that_is_not_what_its_owner_gave_out_reaches_nothing(both: Pair) -> None:
    key = both.ask("register", OTHER, DATA_BYTES)
    fields = LOCAL_FIELDS if both.probe.capabilities()["provider"] == "local" else LIBFABRIC_FIELDS
    for name, (offset, form, more) in fields.items():
        forged = bytearray(key)
        struct.pack_into(form, forged, offset, struct.unpack_from(form, forged, offset)[0] + more)
        if fields is LOCAL_FIELDS and name != "registration":
            with pytest.raises(ExpertwireError, match="other memory than its owner has registered"):
                both.probe.add_remote_region(0, OTHER, bytes(forged))
            continue
        both.probe.add_remote_region(0, OTHER, bytes(forged))
        assert both.run("write", local=DATA, remote=OTHER, bytes=4096) == "bad_key", name
    both.probe.add_remote_region(0, OTHER, key)
    assert both.run("write", local=DATA, remote=OTHER, bytes=4096) == "ok"
    connection_is_well(both)


def test_memory_of_a_callers_own_is_reached_as_it_was_registered_and_not_beside_it() -> None:
    """Over cross-memory attach the kernel would let a key through that names any memory of its owner's."""
    side = Side("local", {})
    side.probe.create_region(OTHER, 4096, mappable=False)
    side.probe.add_peer(0, side.probe.address())
    key = side.probe.region_key(OTHER)
    for name, offset, form, more in (("address", 40, "<Q", 4096), ("bytes", 32, "<Q", 4096), ("access", 12, "<I", -1)):
        forged = bytearray(key)
        struct.pack_into(form, forged, offset, struct.unpack_from(form, forged, offset)[0] + more)
        with pytest.raises(ExpertwireError, match="other memory than its owner has registered"):
            side.probe.add_remote_region(0, 6, bytes(forged))
        assert name
    later = bytearray(key)
    struct.pack_into("<Q", later, 16, struct.unpack_from("<Q", later, 16)[0] + 1)  # of the registration that is to come
    side.probe.add_remote_region(0, 6, bytes(later))
    assert side.probe.deregister_region(OTHER)
    side.probe.create_region(OTHER, 4096, mappable=False)
    assert side.probe.post("write", 0, 0, local=DATA, remote=6, bytes=8)[:2] == ("failed", "bad_key")
    side.probe.close()


def test_what_is_read_and_written_within_one_process_is_taken_back_there_too() -> None:
    """Nobody is told of it, for there is nobody else; and nothing is closed that something of its own is on its way to."""
    setup = SETUPS["tcp-wheel-atomic"]
    setup.require()
    side = Side(setup.kind, setup.options)
    probe: _native.ProviderProbe = side.probe
    probe.add_peer(0, probe.address())
    probe.create_region(OTHER, DATA_BYTES)
    key = probe.region_key(OTHER)
    probe.add_remote_region(0, 7, key)
    ended: list[str] = []
    while probe.post("write", 0, 0, local=DATA, remote=7, bytes=DATA_BYTES)[0] == "again":  # it is being connected
        probe.poll()
    while not probe.deregister_region(OTHER):
        ended += [entry[2] for entry in probe.poll()[0]]
    assert ended == ["ok"]
    assert probe.post("read", 0, 0, local=DATA, remote=7, bytes=8)[:2] == ("failed", "bad_key")
    probe.add_remote_region(0, 8, key)
    assert probe.post("read", 0, 0, local=DATA, remote=8, bytes=8)[:2] == ("failed", "bad_key")
    probe.close()
