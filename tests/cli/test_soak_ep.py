"""The soak of dispatch and combine: equal seeds have equal hashes, every kind of call occurs, a dead rank is named, and damage is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli import targets
from cli.test_commands import environment, expertwire
from expertwire.cli.launch import launch
from expertwire.cli.report import Exit, Report
from expertwire.cli.soak import ep_plan as plan
from expertwire.cli.soak import ep_worker as worker
from expertwire.cli.soak.ep import add_rows
from expertwire.cli.soak.ep_worker import Setup

NODES = (0, 0, 1)
ITERATIONS = 20
KINDS = (
    "FP8 dispatches", "combines", "dispatches", "dispatches by a handle", "dispatches by the small buffer",
    "dispatches of num_worst_tokens", "handles of earlier iterations", "low-latency FP8", "low-latency dispatches and combines",
    "more rows than num_worst_tokens", "operations posted, beside", "operations posted, main", "operations posted, small",
)  # fmt: skip


def rows_of(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        rows.setdefault(row["name"], []).append(row)
    return rows


def soak(setup: Setup) -> dict[str, list[dict[str, Any]]]:
    report = Report("soak ep", {})
    add_rows(report, launch(worker.soak, (setup,), setup.ranks, timeout_s=60), setup)
    assert report.exit_status() == Exit.OK, report.rows
    return rows_of(report.as_json()["rows"])


def test_equal_seeds_have_equal_hashes_whatever_carries_the_rows(tmp_path: Path) -> None:
    """Once as people run it, and once over the other provider."""
    out = tmp_path / "soak.json"
    words = ["--ranks", "3", "--ranks-per-node", "2", "--seed", "5", "--iterations", str(ITERATIONS), "--hash", "--json", str(out)]
    done = expertwire("soak", "ep", *words)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert {line.split(" pid ")[0] for line in lines if " pid " in line} == {"rank 0", "rank 1", "rank 2"}
    assert "iteration 1" in lines
    assert f"iteration {ITERATIONS}" in lines
    shown, again = rows_of(json.loads(out.read_text())["rows"]), soak(Setup("both", NODES, "local", 5, 0.0, ITERATIONS))
    assert lines[-1] == f"payload_hash {shown['payload_hash'][0]['blake2b']}"
    for rows in (shown, again):
        assert rows["payload_hash"][0]["blake2b"] == again["payload_hash"][0]["blake2b"]
        assert rows["iterations"][0]["value"] == ITERATIONS
        assert (rows["failures"][0]["value"], rows["faults_injected"][0]["value"]) == (0, 0)
        calls = {row["kind"]: row["value"] for row in rows["calls"]}
        assert not [kind for kind in KINDS if not calls.get(kind) and (rows is shown or "posted" not in kind)], calls


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_one_mode_alone_whose_hash_follows_the_seed(mode: str) -> None:
    one, other = (soak(Setup(mode, (0, 1), "local", seed, 0.0, 5))["payload_hash"][0] for seed in (2, 3))
    assert one["mode"] == {"ht": "high_throughput", "ll": "low_latency"}[mode]
    assert one["blake2b"] != other["blake2b"]
    rows = soak(Setup(mode, (0, 1), "local", 2, 0.0, 9, seeds=2))  # 4.5 iterations each: 5
    whole, *each = rows["payload_hash"]
    assert [(row["seed"], row["blake2b"]) for row in each] == [(2, one["blake2b"]), (3, other["blake2b"])]
    assert whole["blake2b"] not in (one["blake2b"], other["blake2b"])
    assert [row["value"] for row in rows["iterations"]] == [10, 5, 5]
    assert [row["value"] for row in rows["seeds"]] == [2]


def test_where_a_clock_decides_it_is_that_of_rank_0() -> None:
    outcomes = launch(worker.soak, (Setup("both", (0, 0), "local", 2, 0.3, 0),), 2, timeout_s=60)
    assert outcomes[0].iterations == outcomes[1].iterations > 0
    assert not any(outcome.failures for outcome in outcomes)


def test_a_killed_rank_ends_it_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    words = [sys.executable, "-m", "expertwire.cli", "soak", "ep", "--seconds", "60", "--ranks", "3", "--json", str(out)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    try:
        assert running.stdout is not None
        pids: dict[int, int] = {}
        for line in running.stdout:
            if line.startswith("rank "):
                _, rank, _, pid = line.split()
                pids[int(rank)] = int(pid)
            elif line.startswith("iteration ") and len(pids) == 3:
                break
        os.kill(pids[1], signal.SIGKILL)
        _, errors = running.communicate(timeout=90)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == Exit.FAILED
    assert "rank 1: RankError: the process ended with exit code -9" in errors
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["name"], row["value"], row["status"]) == ("failures", 1, "failed")
    assert "rank 1 failed" in row["why"]


def test_it_sees_what_it_is_meant_to_see() -> None:
    damages = {"rows", "rows_by_handle", "ids", "weights", "scales", "sums", "low_latency_rows", "low_latency_scales", "low_latency_sums"}
    outcomes = launch(targets.soak_ep_with_damage, (Setup("both", (0, 1), "local", 3, 0.0, ITERATIONS), damages), 2, timeout_s=60)
    assert [outcome.failed for outcome, _ in outcomes] == [0, len(damages)]
    said = outcomes[1][1]
    assert said == outcomes[1][0].failures
    for what in damages:
        (one,) = [line for line in said if f"--seed 3: {what} differs" in line]
        assert one.startswith("ExpertwireError: iteration ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks is 1; it must be 2 to 64"),
        (["--ranks-per-node", "0"], "--ranks-per-node is 0; the least is 1"),
        (["--iterations", "-1"], "--iterations is -1"),
        (["--seeds", "0"], "--seeds is 0; it must be 1 to 1000000"),
        (["--mode", "fast"], "--mode is 'fast'; give one of"),
    ],
)
def test_wrong_numbers_name_option_value_and_limit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from expertwire.cli.main import main

    assert main(["soak", "ep", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("mode", plan.MODES)
def test_every_order_has_each_phase_once_and_waits_for_hooks(mode: str) -> None:
    kinds: Counter[str] = Counter()
    for number in range(300):
        made = plan.iteration(9, number, 4, mode)
        assert made == plan.iteration(9, number, 4, mode)
        assert Counter(made.order) == {at: len(flight.phases) for at, flight in enumerate(made.flights)}
        done: Counter[int] = Counter()
        sends: dict[str, list[tuple[int, int]]] = {}  # of each Buffer: flight, and how many phases it has had when the hook has been called
        for at in made.order:
            flight = made.flights[at]
            kinds[type(flight).__name__] += 1
            phase = flight.phases[done[at]]
            done[at] += 1
            if isinstance(flight, plan.Decode) and phase in ("send", "return"):
                before = sends.setdefault(flight.buffer, [])
                assert len(before) < 2 or done[before[-2][0]] >= before[-2][1], f"iteration {number}: a hook is in the way"
                before.append((at, done[at] + flight.hook))
        kinds["both buffers"] += {flight.buffer for flight in made.flights} >= {plan.MAIN, plan.BESIDE}
        kinds["one buffer"] += len({flight.buffer for flight in made.flights}) == 1 < len(made.flights)
    assert kinds["one buffer"] > 20
    assert (kinds["Exchange"] > 0, kinds["Recall"] > 0, kinds["Decode"] > 0) == (mode != "ll", mode != "ll", mode != "ht")
    assert (kinds["both buffers"] > 20) == (mode != "ht")
