"""`bench proxy`: what it refuses, what makes a round count as wrong, its figures, and engines that are not there."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertwire.cli.bench import proxy, proxy_subjects
from expertwire.cli.bench.proxy import ONE_TOKEN, STREAMS, Found, add_ratios, note
from expertwire.cli.bench.proxy_subjects import ENGINES, load, mocks, wait_for
from expertwire.cli.main import main
from expertwire.cli.report import Exit, Report
from expertwire.errors import DeadlineError, InvalidArgumentError, PeerError

TOLD = {
    "seconds": 2.0, "watched_cpu_s": [0.5, 1.0], "tokens": 100, "done": 50, "failed": 0, "why": {}, "busy": 0.25,
    "ttft_p50_ms": 1.0, "ttft_p99_ms": 3.0, "lag_p99_ms": 2.0,
}  # fmt: skip
COUNTS = {"odd": 0, "decodes": 50, "with_params": 50}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    proxy.add_arguments(parser)
    return parser.parse_args(words)


def test_figures_have_the_names_of_the_requirement() -> None:
    found = Found()
    note(ENGINES["expertwire"], STREAMS, TOLD, COUNTS, found)
    note(ENGINES["expertwire"], ONE_TOKEN, TOLD, COUNTS, found)
    assert found.faults == []
    assert {(kind, name): values for (kind, name, _), values in found.figures.items()} == {
        (STREAMS, "tokens_per_s"): [50.0],
        (STREAMS, "tokens_per_cpu_s"): [100.0],
        (STREAMS, "cpu_us_per_token"): [10_000.0],
        (STREAMS, "lag_p99_ms"): [2.0],
        (ONE_TOKEN, "requests_per_s"): [25.0],
        (ONE_TOKEN, "requests_per_cpu_s"): [50.0],
        (ONE_TOKEN, "cpu_us_per_request"): [20_000.0],
        **{
            (kind, name): [value]
            for kind in (STREAMS, ONE_TOKEN)
            for name, value in (
                ("ttft_p50_ms", 1.0), ("ttft_p99_ms", 3.0), ("load_busy", 0.25), ("mock_busy", 0.25), ("subject_busy", 0.5),
            )
        },
    }  # fmt: skip
    other = Found()
    note(ENGINES["nginx"], STREAMS, TOLD | {"tokens": 125}, COUNTS, other)
    report = Report("bench proxy", {})
    add_ratios(report, proxy.parse(parsed())[0], {"expertwire": found, "nginx": other})
    assert [(row.name, row.value, row.labels["over"]) for row in report.rows] == [("tokens_per_cpu_s_over", 0.8, "nginx")]


@pytest.mark.parametrize(
    ("engine", "told", "counts", "why"),
    [
        ("nginx", {"failed": 2, "why": {"ECONNRESET": 2}}, {}, "2 requests of one_token failed: {'ECONNRESET': 2}"),
        ("nginx", {"tokens": 0}, {}, "0 tokens came"),
        ("nginx", {}, {"odd": 1}, "1 requests without a Content-Length"),
        ("expertwire", {}, {"with_params": 49}, "50 decodes, 49 with a prefill's parameters of their own"),
        ("nginx", {}, {"with_params": 0}, ""),
    ],
)
def test_what_makes_a_round_wrong(engine: str, told: dict[str, Any], counts: dict[str, Any], why: str) -> None:
    found = Found()
    note(ENGINES[engine], ONE_TOKEN, TOLD | told, COUNTS | counts, found)
    assert len(found.faults) == bool(why)
    assert why in "".join(found.faults)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--streams", "0"), "--streams is 0; it must be 1 to 4096"),
        (("--rounds", "100"), "--rounds is 100"),
        (("--against", "nginx,apache"), "--against names 'apache'; give one or more of nginx, aiohttp, direct"),
        (("--load", "none"), "--load names 'none'"),
    ],
)
def test_what_cannot_be_meant(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what):
        proxy.parse(parsed(*words))


def test_an_engine_that_was_named_and_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    monkeypatch.setattr(proxy_subjects, "_nginx", lambda: None)
    monkeypatch.setattr(proxy, "measure", lambda engine, settings, found, cores: note(engine, ONE_TOKEN, TOLD, COUNTS, found))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a bench of two cores")
    path = scratch / "rows.json"
    for against, status in ((["--against", "nginx,direct"], Exit.SKIPPED), ([], Exit.OK)):
        assert main(["bench", "proxy", *against, "--json", str(path)]) == status
        rows = json.loads(path.read_text())["rows"]
        skipped = {row["engine"]: row["why"] for row in rows if row["status"] == "skipped"}
        assert set(skipped) == ({"nginx"} if against else set())
    assert {row["engine"] for row in rows if row["name"] == "requests_per_s"} >= {"expertwire", "direct"}


def test_a_subject_that_does_not_come_up_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    broken = proxy_subjects.Engine("aiohttp", "plain")
    monkeypatch.setattr(proxy_subjects.Engine, "command", lambda *_: ["/bin/sh", "-c", "echo no such thing; exit 4"])
    with mocks(core, 1, 5) as servers:
        last_words = "aiohttp ended with status 4 before it took connections: no such thing"
        with pytest.raises(PeerError, match=last_words), proxy_subjects.subject(broken, servers, core):
            pass
        monkeypatch.setattr(proxy_subjects, "READY_S", 0.0)
        with pytest.raises(DeadlineError, match="takes no connections"):
            wait_for(1, None, Path(), "x")  # type: ignore[arg-type]
        told = load(servers.decode, core, ["--requests", "20", "--concurrency", "4"], (servers.pid,), 30)
        with pytest.raises(DeadlineError, match="has not ended"):
            load(servers.decode, core, ["--seconds", "9"], (), 0.1)
    assert (told["done"], told["failed"]) == (20, 0)
    assert told["watched_cpu_s"][0] > 0
    assert servers.counts["decodes"] >= 20


def test_turns_of_engines_and_who_is_told_as_missing() -> None:
    from expertwire.cli.bench import turns
    from expertwire.cli.report import Report, RowStatus

    report = Report("bench x", {})
    asked = {"ours": {"flow": "a"}, "named": {"flow": "b"}, "usual": {"flow": "c"}, "there": {"flow": "d"}}
    found = turns.present(report, asked, lambda name: "" if name == "there" else f"no {name}", ["usual"])
    assert found == ["there"]
    assert [(row.status, row.labels) for row in report.rows] == [
        (RowStatus.SKIPPED, {"engine": "ours", "flow": "a", "why": "no ours"}),
        (RowStatus.SKIPPED, {"engine": "named", "flow": "b", "why": "no named"}),
    ]
    taken: list[tuple[int, str]] = []
    turns.take("round", ["x", "y"], 2, lambda number, engine: taken.append((number, engine)))
    assert taken == [(1, "x"), (1, "y"), (2, "y"), (2, "x")]
    turns.take("round", [], 2, lambda number, engine: taken.append((number, engine)))
    assert len(taken) == 4
