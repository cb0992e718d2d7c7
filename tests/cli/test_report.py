"""Rows, their file, and the exit status that they mean."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import expertwire
from expertwire.cli.report import Exit, Report, RowStatus, commit, format_value


def test_exit_status_is_the_worst_row() -> None:
    report = Report("bench ep", {})
    assert report.exit_status() == Exit.FAILED, "no rows: nothing was verified"
    report.add("verified", 1)
    assert report.exit_status() == Exit.OK
    report.add("over_gloo", None, status=RowStatus.SKIPPED, why="not installed")
    assert report.exit_status() == Exit.SKIPPED
    report.add("verified", 0, status=RowStatus.FAILED)
    assert report.exit_status() == Exit.FAILED


def test_the_file_has_the_fixed_keys(tmp_path: Path) -> None:
    report = Report("demo", {"ranks": 8})
    report.add("dispatch_us", 12.5, "µs", engine="expertwire", phase="dispatch")
    path = tmp_path / "out.json"
    path.write_text("an older run")
    report.write(path)
    written = json.loads(path.read_text())
    assert set(written) == {"command", "version", "commit", "host", "config", "rows"}
    assert (written["command"], written["version"], written["config"]) == ("demo", expertwire.__version__, {"ranks": 8})
    assert written["host"]["cores"] >= 1
    assert written["rows"] == [
        {"name": "dispatch_us", "value": 12.5, "unit": "µs", "status": "ok", "engine": "expertwire", "phase": "dispatch"}
    ]
    assert list(tmp_path.iterdir()) == [path], "no scratch file is left"


def test_the_table_leaves_out_labels_that_never_change() -> None:
    report = Report("bench ep", {})
    report.add("dispatch_us", 1234.5, "µs", ranks=8, engine="expertwire")
    report.add("dispatch_us", 2, "µs", ranks=8, engine="gloo")
    report.add("over_mpi", None, "×", status=RowStatus.SKIPPED, ranks=8, engine="mpi")
    report.add("combine_us", 20, "µs", ranks=8, engine="gloo", low=18.5, high=31)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table("figures"))
    text = console.export_text()
    assert "engine" in text
    assert "ranks" not in text
    assert "1,234" in text
    assert "skipped" in text
    assert "18.500 to 31" in text
    assert "low to high" in text


@pytest.mark.parametrize(("value", "text"), [(1, "1"), (1024.0, "1,024"), (0.1234, "0.123"), (3.14159, "3.142"), (12345.6, "12,346")])
def test_values_are_shown_as_far_as_they_are_known(value: float, text: str) -> None:
    assert format_value(value) == text


def test_a_small_difference_is_not_shown_as_nothing() -> None:
    assert format_value(1.5e-6) == "1.5e-06"


def test_the_commit_is_known_in_a_checkout_and_never_raises() -> None:
    assert commit()
