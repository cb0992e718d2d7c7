"""`expertwire doctor`: its rows, its exit status, and what it says when something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertwire.cli.main import main
from expertwire.fabric import discover
from expertwire.fabric.config import VARIABLES


def doctor(tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    target = tmp_path / "doctor.json"
    status = main(["doctor", "--json", str(target), *options])
    rows = json.loads(target.read_text())["rows"]
    for row in rows:
        assert {"name", "value", "unit", "status", "found", "advice"} <= set(row)
    return status, {row["name"]: row for row in rows}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPERTWIRE_PROVIDER", "EXPERTWIRE_INTERFACE", "LIBFABRIC_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = doctor(tmp_path)
    assert status == 0
    for name in ("settings", "core", "cores", "memfd", "dev_shm", "memlock", "open_files", "provider local", "provider chosen"):
        assert name in rows
    for name in ("cxi", "efa", "verbs"):
        row = next(row for key, row in rows.items() if key.startswith(f"provider {name}"))
        assert "untested" in row["advice"]
        assert f"Source: fi_{name}(7)" in row["advice"]
    table = capsys.readouterr().out
    assert "provider chosen" in table
    assert "cpuset" in table


def test_libraries_and_ordering_are_told(tmp_path: Path) -> None:
    _, rows = doctor(tmp_path, "--all")
    if not rows["libfabric"]["value"]:
        pytest.skip("no libfabric here")
    assert rows["provider chosen"]["found"] != "local"
    tcp = [row for name, row in rows.items() if name.startswith("provider tcp;ofi_rxm")]
    assert tcp
    tcp_counts = discover.provider_rules()["tcp"]["prefers_counting"]
    assert all(
        ("a signal waits until its data has been delivered" in row["found"] or tcp_counts) and "reports delivery" in row["found"]
        for row in tcp
    )
    assert all("untested" not in row["advice"] and "Source: tests/fabric/test_order.py" in row["advice"] for row in tcp)
    assert not any("untested" in row["advice"] for row in rows.values() if "misbehave" in row["advice"])
    assert any("127.0.0.1" in name for name in rows if name.startswith("provider tcp;ofi_rxm"))


def test_without_libfabric_one_host_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "library_candidates", lambda settings: ["/nowhere/libfabric.so.1"])
    status, rows = doctor(tmp_path)
    assert status == 0
    assert (rows["libfabric"]["value"], rows["libfabric"]["status"]) == (0, "skipped")
    assert "apt install libfabric1" in rows["libfabric"]["advice"]
    assert rows["provider chosen"]["found"] == "local"


def test_mistakes_in_the_environment_fail_and_misspellings_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_TIMEOUTS", "5")
    status, rows = doctor(tmp_path)
    assert status == 0
    assert rows["settings_unknown"]["found"] == "EXPERTWIRE_TIMEOUTS"
    monkeypatch.setenv("EXPERTWIRE_INTERFACE", "eth77")
    status, rows = doctor(tmp_path)
    assert status == 1
    assert "eth77" in rows["interface one host"]["advice"]
    monkeypatch.setenv("LIBFABRIC_HOME", "/nowhere")
    assert doctor(tmp_path)[1]["libfabric"]["status"] == "failed"
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "never")
    status, rows = doctor(tmp_path)
    assert status == 1
    assert "EXPERTWIRE_TIMEOUT_MS='never'" in rows["settings"]["found"]


def test_the_settings_are_listed_with_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_TIMEOUT_MS", "7000")
    status, rows = doctor(tmp_path, "--settings")
    assert status == 0
    assert set(rows) == {"settings", *VARIABLES}
    assert (rows["EXPERTWIRE_TIMEOUT_MS"]["found"], rows["EXPERTWIRE_TIMEOUT_MS"]["value"]) == ("7000", 1)
    assert rows["EXPERTWIRE_PROVIDER"]["found"] == "default"


@pytest.mark.parametrize("pins", [False, True])
def test_little_pinned_memory_matters_only_where_a_device_pins(pins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(discover, "fabric_devices", lambda: [discover.Device("mlx5_0", "verbs", 0)] if pins else [])
    row = doctor(tmp_path)[1]["memlock"]
    assert (row["status"], "ulimit" in row["advice"]) == (("skipped", True) if pins else ("ok", False))
