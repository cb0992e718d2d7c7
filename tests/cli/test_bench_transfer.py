"""`bench transfer`: its plan and figures, what its oracle sees, what its pairs refuse to go on with, and the command itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli import fake_transfer
from cli.test_commands import expertwire, values
from expertwire.cli.bench import transfer, transfer_plan, transfer_role
from expertwire.cli.bench.transfer_engines import ENGINES, Engine
from expertwire.cli.bench.transfer_oracle import Content, last_of
from expertwire.cli.bench.transfer_pair import Ended
from expertwire.cli.bench.transfer_plan import Area, Phase, Samples, Settings, areas, figures, percentile, places_of
from expertwire.cli.bench.transfer_role import Outcome, run_source, run_target
from expertwire.cli.bench.turns import rotation
from expertwire.cli.main import main
from expertwire.cli.report import Exit, Report
from expertwire.errors import ExpertwireError, MismatchError, PeerError

SMALL = Settings("fake", "tcp", ("read", "write"), (64, 4096), (65_536,), ("same", "other"), 2, 1, 5, 7)
MIB = 1 << 20


# ---- the plan


def test_every_run_has_every_engine_once_and_begins_with_another() -> None:
    found = rotation(["a", "b", "c"], 4)
    runs = [[engine for run, engine in found if run == number] for number in (1, 2, 3, 4)]
    assert runs == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_phases_are_what_the_requirement_lists() -> None:
    settings = replace(SMALL, sizes=(4096, 2 * MIB), bulk_sizes=(2 * MIB, 32 * MIB))
    phases = settings.phases()
    assert [phase.number for phase in phases] == list(range(1, len(phases) + 1))
    of_read = [(phase.kind, phase.nbytes, phase.bulk_bytes, phase.peer) for phase in phases if phase.operation == "read"]
    assert of_read[:4] == [(kind, size, 0, "same") for size in (4096, 2 * MIB) for kind in ("single", "bandwidth")]
    assert of_read[4:9] == [
        ("bulk_alone", 0, 2 * MIB, "same"),
        *((kind, 4096, 2 * MIB, peer) for peer in ("same", "other") for kind in ("small_alone", "mixed")),
    ]
    assert len(of_read) == 14 == len(phases) / 2
    assert (settings.targets, replace(settings, peers=("same",)).targets, replace(settings, peers=("other",)).targets) == (2, 1, 2)


@pytest.mark.parametrize("sizes", [(64, 4096), (4096, 2 * MIB), (24, 40)])
def test_places_of_a_phase_fit_the_region_and_never_overlap(sizes: tuple[int, ...]) -> None:
    settings = replace(SMALL, sizes=sizes, bulk_sizes=(MIB, 32 * MIB))
    layout = settings.layout()
    for phase in settings.phases():
        found = areas(phase, settings)
        assert [area.peer for area in found] == ([0, 1] if phase.peer == "other" else [0, 0])[-len(found) :]
        spans = sorted((area.at, area.offset(area.places)) for area in found)
        assert spans[-1][1] <= layout.nbytes
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(area.places == places_of(area.nbytes) >= 2 for area in found)


def test_percentiles_are_the_nearest_rank() -> None:
    found = list(range(100, 0, -1))
    assert [percentile(found, percent) for percent in (0, 1, 50, 90, 99, 100)] == [1, 1, 50, 90, 99, 100]
    assert percentile([7], 99) == 7


def test_figures_have_the_names_of_the_requirement() -> None:
    samples = Samples([1000, 3000, 2000], [9000, 9000, 8000], [10_000, 10_000, 10_000], [100, 300, 200], 50_000, 100_000)
    mixed = figures(Phase(1, "mixed", "read", 4096, 65_536, "other"), samples)
    assert mixed["small_mixed_p50_us"] == (2.0, "µs")
    assert mixed["small_mixed_p99_us"] == (3.0, "µs")
    assert mixed["bulk_mixed_p99_us"] == (9.0, "µs")
    assert mixed["window_GBps"] == (round((4096 + 65_536) / 10_000, 4), "GB/s")
    single = figures(Phase(1, "single", "read", 4096, 0, "same"), samples)
    assert {"single_p50_us", "single_p99_us", "post_us"} < set(single)
    assert single["post_us"] == (0.2, "µs")
    assert {"small_alone_p50_us", "small_alone_p99_us"} < set(figures(Phase(1, "small_alone", "read", 8, 8, "same"), samples))
    assert figures(Phase(1, "bandwidth", "read", 4096, 0, "same"), samples) == {"bandwidth_GBps": (2.0, "GB/s")}


def test_the_last_transfer_of_each_place() -> None:
    area = Area(0, 0, transfer_plan.PLACES_BYTES // 4)
    assert area.places == 4
    assert last_of(area, 10) == [8, 9, 6, 7]
    assert last_of(area, 3) == [0, 1, 2, None]


# ---- the oracle


def test_the_oracle_sees_every_wrong_byte_every_other_place_phase_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_plan, "PLACES_MAX", 4)
    area = Area(0, 64, 65_536)
    content = Content(area, 1, 5, 3)
    region = np.zeros(64 + area.places * area.nbytes, dtype=np.uint8)
    content.fill(region, True)
    assert [content.faults(region, place, None) for place in range(area.places)] == [[]] * area.places
    for place in (64, 64 + 8, 64 + 65_535):
        region[place] ^= 1
        assert len(content.faults(region, 0, None)) == 1
        region[place] ^= 1
    for other in (replace(content, source=2), replace(content, seed=6), replace(content, phase=4)):
        assert other.faults(region, 0, None)
    assert content.faults(region, 0, 0) == [], "a write's transfer 0 has the marker of place 0"
    assert content.faults(region, 0, area.places)
    before = region[area.at : area.at + area.nbytes].copy()
    region[area.at : area.at + area.nbytes] = region[area.offset(1) : area.offset(2)]
    assert len(content.faults(region, 0, None)) == 2, "another place's marker and another place's bytes"
    region[area.at : area.at + area.nbytes] = before
    content.clear(region)
    assert content.untouched(region, 1) == []
    region[area.offset(1)] = 0
    assert content.untouched(region, 1)


# ---- both processes of a pair, as threads


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(transfer_role, "LATE_S", 0.01)
    monkeypatch.setattr(transfer_plan, "PLACES_MAX", 4)

    def make(fault: str = "") -> str:
        name = f"fake-{fault.replace(' ', '-')}" if fault else "fake"
        monkeypatch.setitem(ENGINES, name, Engine(name, "cli.fake_transfer", ("cli.fake_transfer",), ""))
        return name

    yield make
    fake_transfer.AGENTS.clear()


def pair(settings: Settings, where: Path, target: Settings | None = None, faulty: bool = False) -> tuple[Outcome | ExpertwireError, str]:
    """What the source found or raised, and what the target raised."""
    ended: list[str] = []

    def serve() -> None:
        try:
            run_target(target or settings, str(where), faulty)
            ended.append("")
        except ExpertwireError as error:
            ended.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        found: Outcome | ExpertwireError = run_source(settings, str(where))
    except ExpertwireError as error:
        found = error
    thread.join(60)
    return found, ended[0]


def test_a_pair_times_every_phase_checks_every_place_and_releases_everything(fake: Any, scratch: Path) -> None:
    settings = replace(SMALL, engine=fake())
    found, ended = pair(settings, scratch)
    assert isinstance(found, Outcome), found
    assert (found.faults, ended) == ([], "")
    assert set(found.samples) == {phase.number for phase in settings.phases()}
    assert found.checked == sum(area.places for phase in settings.phases() for area in areas(phase, settings))
    for phase in settings.phases():
        samples = found.samples[phase.number]
        if phase.kind == "bandwidth":
            assert samples.moved_bytes == 5 * phase.nbytes
            assert samples.elapsed_ns > 0
            continue
        assert len(samples.first) == len(samples.post) == 5
        assert len(samples.bulk) == len(samples.both) == (5 if phase.kind == "mixed" else 0)
        assert all(one <= both for one, both in zip(samples.bulk, samples.both, strict=True))
    source, *targets = sorted(fake_transfer.AGENTS.values(), key=lambda agent: agent.name)
    assert source.prepared == 0
    assert source.copies == sum(6 * len(areas(phase, settings)) for phase in settings.phases())
    assert len(targets) == 2
    assert all(agent.closed for agent in (source, *targets))


@pytest.mark.parametrize("fault", ["loses the last one", "shifts by a byte", "tears", "takes the next place"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_pair_sees_what_an_engine_does_wrong(fake: Any, scratch: Path, fault: str, operation: str) -> None:
    settings = replace(SMALL, engine=fake(fault), operations=(operation,), sizes=(4096,), bulk_sizes=(8192,), peers=("same",))
    found, ended = pair(settings, scratch)
    assert isinstance(found, Outcome), found
    assert found.faults
    assert ended == ""


def test_sides_that_were_started_otherwise_say_how_they_differ(fake: Any, scratch: Path) -> None:
    settings = replace(SMALL, engine=fake())
    found, ended = pair(settings, scratch, replace(settings, sizes=(64,), seed=8))
    assert isinstance(found, MismatchError)
    assert "sizes is [64, 4096] here and [64] there, seed is 7 here and 8 there" in str(found)
    assert ended.startswith(("MismatchError", "PeerError"))


def test_what_fails_on_one_side_is_told_on_the_other(fake: Any, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(agent: Any, handle: Any) -> bool:
        raise PeerError("it is gone")

    monkeypatch.setattr(fake_transfer.FakeAgent, "poll", fail)
    found, ended = pair(replace(SMALL, engine=fake()), scratch)
    assert isinstance(found, PeerError)
    assert ended == "PeerError: the source failed: PeerError: it is gone"


@pytest.mark.parametrize("fault", ["", "says a stale write was good"])
def test_a_registration_that_was_taken_back_must_fail(fake: Any, scratch: Path, fault: str) -> None:
    found, ended = pair(replace(SMALL, engine=fake(fault)), scratch, faulty=True)
    assert isinstance(found, Outcome), found
    assert ended == ""
    if fault:
        assert [word in found.faults[at] for at, word in enumerate(("read", "write"))] == [True, True]
    else:
        assert found.faults == []
        assert found.refused == dict.fromkeys(("read", "write"), "TransferError: the registration is stale")


@pytest.mark.parametrize(("provider", "lanes"), [("tcp", 1), ("tcp", 2), ("local", 2)])
def test_ours_refuses_a_registration_that_was_taken_back_and_says_why(provider: str, lanes: int, scratch: Path) -> None:
    found, ended = pair(replace(SMALL, engine="expertwire", provider=provider, lanes=lanes), scratch, faulty=True)
    assert isinstance(found, Outcome), found
    assert (found.faults, ended) == ([], "")
    assert set(found.refused) == {"read", "write"}
    assert all(what.startswith("TransferError") and "not registered any more" in what for what in found.refused.values())


# ---- rows


def test_rows_have_every_run_the_medians_and_how_many_processes_ended_cleanly() -> None:
    asked = transfer.Asked(("fake",), True, SMALL, 3)
    labels = {"engine": "fake", "op": "read", "bytes": 64, "peer": "same"}
    runs = [
        Ended(
            {"source": 0, "target": 0},
            [{"name": "single_p50_us", "value": value, "unit": "µs", "status": "ok", "run": run, **labels}],
            "",
        )
        for run, value in ((1, 5.0), (2, 1.0), (3, 2.0))
    ]
    report = Report("bench transfer", {})
    transfer.add_rows(report, "fake", asked, runs)
    rows = {row.labels.get("run", row.name): row for row in report.rows}
    assert (rows["clean_exits"].value, rows["clean_exits"].labels["processes"]) == (6, 6)
    assert [rows[run].value for run in (1, 2, 3, "median")] == [5.0, 1.0, 2.0, 2.0]
    assert (rows["median"].labels["low"], rows["median"].labels["high"]) == (1.0, 5.0)
    assert report.exit_status() == Exit.OK
    transfer.add_rows(report, "fake", asked, [Ended({"source": 0, "target": -9}, [], "target ended with -9: killed")])
    assert report.rows[-1].labels["why"] == "target ended with -9: killed"
    assert report.exit_status() == Exit.FAILED


def test_an_engine_that_turns_out_not_to_run_is_skipped_and_told_only_if_asked_for() -> None:
    ended = [Ended({"source": 1, "target": 3}, [], "target ended with 3: no plugin")]
    for by_name in (True, False):
        report = Report("bench transfer", {})
        transfer.add_rows(report, "fake", transfer.Asked(("fake",), by_name, SMALL, 1), ended)
        assert [(row.status.value, row.labels["why"]) for row in report.rows] == [("skipped", ended[0].why)] * by_name


# ---- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "nixl"], "--engine names 'nixl'; give one or more of expertwire, "),
        (["--engine", "expertwire", "--op", "copy"], "--op names 'copy'"),
        (["--engine", "expertwire", "--bytes", "12"], "--bytes names 12"),
        (["--engine", "expertwire", "--bulk-bytes", "1000000000"], "--bulk-bytes names 1000000000"),
        (["--engine", "expertwire", "--runs", "0"], "--runs is 0; it must be 1 to 99"),
        (["--engine", "expertwire", "--role", "source"], "--role and --meet belong together"),
        (["--engine", "expertwire,mooncake", "--role", "source", "--meet", "x:1"], "--engine names 2"),
        (["--engine", "expertwire", "--peer", "third"], "--peer names 'third'"),
    ],
)
def test_mistakes_are_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_an_engine_asked_for_by_name_that_is_not_here_is_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setitem(ENGINES, "mooncake", replace(ENGINES["mooncake"], packages=("no_such_package",)))
    assert main(["bench", "transfer", "--engine", "mooncake", "--json", str(out)]) == Exit.SKIPPED
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["engine"], row["status"], row["value"]) == ("mooncake", "skipped", None)
    assert "pip install" in row["why"]
    assert "mooncake" in capsys.readouterr().err
    assert "mooncake" not in transfer.default_engines("tcp")


def test_bench_transfer_verifies_every_arm_and_names_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["--runs", "1", "--warmup", "1", "--iterations", "3", "--bytes", "4096,8192", "--bulk-bytes", "16384", "--provider", "tcp"]
    done = expertwire("bench", "transfer", "--engine", "expertwire,expertwire-global-list", *words, "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    engines = ["expertwire", "expertwire-global-list"]
    for name, value in (("verified", 1), ("clean_exits", 2), ("late_payloads", 0)):
        assert [(row["engine"], row["value"], row["status"]) for row in values(out, name)] == [(engine, value, "ok") for engine in engines]
    shapes = {
        "single_p50_us": {(size, None, "same") for size in (4096, 8192)},
        "bandwidth_GBps": {(size, None, "same") for size in (4096, 8192)},
        "small_alone_p99_us": {(4096, 16_384, peer) for peer in ("same", "other")},
        "small_mixed_p99_us": {(4096, 16_384, peer) for peer in ("same", "other")},
        "window_GBps": {(4096, 16_384, peer) for peer in ("same", "other")},
    }
    for name, wanted in shapes.items():
        for run in (1, "median"):
            rows = [row for row in values(out, name) if row["run"] == run]
            assert {(row["engine"], row["op"]) for row in rows} == {(engine, op) for engine in engines for op in ("read", "write")}
            assert {(row["bytes"], row.get("bulk_bytes"), row["peer"]) for row in rows} == wanted
            assert len(rows) == 4 * len(wanted)
            assert all(row["value"] > 0 and (row["provider"], row["injected"]) == ("tcp", "none") for row in rows)
    identity = json.loads(out.read_text())["config"]["engines"]["expertwire"]
    assert any(name.startswith("_native") and len(digest) == 16 for name, digest in identity["binaries"].items())
