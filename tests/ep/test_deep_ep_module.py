"""`import deep_ep`: installed into this process, as a shim's folder, and beside another module of that name."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import posing
from expertwire import ep
from expertwire.compat import deep_ep as ours
from expertwire.errors import InvalidTypeError, StateError

SHIM = Path(__file__).parents[2] / "shims" / "deep_ep"
NAMES = {"Buffer", "Config", "EventOverlap", "topk_idx_t", "utils"}


@pytest.fixture(autouse=True)
def no_deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with posing.without(ours.NAME, monkeypatch):
        yield


def check(module: ModuleType) -> None:
    """All that callers ask of the module."""
    assert {name for name in vars(module) if not name.startswith("_")} >= NAMES
    assert (module.Buffer, module.Config, module.EventOverlap) == (ep.Buffer, ep.Config, ep.EventOverlap)
    assert module.topk_idx_t is torch.int64
    assert importlib.util.find_spec("deep_ep") is not None, "vLLM asks this"
    assert importlib.util.find_spec("deep_ep.utils") is not None
    utils = importlib.import_module("deep_ep.utils")
    assert utils is module.utils
    assert (utils.EventHandle, utils.EventOverlap) == (ep.EventHandle, ep.EventOverlap)
    assert utils.check_nvlink_connections(None) is None
    assert importlib.import_module("deep_ep") is module
    for name in ("ElasticBuffer", "HybridEPBuffer"):
        assert not hasattr(module, name), "callers probe for it and would call it"
        with pytest.raises(ImportError, match=name):
            exec(f"from deep_ep import {name}", {})
    with pytest.raises(AttributeError, match="which is Expertwire's, has no attribute 'nosuch'; it has Buffer, Config"):
        _ = module.nosuch
    assert module.Config(num_sms=24, num_max_nvl_chunked_send_tokens=8).num_sms == 24


def test_install_makes_it_importable() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("deep_ep")
    module = ours.install()
    check(module)
    assert ours.install() is module
    assert ours.install(replace=True) is module


def test_the_shim_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SHIM / "src")
    spec = importlib.util.find_spec("deep_ep")
    assert spec is not None
    assert spec.origin == str(SHIM / "src" / "deep_ep" / "__init__.py")
    module = ours.install()
    assert module.__file__ == spec.origin, "what is there already is used"
    check(module)


def test_the_shim_is_a_distribution() -> None:
    project = tomllib.loads((SHIM / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["expertwire"]
    assert project["tool"]["setuptools"]["packages"] == ["deep_ep"]
    files = {path.name for path in (SHIM / "src" / "deep_ep").glob("*.py")}
    assert ours.SHIM_MARK in files
    assert {"__init__.py", "utils.py"} <= files
    assert f"shims/{ours.NAME}" in (SHIM / "README.md").read_text()


def test_another_one_that_is_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(posing.other(tmp_path, ours.NAME))
    with pytest.raises(StateError, match=r"deep_ep is installed already, from .*__init__\.py: uninstall it, or call install\(replace"):
        ours.install()
    assert not posing.taken(ours.NAME), "looked for, never imported"
    check(ours.install(replace=True))


def test_another_one_that_is_imported_is_refused() -> None:
    sys.modules["deep_ep"], sys.modules["deep_ep.buffer"] = ModuleType("deep_ep"), ModuleType("deep_ep.buffer")
    with pytest.raises(StateError, match="another deep_ep is imported already, from an unknown place"):
        ours.install()
    check(ours.install(replace=True))
    assert "deep_ep.buffer" not in sys.modules, "nothing of the other one is left to import"


def test_a_folder_without_code_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deep_ep").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check(ours.install())


# What each takes by position.
CALLS: dict[str, tuple[object, ...]] = {
    "is_sm90_compiled": (),
    "capture": (),
    "memory_plan": ([0],),
    "statistics": (),
    "get_comm_stream": (),
    "destroy": (),
    "shrink": (),
    "get_dispatch_layout": (None, 8),
    "dispatch": (None,),
    "combine": (None, None),
    "get_local_buffer_tensor": (torch.int8,),
    "set_num_sms": (20,),
    "get_dispatch_config": (8,),
    "get_combine_config": (8,),
    "get_low_latency_rdma_size_hint": (128, 7168, 8, 288),
}


def test_every_method_is_called_here() -> None:
    methods = {name for name, value in vars(ep.Buffer).items() if not name.startswith("_") and callable(getattr(value, "__func__", value))}
    assert {name for name in methods if not name.startswith(("low_latency", "clean_low", "get_next_low"))} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_refused_by_name(name: str) -> None:
    buffer = ep.Buffer.__new__(ep.Buffer)
    with pytest.raises(TypeError, match=f"Buffer.{name} has no argument 'use_magic'; it takes") as caught:
        getattr(buffer, name)(*CALLS[name], use_magic=False)
    assert isinstance(caught.value, InvalidTypeError)
