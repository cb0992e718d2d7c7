"""The soak as people run it: equal seeds have equal hashes, every fault is injected, a dead rank is named, and damage is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli import targets
from cli.test_commands import environment, expertwire, of_group
from expertwire.cli.launch import launch
from expertwire.cli.report import Exit, Report
from expertwire.cli.soak import fabric as soak_fabric
from expertwire.cli.soak import plan, worker
from expertwire.cli.soak.fabric import add_rows
from expertwire.cli.soak.worker import Setup
from expertwire.errors import UnavailableError
from expertwire.fabric.config import Settings

ITERATIONS = 9  # a key is revoked in the fourth, a rank leaves and comes back after the eighth
KINDS = (
    "cancellations refused", "keys revoked, refused", "left and came back", "out of range, refused", "writes to who leaves",
)  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "expertwire.cli", "soak", "fabric", *words]


def soak(provider: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    setup = Setup(2, provider, seed, 0.0, ITERATIONS)
    report = Report("soak fabric", {})
    add_rows(report, launch(worker.soak, (setup,), setup.ranks, timeout_s=60), setup)
    assert report.exit_status() == Exit.OK, report.rows
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in report.as_json()["rows"]:
        rows.setdefault(row["name"], []).append(row)
    return rows


def test_equal_seeds_have_equal_hashes_and_every_fault_is_injected() -> None:
    """Whatever carries the bytes: they are the same."""
    found = [soak(provider, seed) for provider, seed in (("tcp", 5), ("local", 5), ("tcp", 6))]
    hashes = [rows["payload_hash"][0]["blake2b"] for rows in found]
    assert hashes[0] == hashes[1] != hashes[2]
    for rows in found:
        assert rows["iterations"][0]["value"] == ITERATIONS
        assert rows["failures"][0]["value"] == 0
        injected = {row["kind"]: row["value"] for row in rows["faults_injected_by_kind"]}
        assert rows["faults_injected"][0]["value"] == sum(injected.values())
        assert all(injected.get(kind, 0) > 0 for kind in KINDS), injected
        assert any("region in use" in kind or "after its use" in kind for kind in injected)
        assert injected["left and came back"] == 1
        assert injected["keys revoked, refused"] == 3  # a write, a read and a signal
        assert rows["requests_failed"][0]["value"] >= injected["keys revoked, refused"]


def test_a_killed_rank_ends_the_soak_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    words = command("--seconds", "60", "--ranks", "3", "--json", str(out))
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
        _, errors = running.communicate(timeout=90)  # 15 s it is at most, and on a machine with other work more
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == Exit.FAILED
    assert "rank 1 failed: the process ended with exit code -9" in errors
    (row,) = [row for row in json.loads(out.read_text())["rows"] if row["name"] == "failures"]
    assert (row["value"], row["status"]) == (1, "failed")
    assert "rank 1 failed" in row["why"]


def test_ctrl_c_ends_it_cleanly() -> None:
    words = command("--seconds", "60", "--ranks", "2", "--provider", "local")
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("iteration "):
                break
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=90)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == Exit.INTERRUPTED
    assert "Traceback" not in errors
    for descriptor in of_group(running.pid):
        os.close(descriptor)  # the server of the ranks may be about to end; a rank is not
    assert not [line for line in errors.splitlines() if "failed" in line]


@pytest.mark.parametrize("what", ["a byte of a payload", "a byte beside them", "a counter"])
def test_it_sees_what_it_is_meant_to_see(what: str) -> None:
    outcomes = launch(targets.soak_with_damage, (Setup(2, "local", 3, 0.0, 2), what), 2, timeout_s=60)
    assert [outcome.failed for outcome in outcomes] == [0, 1], outcomes
    assert "iteration 1, --seed 3" in outcomes[1].failures[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks is 1; it must be 2 to 64"),
        (["--iterations", "-1"], "--iterations is -1"),
        (["--seconds", "0"], "--seconds is 0.0"),
        (["--seed", "-3"], "--seed is -3"),
    ],
)
def test_wrong_numbers_name_option_value_and_limit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from expertwire.cli.main import main

    assert main(["soak", "fabric", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


def test_the_pieces_of_an_iteration_never_overlap_nor_leave_their_area() -> None:
    used = 0
    for iteration in range(200):
        found = plan.transfers(9, iteration, 0, 1)
        assert found == plan.transfers(9, iteration, 0, 1)
        assert len(found) <= plan.TRANSFERS_MAX
        for kind in ("write", "read"):
            pieces = [piece for transfer in found if transfer.kind == kind for piece in transfer.pieces]
            for start in ("offset", "place"):
                ranges = sorted((getattr(piece, start), getattr(piece, start) + piece.nbytes) for piece in pieces)
                assert all(end <= following for (_, end), (following, _) in pairwise(ranges))
                assert not ranges or (ranges[0][0] >= 0 and ranges[-1][1] <= plan.AREA_BYTES)
                used = max(used, ranges[-1][1] if ranges else 0)
            assert all(piece.nbytes > 0 for piece in pieces)
    assert used > plan.AREA_BYTES // 2


def test_pressure_reaches_both_ends() -> None:
    found = [plan.pressure(1, rank, incarnation) for rank in range(20) for incarnation in range(20)]
    assert 4 <= min(found) <= 5
    assert 400 <= max(found) <= 512


def test_delivery_complete_off_is_skipped_in_words_where_nothing_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rank: int, size: int, settings: Settings) -> None:
        raise UnavailableError(f"{settings.provider} {settings.ordering} is unsafe")

    monkeypatch.setattr("expertwire.fabric.Endpoint", refuse)
    setup = Setup(3, "tcp", 1, 1.0, 2, "alternate")
    assert soak_fabric.without_gate(setup) == (setup, "tcp auto is unsafe; tcp counted is unsafe")
    gated = replace(setup, delivery_complete="on")
    assert soak_fabric.without_gate(gated) == (gated, "")


def test_delivery_complete_alternates_and_the_target_counts_where_a_gate_would_need_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = expertwire("soak", "fabric", "--delivery-complete", "alternate", "--ranks", "2", "--iterations", "11", "--json", str(path))
    assert done.returncode == Exit.OK, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["failures"]["value"] == 0
    assert rows["failures"]["ordering_off"] == "counted"
    opened = {name: row["value"] for name, row in rows.items() if name.startswith("endpoints opened")}
    assert set(opened) == {"endpoints opened, delivery-complete 0, counted", "endpoints opened, delivery-complete 1"}


def test_what_the_interface_sent_is_reported_beside_what_we_say(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = expertwire("soak", "fabric", "--ranks", "2", "--iterations", "2", "--json", str(path))
    assert done.returncode == Exit.OK, done.stderr
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["interface_bytes"]["value"] > rows["payload_bytes"]["value"]
    assert rows["interface_packets"]["value"] > 0
