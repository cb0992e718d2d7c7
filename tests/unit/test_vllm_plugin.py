"""vLLM's plug-in, without vLLM: what it does is put names among the imported modules, or nothing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import posing
from expertwire.compat import vllm_plugin
from expertwire.compat.nixl import nixl_agent
from expertwire.ep import Buffer
from expertwire.errors import InvalidArgumentError, StateError


@pytest.fixture(autouse=True)
def neither(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with posing.without("nixl", monkeypatch), posing.without("deep_ep", monkeypatch):
        yield


def test_it_is_an_entry_point_of_vllm() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["expertwire"].partition(":")
    assert getattr(importlib.import_module(module), function) is vllm_plugin.register
    assert set(vllm_plugin.KEPT) == set(vllm_plugin.NAMES["1"])


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_setting_it_does_nothing(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "a word")  # of no matter to a process that does not use us
    if value is None:
        monkeypatch.delenv("EXPERTWIRE_VLLM", raising=False)
    else:
        monkeypatch.setenv("EXPERTWIRE_VLLM", value)
    vllm_plugin.register()
    assert not posing.taken("nixl")
    assert not posing.taken("deep_ep")


def test_without_the_setting_it_loads_nothing() -> None:
    script = "import sys; from expertwire.compat import vllm_plugin; vllm_plugin.register(); print(sorted(sys.modules))"
    env = {name: value for name, value in os.environ.items() if name != "EXPERTWIRE_VLLM"}
    loaded = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "'expertwire.compat.vllm_plugin'" in loaded
    for name in ("torch", "numpy", "expertwire._native", "expertwire.compat.nixl"):
        assert f"'{name}'" not in loaded


@pytest.mark.parametrize(("value", "nixl", "deep_ep"), [("1", True, True), ("nixl", True, False), ("deep_ep", False, True)])
def test_the_setting_installs(
    value: str, nixl: bool, deep_ep: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(posing.other(tmp_path, "nixl"))  # the real one is installed beside, and is out of reach from here on
    monkeypatch.setenv("EXPERTWIRE_VLLM", value)
    with caplog.at_level(logging.INFO):
        vllm_plugin.register()
        vllm_plugin.register()  # vLLM may call it twice
    assert bool(posing.taken("nixl")) is nixl
    assert bool(posing.taken("deep_ep")) is deep_ep
    if nixl:
        assert importlib.import_module("nixl._api").nixl_agent is nixl_agent
    if deep_ep:
        assert importlib.import_module("deep_ep").Buffer is Buffer
        assert importlib.util.find_spec("deep_ep") is not None
    assert {record.getMessage().partition(" is Exp")[0] for record in caplog.records} == set(vllm_plugin.NAMES[value])


def test_a_value_that_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_VLLM", "nixxl")
    with pytest.raises(InvalidArgumentError, match="EXPERTWIRE_VLLM='nixxl' is not known: give one of 0, 1, nixl, deep_ep"):
        vllm_plugin.register()


class Foreign:
    """Another package's agent and Buffer."""

    Buffer = type("Buffer", (), {"__module__": "deep_ep.buffer"})


@pytest.mark.parametrize("name", ["nixl", "deep_ep"])
def test_what_vllm_has_taken_before_is_not_replaced_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kept = vllm_plugin.KEPT[name]
    holder = ModuleType(module)
    monkeypatch.setitem(sys.modules, module, holder)
    monkeypatch.setenv("EXPERTWIRE_VLLM", name)
    vllm_plugin.register()
    holder.__dict__[kept] = importlib.import_module(f"expertwire.compat.{name}") if name == "deep_ep" else nixl_agent
    vllm_plugin.register()  # ours, taken after the first call
    holder.__dict__[kept] = Foreign
    with pytest.raises(StateError, match=f"{module} has taken {kept} of another {name} .* before the plug-in was called"):
        vllm_plugin.register()
