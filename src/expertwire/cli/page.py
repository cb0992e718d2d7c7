"""A report as one HTML file that needs nothing else: what was run and where, charts with the ceilings drawn in, and every row.

`charts` is pure: rows in, bars out. Only `svg` draws, with matplotlib (`pip install 'expertwire[report]'`), which is loaded when a page is
asked for and works without a display.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from expertwire.cli.report import Report, Row, RowStatus, format_value
from expertwire.errors import UnavailableError

# Labels that say how a figure was taken, not which one it is.
_NOT_TELLING = frozenset({"engine", "low", "high", "posts", "polls", "raw_bytes", "raw_window", "why", "raw_iterations"})
# Shares of a ceiling: the figure over its share is the ceiling. (rows of the share, figures that it is a share of: name, or {phase}.)
_SHARES = (("wire_utilization", ("async_GBps", "wire_GBps")), ("copy_utilization", ("{phase}_GBps",)))
_TITLES = {
    "GB/s": "How fast: longer is better",
    "µs": "How long: shorter is better",
    "×": "How many times as fast as the other; at the line they are equal",
    "": "Share of a ceiling: the line is the ceiling itself",
}
_BARS_MAX = 60  # of one chart; more than that nobody reads


@dataclass(frozen=True)
class Bar:
    """One figure: where it stands (`category`), whose it is (`series`), and the least and largest that were measured."""

    category: str
    series: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Bars of one unit. `ceilings` are by category; `line` is the same for all."""

    unit: str
    bars: tuple[Bar, ...]
    ceilings: Mapping[str, float]
    line: float | None = None

    @property
    def categories(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(bar.category for bar in self.bars))

    @property
    def series(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(bar.series for bar in self.bars))


def require_drawing() -> None:
    """Refuse --html before anything is measured where nothing can be drawn. Raises `UnavailableError`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--html needs matplotlib, which is not installed: pip install 'expertwire[report]'")


def charts(rows: Iterable[Row]) -> list[Chart]:
    """One chart for each unit that has something to compare, rates first."""
    good = [row for row in rows if row.value is not None and row.status is RowStatus.OK]
    varied = _varied(good)
    found = []
    for unit in _TITLES:
        chosen = [row for row in good if row.unit == unit and (unit or row.name.endswith("_utilization"))]
        bars = tuple(_bar(row, varied) for row in chosen)
        ceilings = (
            {_category(row, varied): ceiling for row in chosen if (ceiling := _ceiling(row, good)) is not None} if unit == "GB/s" else {}
        )
        if bars:
            found.append(Chart(unit, bars[:_BARS_MAX], ceilings, 1.0 if unit in ("×", "") else None))
    return found


def page(report: Report) -> str:
    """The whole HTML text."""
    facts = report.as_json()
    counts = {status: sum(row.status is status for row in report.rows) for status in RowStatus}
    verdict = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count) or "no rows"
    host = ", ".join(f"{key} {value}" for key, value in facts["host"].items())
    head = f"expertwire {report.command}"
    drawn = "\n".join(
        f"<h2>{escape(_TITLES[chart.unit])}</h2>\n<p class=figure>{svg(chart)}</p>{_cut(chart)}" for chart in charts(report.rows)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(head)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(head)}</h1>
<p>version {escape(facts["version"])}, commit {escape(facts["commit"])}<br>{escape(host)}</p>
<p class="{"bad" if report.exit_status() else "good"}">{escape(verdict)}</p>
{drawn}
<h2>All rows</h2>
{_table(report.rows)}
<h2>Asked for</h2>
<dl>{"".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in report.config.items())}</dl>
</body></html>
"""


def svg(chart: Chart) -> str:
    """The chart as an <svg> element: a group of bars for each category, thin lines for the spread, a black mark at each ceiling."""
    import matplotlib
    from matplotlib.figure import Figure

    categories, series = chart.categories, chart.series
    thick = 0.8 / len(series)
    # Fonts as text: smaller, and the reader's own. A salt keeps the ids the same for the same rows.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "expertwire", "font.size": 9}):
        figure = Figure(figsize=(9, 0.9 + 0.22 * len(categories) * max(len(series), 1.5)), layout="constrained")
        axes = figure.add_subplot()
        for number, name in enumerate(series):
            bars = [bar for bar in chart.bars if bar.series == name]
            places = [categories.index(bar.category) + (number - (len(series) - 1) / 2) * thick for bar in bars]
            axes.barh(places, [bar.value for bar in bars], thick * 0.92, label=name)
            for place, bar in zip(places, bars, strict=True):
                end = max(bar.value, bar.high or bar.value)
                axes.annotate(format_value(bar.value), (end, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
                if bar.low is not None and bar.high is not None:
                    axes.plot([bar.low, bar.high], [place, place], color="black", linewidth=0.7)
        for number, (category, ceiling) in enumerate(chart.ceilings.items()):
            place = categories.index(category)
            label = "ceiling" if number == 0 else None
            axes.plot([ceiling, ceiling], [place - 0.45, place + 0.45], color="black", linewidth=2, label=label)
        if chart.line is not None:
            axes.axvline(chart.line, color="black", linewidth=1)
        axes.set_yticks(range(len(categories)), categories)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.margins(x=0.12)
        axes.set_xlabel(chart.unit or "share")
        if len(series) > 1 or chart.ceilings:
            axes.legend(loc="best", fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]  # without the XML and DOCTYPE lines, which belong to a file of its own


def _varied(rows: Sequence[Row]) -> list[str]:
    """Labels that tell these rows apart."""
    keys = dict.fromkeys(key for row in rows for key in row.labels if key not in _NOT_TELLING)
    return [key for key in keys if len({str(row.labels[key]) for row in rows if key in row.labels}) > 1]


def _bar(row: Row, varied: Sequence[str]) -> Bar:
    assert row.value is not None
    low, high = row.labels.get("low"), row.labels.get("high")
    spread = {} if low is None or high is None else {"low": float(low), "high": float(high)}
    return Bar(_category(row, varied), _series(row), float(row.value), **spread)


def _series(row: Row) -> str:
    """Whose figure it is: its engine; without one the first word of a name like async_GBps."""
    engine = row.labels.get("engine")
    if engine is not None and not row.name.startswith("over_"):
        return str(engine)
    stem = row.name.rpartition("_")[0]
    return stem if row.unit == "GB/s" else row.name


def _category(row: Row, varied: Sequence[str]) -> str:
    """What was measured: the figure's phase, and the labels that vary."""
    words = [row.name.rpartition("_")[0]] if row.unit in ("GB/s", "µs") and "engine" in row.labels else []
    words += [_label(key, row.labels[key]) for key in sorted(varied, key=lambda key: key != "phase") if key in row.labels]
    return ", ".join(words) or row.name


def _label(key: str, value: object) -> str:
    if key == "bytes" and isinstance(value, int):
        for scale, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
            if value % scale == 0:
                return f"{value // scale} {unit}"
    return f"{key} {value}" if isinstance(value, int | float) else str(value)


def _ceiling(row: Row, rows: Sequence[Row]) -> float | None:
    """What this rate could have been, from the row that says which share of it this is."""
    for share_name, figures in _SHARES:
        for share in rows:
            if share.name != share_name or not share.value:
                continue
            if row.name not in [figure.format(phase=share.labels.get("phase", "")) for figure in figures]:
                continue
            if all(row.labels.get(key) == value for key, value in share.labels.items() if key in row.labels and key != "raw_window"):
                assert row.value is not None
                return row.value / share.value
    return None


def _cut(chart: Chart) -> str:
    return f"<p>The first {_BARS_MAX} bars; the table has all.</p>" if len(chart.bars) == _BARS_MAX else ""


def _table(rows: Sequence[Row]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row.labels))
    head = "".join(f"<th>{escape(key)}</th>" for key in ("figure", "value", "unit", "status", *keys))
    lines = []
    for row in rows:
        value = "" if row.value is None else format_value(row.value)
        cells: list[Any] = [row.name, value, row.unit, row.status.value, *(row.labels.get(key, "") for key in keys)]
        lines.append(f'<tr class="{row.status.value}">{"".join(f"<td>{escape(str(cell))}</td>" for cell in cells)}</tr>')
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}.good{color:#17692a}.bad{color:#a11}
.figure svg{width:100%;height:auto}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid #ddd}td:nth-child(2){text-align:right;font-variant-numeric:tabular-nums}
tr.failed{background:#fdd}tr.skipped{background:#ffd}dt{font-weight:600}dd{margin:0 0 .3rem 1rem;overflow-wrap:anywhere}
"""
