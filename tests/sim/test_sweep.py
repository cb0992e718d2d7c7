"""The runner of many seeds: what it covers, how it reports, and that a failing seed can be replayed by the command that it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from expertwire import _simulation
from expertwire.testing import sweep, transfers
from expertwire.testing.cluster import kept_mutant


def test_every_family_runs_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.json"
    assert sweep.main(["--seeds", "8", "--first", "17", "--jobs", "1", "--json", str(path)]) == 0
    said = capsys.readouterr()
    assert "everything held" in said.out
    assert "37/37 seeds, 0 failing" in said.err
    rows = json.loads(path.read_text())["rows"]
    assert {row["family"] for row in rows} == set(sweep.FAMILIES)
    seeds = {row["family"]: row["value"] for row in rows if row["name"] == "seeds"}
    whole = dict.fromkeys(("engine", "counted", "exchange", "low-latency"), 8)
    assert seeds == whole | {f"{name}-nth": 1 for name in whole} | {"transfer": 1}
    assert {row["status"] for row in rows} == {"ok"}


def test_work_is_cut_into_every_seed_once_and_some_twice() -> None:
    work = sweep.batches(["engine", "engine-nth"], 7, 10_000)
    seeds = [seed for batch in work if batch.family == "engine" and not batch.again for seed in batch.seeds()]
    assert sorted(seeds) == list(range(7, 10_007))
    assert sum(batch.again for batch in work) == 2
    nth = [seed for batch in work if batch.family == "engine-nth" for seed in batch.seeds()]
    assert nth == list(range(7, 10_007, 100))


def test_another_trace_in_another_process_is_a_failure() -> None:
    totals = sweep.Totals()
    batch = sweep.Batch("engine", 0, 10)
    totals.add(sweep.Outcome(batch, 10, 5, (), 0.1))
    totals.add(sweep.Outcome(sweep.Batch("engine", 0, 10, again=True), 10, 6, (), 0.1))
    assert [failure.seed for failure in totals.failures] == [0]
    assert totals.seeds["engine"] == 10


@pytest.mark.parametrize("family", ["engine", "counted", "exchange", "low-latency"])
def test_a_failing_seed_prints_the_command_that_replays_it(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    if family in ("engine", "counted"):
        with kept_mutant("long_write"):
            failures = list(sweep.run_batch(sweep.Batch(family, 1, 2)).failures)
    else:  # the first seed that sees it: which one that is changes with the layout of what is sent
        run = _simulation.run_low_latency_seeds if family == "low-latency" else _simulation.run_exchange_seeds
        failures = [sweep.Failure(family, seed, text) for seed, text in run(1, 60, mutant="long_write", stop=True)["failures"]]
    assert failures
    command = shlex.split(failures[0].replay_command())
    assert command[:3] == ["python", "-m", "expertwire.testing.sweep"]
    assert sweep.main([*command[3:], "--mutant", "long_write"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert " post write " in said
    assert sweep.main(command[3:]) == 0, "without the mutant it holds"


def test_replay_of_an_nth_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--replay", "engine-nth:1:post:5", "--trace", "1000"]) == 0
    assert "post refused" in capsys.readouterr().out
    assert sweep.main(["--replay", "exchange-nth:2:lost:5", "--trace", "1000"]) == 0
    assert "heals" in capsys.readouterr().out
    assert sweep.main(["--replay", "low-latency-nth:6:post:2", "--trace", "1000"]) == 0
    assert "post refused" in capsys.readouterr().out


def test_arguments_are_checked() -> None:
    with pytest.raises(SystemExit):
        sweep.main(["--seeds", "0"])


def test_replay_of_a_transfer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep.main(["--replay", "transfer:3"]) == 0
    assert "transfer:3: held" in capsys.readouterr().out
    monkeypatch.setattr(transfers.World, "end", lambda self: transfers._hold(False, "it never ended"))
    assert [each.text for each in sweep.run_batch(sweep.Batch("transfer", 3, 1)).failures] == ["StateError: it never ended"]
    assert sweep.main(["--replay", "transfer:3"]) == 1
