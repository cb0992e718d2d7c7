"""`import nixl`: installed into this process, as a shim's folder, and beside another package of that name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest

import posing
from expertwire.compat import nixl as ours
from expertwire.errors import StateError

SHIM = Path(__file__).parents[2] / "shims" / "nixl"
EXCEPTIONS = [
    "nixlNotPostedError",
    "nixlInvalidParamError",
    "nixlBackendError",
    "nixlNotFoundError",
    "nixlMismatchError",
    "nixlNotAllowedError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlNotSupportedError",
    "nixlRemoteDisconnectError",
    "nixlCancelledError",
    "nixlNoTelemetryError",
]


@pytest.fixture(autouse=True)
def no_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with posing.without(ours.NAME, monkeypatch):
        yield


def check(package: ModuleType) -> None:
    """All that callers ask of it, as vLLM's connector, SGLang and NIXL's examples import it."""
    for name in ("nixl", "nixl._api", "nixl._bindings", "nixl._utils", "nixl.logging"):
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.name == name
    scope: dict[str, object] = {}
    exec(
        "from nixl._api import nixl_agent as NixlWrapper, nixl_agent_config, nixl_thread_sync_t\n"
        "from nixl._bindings import nixlXferTelemetry, DRAM_SEG, FILE_SEG, nixlXferDList, nixlRegDList\n"
        f"from nixl._bindings import {', '.join(EXCEPTIONS)}\n"
        "import nixl._utils as nixl_utils\n"
        "from nixl.logging import get_logger\n"
        "from nixl import _bindings as nixl_bindings, nixl_agent, nixl_agent_config\n",
        scope,
    )
    assert scope["NixlWrapper"] is scope["nixl_agent"] is ours.nixl_agent
    assert package.nixl_agent is ours.nixl_agent
    assert importlib.import_module("nixl") is package
    for name in EXCEPTIONS:
        found = scope[name]
        assert inspect.isclass(found)
        assert found.__bases__ == (Exception,), "directly, so that no except clause catches two"
        assert getattr(ours, name) is found
    with pytest.raises(ImportError, match="nosuch"):
        exec("from nixl import nosuch", {})
    with pytest.raises(AttributeError, match="which is Expertwire's, has no attribute 'nosuch'; it has _api, _bindings"):
        _ = package.nosuch


def test_install_makes_it_importable() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("nixl")
    package = ours.install()
    check(package)
    assert ours.install() is package
    assert ours.install(replace=True) is package


def test_the_shim_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SHIM / "src")
    spec = importlib.util.find_spec("nixl")
    assert spec is not None
    assert spec.origin == str(SHIM / "src" / "nixl" / "__init__.py")
    package = ours.install()
    assert package.__file__ == spec.origin, "what is there already is used"
    check(package)


def test_the_shim_is_a_distribution() -> None:
    project = tomllib.loads((SHIM / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["expertwire"]
    assert project["tool"]["setuptools"]["packages"] == ["nixl"]
    files = {path.stem for path in (SHIM / "src" / "nixl").glob("*.py")}
    assert files == {"__init__", "_expertwire", *ours.MODULES}
    assert f"shims/{ours.NAME}" in (SHIM / "README.md").read_text()


def test_another_one_that_is_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(posing.other(tmp_path, ours.NAME))
    with pytest.raises(StateError, match=r"nixl is installed already, from .*__init__\.py: uninstall it, or call install\(replace"):
        ours.install()
    assert not posing.taken(ours.NAME), "looked for, never imported"
    check(ours.install(replace=True))


def test_another_one_that_is_imported_is_refused() -> None:
    sys.modules["nixl"], sys.modules["nixl._api"] = ModuleType("nixl"), ModuleType("nixl._api")
    with pytest.raises(StateError, match="another nixl is imported already, from an unknown place"):
        ours.install()
    check(ours.install(replace=True))


def test_a_folder_without_code_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check(ours.install())


def test_memory_by_address() -> None:
    utils = ours.MODULES["_utils"]
    one, other_one = utils.malloc_passthru(256), utils.malloc_passthru(256)
    try:
        utils.ba_buf(one, 256)
        utils.ba_buf(other_one, 200)
        utils.verify_transfer(one, other_one, 200)
        utils.ba_buf(other_one + 201, 55)
        numpy.ctypeslib.as_array((__import__("ctypes").c_uint8 * 256).from_address(other_one))[200] = 7
        with pytest.raises(ValueError, match="byte 200 of 256 is 0xba"):
            utils.verify_transfer(one, other_one, 256)
    finally:
        utils.free_passthru(one)
        utils.free_passthru(other_one)
    with pytest.raises(ValueError, match="0 bytes cannot be allocated"):
        utils.malloc_passthru(0)
