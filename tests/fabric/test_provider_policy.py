"""Ordering classes and gate policy: data in, data out, so every kind of NIC can be asked for here."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from expertwire import _native
from expertwire.errors import UnavailableError
from expertwire.fabric import discover
from fabric.provider_setups import SETUPS, Setup

HUGE = 2**64 - 1
ORDERED = {"write_after_write": True, "send_after_write": True, "waw_bytes_max": HUGE, "atomics": True, "delivery_complete": True}


def policy(provider: str, settings: dict[str, Any] | None = None, **granted: Any) -> dict[str, Any]:
    return dict(_native.gate_facts({"provider": provider, **granted}, settings or {}))


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "tcp", "cxi", "shm"])
def test_advertised_order_is_not_trusted_where_it_was_seen_broken_or_cannot_be_known(provider: str) -> None:
    found = policy(provider, **ORDERED)
    assert (found["ordering"], found["safe"], found["delivery_complete"]) == ("delivery_gated", True, True)


@pytest.mark.parametrize("provider", ["cxi", "shm"])
def test_trust_order_makes_shm_and_cxi_ordered_but_not_with_rendezvous_changed(provider: str) -> None:
    trusting = {"trust_order": True}
    found = policy(provider, trusting, **ORDERED)
    assert (found["ordering"], found["delivery_complete"]) == ("ordered", False)
    for changed in ("FI_CXI_RDZV_THRESHOLD=0", "FI_CXI_RDZV_GET_MIN=1 FI_CXI_RDZV_PROTO=alt_read"):
        pulled = policy(provider, {**trusting, "rendezvous": changed}, **ORDERED)
        assert pulled["ordering"] == ("delivery_gated" if provider == "cxi" else "ordered")


def test_trust_order_changes_nothing_for_tcp() -> None:
    assert policy("tcp;ofi_rxm", {"trust_order": True}, **ORDERED)["ordering"] == "delivery_gated"


def test_class_a_needs_the_bit_that_fits_the_signal_a_size_and_one_endpoint() -> None:
    assert policy("verbs;ofi_rxm", **ORDERED)["ordering"] == "ordered"
    for change in ({"write_after_write": False}, {"waw_bytes_max": 0}, {"endpoints": 2}):
        assert policy("verbs;ofi_rxm", **{**ORDERED, **change})["ordering"] != "ordered"
    by_message = {**ORDERED, "atomics": False}
    assert policy("verbs;ofi_rxm", **by_message)["ordering"] == "ordered"
    assert policy("verbs;ofi_rxm", **{**by_message, "send_after_write": False})["ordering"] != "ordered"
    assert policy("shm", {"trust_order": True}, **{**ORDERED, "endpoints": 2})["ordering"] == "delivery_gated"


def test_a_delivery_complete_that_is_not_kept_is_not_gated_on() -> None:
    unordered = {**ORDERED, "write_after_write": False}
    assert not policy("verbs;ofi_rxm", **unordered)["safe"]  # ofi_rxm grants it, verbs reads it as an ordinary completion
    direct = policy("efa", fabric="efa-direct", immediates=True, delivery_complete=True)
    assert (direct["ordering"], direct["safe"], direct["delivery_complete"]) == ("counted_immediates", True, True)
    assert not policy("efa", fabric="efa-direct", delivery_complete=True)["safe"]
    assert policy("efa", fabric="efa", delivery_complete=True) == policy("efa", delivery_complete=True)
    assert policy("efa", delivery_complete=True)["ordering"] == "delivery_gated"
    assert not policy("efa", **{**ORDERED, "delivery_complete": False})["safe"]  # whatever order it should claim


def test_counted_immediates_where_they_cost_less_or_are_asked_for() -> None:
    plain = {"delivery_complete": True, "atomics": True, "immediates": True}
    cheaper = {row["name"] for row in _native.provider_table() if row["prefers_counting"]}
    for name in ("tcp;ofi_rxm", "efa", "shm"):
        expected = "counted_immediates" if name.partition(";")[0] in cheaper else "delivery_gated"
        assert policy(name, **plain)["ordering"] == expected
        assert policy(name, {"ordering": "gated"}, **plain)["ordering"] == "delivery_gated"
        counted = policy(name, {"ordering": "counted", "trust_immediates": True}, **plain)
        assert (counted["ordering"], counted["safe"], counted["delivery_complete"]) == ("counted_immediates", True, True)
    assert not policy("tcp", {"ordering": "counted"}, **{**plain, "immediates": False})["safe"]
    assert policy("verbs", {"ordering": "gated"}, **{**plain, "send_after_write": False})["ordering"] == "counted_immediates"


def test_immediates_that_may_end_their_target_are_counted_only_where_that_is_said() -> None:
    """A rank of the soak died of it: libfabric's rxm reads address 0 where such a write breaks off."""
    granted = {"delivery_complete": True, "atomics": True, "immediates": True}
    refused = policy("tcp;ofi_rxm", {"ordering": "counted"}, **granted)
    assert not refused["safe"]
    assert "takes its target along" in refused["why"]
    assert "EXPERTWIRE_TRUST_IMMEDIATES=1" in refused["why"]
    assert not policy("tcp;ofi_rxm", **{**granted, "delivery_complete": False})["safe"]
    assert policy("efa", {"ordering": "counted"}, **granted)["safe"]


def test_a_provider_without_a_row_is_gated_or_not_used() -> None:
    assert policy("opx", {"trust_order": True}, **ORDERED)["ordering"] == "delivery_gated"
    assert not policy("opx", {"trust_order": True}, **{**ORDERED, "delivery_complete": False})["safe"]


def test_every_row_names_its_source_and_only_what_was_run_is_tested() -> None:
    rows = {row["name"]: row for row in _native.provider_table()}
    assert {name for name, row in rows.items() if row["tested"]} == {"tcp", "shm"}
    assert {"cxi", "efa", "efa-direct", "verbs"} <= set(rows)
    for name, row in rows.items():
        assert "fi_" in row["source"] or "measured" in row["source"] or "tests/" in row["source"], name
        assert "\n" not in row["source"]


def test_nothing_proved_and_nothing_to_gate_on_is_unsafe() -> None:
    assert not policy("efa")["safe"]
    assert policy("efa", immediates=True)["ordering"] == "counted_immediates"
    assert policy("cxi")["safe"]  # its ordinary completion was measured to do


@pytest.mark.parametrize("provider", ["sockets", "udp;ofi_rxd", "net"])
def test_providers_known_to_misbehave_are_not_used(provider: str) -> None:
    assert not policy(provider, **ORDERED)["safe"]


def test_a_version_that_holds_the_living_up_is_refused_and_an_unknown_one_is_not() -> None:
    for version, safe in ((117, False), (204, False), (205, True), (301, True), (0, True)):
        found = policy("shm", **ORDERED, version=version)
        assert found["safe"] is safe, version
        assert safe or f"libfabric {version // 100}.{version % 100}: before libfabric 2.5" in found["why"]
    assert policy("tcp;ofi_rxm", **ORDERED, version=117)["safe"]


def test_shm_of_an_old_library_is_refused_by_name() -> None:
    """Its operations end in the order of their posts: docs/faults.md, note 4."""
    setup = Setup("libfabric", {"libraries": [discover.LIBRARY], "provider": "shm"}, discover.LIBRARY)
    facts = _native.library_facts([setup.library])
    if not facts["found"] or tuple(facts["version"]) >= (2, 5):
        pytest.skip("the system's libfabric is none, or a newer one")
    with pytest.raises(UnavailableError, match=r"\"shm\" cannot be used safely: .* before libfabric 2\.5 .* provider local"):
        _native.ProviderProbe(setup.kind, setup.options)


def test_delivery_complete_off_is_refused_where_it_is_unsafe() -> None:
    off, on = {"delivery_complete": "0"}, {"delivery_complete": "1"}
    refused = policy("tcp;ofi_rxm", off, **ORDERED)
    assert "EXPERTWIRE_DELIVERY_COMPLETE=0" in refused["refused"]
    assert refused["delivery_complete"]  # who does not look at the refusal is safe all the same
    allowed = policy("cxi", off, **ORDERED)
    assert (allowed["refused"], allowed["delivery_complete"]) == ("", False)
    assert policy("verbs", off, **ORDERED)["refused"] == ""
    assert "EXPERTWIRE_DELIVERY_COMPLETE=1" in policy("cxi", on)["refused"]
    assert policy("efa", on, **ORDERED)["delivery_complete"]


_LOAD = """
import ctypes, os, signal, sys
from expertwire import _native
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)]
facts = _native.library_facts([sys.argv[1]])
_native.provider_facts([sys.argv[1]], {})
probe = _native.ProviderProbe("libfabric", {"libraries": [sys.argv[1]], "interface": "lo"})
print(libc.getenv(b"IPATH_NO_BACKTRACE"))
try:
    signal.raise_signal(signal.SIGINT)
    print("nothing")
except KeyboardInterrupt:
    print("KeyboardInterrupt")
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("given", [None, "7"])
@pytest.mark.parametrize("name", ["tcp-system-atomic", "tcp-wheel-atomic"])
def test_loading_leaves_signals_and_environment_as_they_were(name: str, given: str | None) -> None:
    setup = SETUPS[name]
    setup.require()
    environment = {key: value for key, value in os.environ.items() if key != "IPATH_NO_BACKTRACE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if given is not None:
        environment["IPATH_NO_BACKTRACE"] = given
    done = subprocess.run([sys.executable, "-c", _LOAD, setup.library], env=environment, capture_output=True, text=True, timeout=60)
    expected = "None" if given is None else repr(given.encode())
    assert done.stdout.split() == [expected, "KeyboardInterrupt"], done.stderr
    assert done.returncode == -15  # SIGTERM still ends it


def test_the_best_version_wins_and_what_failed_is_told() -> None:
    system, wheel = SETUPS["tcp-system-atomic"], SETUPS["tcp-wheel-atomic"]
    system.require()
    wheel.require()
    facts = _native.library_facts(["/nowhere/libfabric.so.1", system.library, wheel.library])
    versions = [tuple(row["version"]) for row in facts["tried"]]
    assert facts["version"] == max(versions)
    assert versions[0] == (0, 0)
    assert "/nowhere" in facts["tried"][0]["error"]
    none = _native.library_facts(["/nowhere/libfabric.so.1"])
    assert not none["found"]
    assert "apt install libfabric1" in none["message"]
