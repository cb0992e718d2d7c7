"""Settings: every variable, its limits, and errors that name variable, value and limit."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import InvalidArgumentError
from expertwire.fabric.config import VARIABLES, Settings


def test_defaults() -> None:
    made = Settings.from_environment({})
    assert (made.max_outstanding, made.timeout_ms, made.hard_timeout(), made.provider) == (512, 100_000, 200_000, "")
    assert made == Settings()
    assert made.given() == {}


def test_everything_given() -> None:
    given = {
        "EXPERTWIRE_MAX_OUTSTANDING": "4",
        "EXPERTWIRE_SYNC_WRITES": "1",
        "EXPERTWIRE_DELIVERY_COMPLETE": "1",
        "EXPERTWIRE_TRUST_ORDER": "1",
        "EXPERTWIRE_TRUST_IMMEDIATES": "1",
        "EXPERTWIRE_TIMEOUT_MS": "500",
        "EXPERTWIRE_HARD_TIMEOUT_MS": "900",
        "EXPERTWIRE_PROVIDER": "tcp;ofi_rxm",
        "EXPERTWIRE_INTERFACE": "lo",
        "EXPERTWIRE_NODE_OF": "0,0,1",
        "EXPERTWIRE_LIVENESS": "heartbeat",
        "EXPERTWIRE_SIGNAL_PATH": "message",
        "EXPERTWIRE_SHARE_DEVICE": "1",
        "EXPERTWIRE_VLLM": "nixl",
        "EXPERTWIRE_TELEMETRY_FOLDER": "/tmp/x",
        "LIBFABRIC_HOME": "/opt/x",
        "FI_CXI_RDZV_THRESHOLD": "0",
        "FI_CXI_RDZV_GET_MIN": "1",
        "FI_CXI_RDZV_EAGER_SIZE": "2",
        "FI_CXI_RDZV_PROTO": "alt_read",
    }
    assert set(given) == set(VARIABLES)
    made = Settings.from_environment(given)
    assert set(made.given()) == set(given)
    assert (made.node_of, made.hard_timeout(), made.sync_writes) == ((0, 0, 1), 900, True)
    rendezvous = "FI_CXI_RDZV_THRESHOLD=0 FI_CXI_RDZV_GET_MIN=1 FI_CXI_RDZV_EAGER_SIZE=2 FI_CXI_RDZV_PROTO=alt_read"
    assert made.provider_settings() == {
        "delivery_complete": "1",
        "trust_order": True,
        "trust_immediates": True,
        "rendezvous": rendezvous,
        "ordering": "auto",
    }
    assert Settings().provider_settings()["rendezvous"] == ""


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("EXPERTWIRE_MAX_OUTSTANDING", "0", "1..65536"),
        ("EXPERTWIRE_MAX_OUTSTANDING", "many", "whole number"),
        ("EXPERTWIRE_TIMEOUT_MS", "-5", "1..86400000"),
        ("EXPERTWIRE_SYNC_WRITES", "yes", "0 or 1"),
        ("EXPERTWIRE_DELIVERY_COMPLETE", "maybe", "auto, 1, 0"),
        ("EXPERTWIRE_NODE_OF", "0,2", "0..n-1"),
        ("EXPERTWIRE_NODE_OF", "0;1", "0,0,1,1"),
        ("EXPERTWIRE_LIVENESS", "none", "auto, heartbeat"),
        ("EXPERTWIRE_PROVIDER", "tc\np", "control characters"),
    ],
)
def test_an_error_names_variable_value_and_limit(name: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Settings.from_environment({name: value})
    message = str(caught.value)
    assert name in message
    assert limit in message
    assert value in message or repr(value)[1:-1] in message


def test_one_setting_is_read_without_the_others() -> None:
    env = {"EXPERTWIRE_VLLM": "1", "EXPERTWIRE_TIMEOUT_MS": "none"}
    assert Settings.read("vllm", env) == "1"
    assert Settings.read("vllm", {"EXPERTWIRE_VLLM": ""}) == Settings.read("vllm", {}) == "0"
    with pytest.raises(InvalidArgumentError, match="EXPERTWIRE_VLLM='yes' is not known: give one of 0, 1, nixl, deep_ep"):
        Settings.read("vllm", {"EXPERTWIRE_VLLM": "yes"})


def test_the_hard_timeout_is_not_below_the_timeout() -> None:
    with pytest.raises(InvalidArgumentError, match="EXPERTWIRE_HARD_TIMEOUT_MS=100 is below EXPERTWIRE_TIMEOUT_MS=200"):
        Settings.from_environment({"EXPERTWIRE_TIMEOUT_MS": "200", "EXPERTWIRE_HARD_TIMEOUT_MS": "100"})


def test_an_empty_value_is_unset_and_a_misspelt_name_is_kept_for_doctor() -> None:
    made = Settings.from_environment({"EXPERTWIRE_TIMEOUT_MS": "", "EXPERTWIRE_TIMEOUT": "3", "PATH": "/bin"})
    assert made.timeout_ms == 100_000
    assert made.unknown == ("EXPERTWIRE_TIMEOUT",)


def test_settings_cannot_be_changed_and_the_environment_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "77")
    before = dict(os.environ)
    made = Settings.from_environment()
    assert made.timeout_ms == 77
    assert dict(os.environ) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.timeout_ms = 1  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), st.text(max_size=12), max_size=4))
def test_any_text_gives_settings_or_our_error(environment: dict[str, str]) -> None:
    made: Settings | None = None
    message = ""
    try:
        made = Settings.from_environment(environment)
    except InvalidArgumentError as error:
        message = str(error)
    assert made is not None or any(name in message for name in environment)
