"""Ranks under mpiexec, and the bench beside MPI: nodes that are ours, failures with a name, and a skip that says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import targets
from cli.test_commands import RATIOS, expertwire, ratios, values
from cli.test_launch import Watch
from expertwire.cli import mpi
from expertwire.cli.launch import RankError
from expertwire.cli.main import main
from expertwire.cli.report import Exit

SMALL = ["--tokens", "40", "--hidden", "512", "--experts", "16", "--topk", "4", "--iterations", "2", "--warmup", "1"]
NEEDS_MPI = pytest.mark.skipif(bool(mpi.missing()), reason=mpi.missing())


@NEEDS_MPI
def test_bench_ep_beside_mpi_whose_nodes_are_ours(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    done = expertwire("bench", "ep", *SMALL, "--ranks", "4", "--ranks-per-node", "2", "--against", "mpi", "--json", str(out))
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert [(row["engine"], row["value"]) for row in values(out, "verified")] == [("expertwire", 1), ("mpi", 1)]
    for name in ("over_mpi", "over_mpi_exchange"):
        assert ratios(out, name) == RATIOS
        assert all(row["value"] > 0 and row["engine"] == "mpi" for row in values(out, name))
    provider = json.loads(out.read_text())["config"]["peers"]["mpi"]
    assert provider.endswith("nodes by their first ranks 0,0,2,2")
    assert f"mpi: {provider}" in done.stdout


@NEEDS_MPI
def test_nodes_that_mpi_cannot_have_are_named_and_the_rest_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ep.json"
    words = ["bench", "ep", *SMALL, "--ranks", "4", "--ranks-per-node", "3", "--against", "mpi", "--json", str(out)]
    assert main(words) == Exit.SKIPPED
    (row,) = values(out, "over_mpi")
    assert (row["status"], row["value"]) == ("skipped", None)
    assert "which are not the nodes [0, 0, 0, 1]" in row["why"]
    assert "--against mpi is skipped" in capsys.readouterr().err
    assert [(row["engine"], row["value"]) for row in values(out, "verified")] == [("expertwire", 1)]


def test_without_mpi_it_is_skipped_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "missing", lambda: "mpi4py cannot be imported: pip install mpi4py mpich")
    out = tmp_path / "ep.json"
    assert main(["bench", "ep", *SMALL, "--ranks", "2", "--against", "mpi", "--json", str(out)]) == Exit.SKIPPED
    (row,) = values(out, "over_mpi")
    assert (row["status"], row["why"]) == ("skipped", "mpi4py cannot be imported: pip install mpi4py mpich")
    assert [row["value"] for row in values(out, "verified")] == [1]


@NEEDS_MPI
def test_results_come_by_rank_and_failures_are_named() -> None:
    assert mpi.launch_mpi(targets.add_up, (10,), (0, 1), timeout_s=60) == [(rank, 21, 1) for rank in range(2)]
    with pytest.raises(RankError, match="rank 1 failed: ArithmeticError: rank 1 cannot go on") as caught:
        mpi.launch_mpi(targets.fail_on, (1,), (0, 0), timeout_s=60)
    assert caught.value.rank == 1
    watch = Watch()
    with pytest.raises(RankError, match="the process ended with exit code"):
        mpi.launch_mpi(targets.die_on, (1,), (0, 0), on_progress=watch, timeout_s=60)
    watch.assert_gone()
