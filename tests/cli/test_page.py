"""A report as a page: what is compared with what, the ceilings, and that nothing in it comes from elsewhere."""

from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from expertwire.cli import page
from expertwire.cli.main import main
from expertwire.cli.report import Exit, Label, Report, RowStatus
from expertwire.errors import UnavailableError

KEPT = Path(__file__).parents[2] / "benchmarks" / "rows"


def kept(name: str) -> Report:
    """A report from rows that were kept."""
    found = json.loads((KEPT / name).read_text())
    report = Report(found["command"], found["config"])
    for row in found["rows"]:
        labels: dict[str, Label] = {key: row[key] for key in row if key not in ("name", "value", "unit", "status")}
        report.add(row["name"], row["value"], row["unit"], RowStatus(row["status"]), **labels)
    return report


def test_rates_of_the_fabric_have_the_raw_loop_as_their_ceiling() -> None:
    rates, *_ = page.charts(kept("bench_fabric_tcp.json").rows)
    assert rates.unit == "GB/s"
    assert set(rates.series) == {"raw", "async", "sync"}
    assert set(rates.ceilings) == set(rates.categories), "each shape has one"
    for bar in rates.bars:
        if bar.series == "raw":
            assert bar.value <= rates.ceilings[bar.category] * 1.001, "the ceiling is the best of raw's windows"
        assert bar.low is not None


def test_the_demo_shows_both_engines_and_what_a_copy_takes() -> None:
    by_unit = {chart.unit: chart for chart in page.charts(kept("demo_2x4.json").rows)}
    assert set(by_unit["GB/s"].series) == {"expertwire", "gloo"}
    assert "dispatch" in by_unit["GB/s"].ceilings
    assert by_unit["×"].line == 1.0
    assert by_unit["GB/s"].line is None
    assert "layout" in by_unit["µs"].categories
    times = {(bar.category, bar.series) for bar in by_unit["µs"].bars}
    assert len(times) == len(by_unit["µs"].bars), "no bar lies upon another"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        self.found += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "data", "action")]
        assert tag not in ("script", "link", "iframe", "img")


def test_a_page_is_whole_by_itself_and_says_what_failed() -> None:
    pytest.importorskip("matplotlib", reason="the report extra")
    report = kept("bench_fabric_tcp.json")
    report.config["note"] = "<b>not bold</b>"
    report.add("verified", 0, status=RowStatus.FAILED, provider="<tcp>")
    report.add("over_mpi", None, status=RowStatus.SKIPPED, why="not here")
    text = page.page(report)
    links = _Links()
    links.feed(text)
    assert all(link.startswith("#") for link in links.found), "marks of a chart, nothing from elsewhere"
    assert "url(http" not in text
    assert links.rows == len(report.rows) + 1
    assert "<b>" not in text
    assert "&lt;tcp&gt;" in text
    assert "1 failed" in text
    assert "1 skipped" in text
    assert text.count("<svg") == len(page.charts(report.rows))
    assert page.page(report) == text, "the same rows are the same page"


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="matplotlib"):
        page.require_drawing()
    assert main(["demo", "--html", str(tmp_path / "page.html")]) == Exit.SKIPPED
    assert "expertwire[report]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_page_that_could_not_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fabric", "--html", str(tmp_path / "none" / "page.html")]) == Exit.USAGE
    assert "--html" in capsys.readouterr().err
    assert main(["bench", "fabric", "--html", "-", "--json", "-"]) in (Exit.USAGE, Exit.SKIPPED)
    assert re.search(r"both stdout|matplotlib", capsys.readouterr().err)


def test_no_matplotlib_is_loaded_by_asking_for_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *rest: object, **more: object) -> object:
        assert not name.startswith("matplotlib")
        return load(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert page.charts(kept("demo_2x4.json").rows)
