"""Class C over the simulated network: immediates and answers late and out of order, lost peers, failing posts."""

from __future__ import annotations

import pytest

from expertwire.testing.cluster import RunReport, SimulatedCluster, coverage, kept_mutant, simulation
from expertwire.testing.faults import NetworkFaults
from sim.test_engine import SEEDS_FILE

SEEDS = 600
IMMEDIATES, ADDED, WAITED, ABORTED, STRAYS, DROPPED = range(6)


def kept(family: str) -> list[str]:
    lines = (line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines())
    return [words[1] for words in lines if words and words[0] == family]


@pytest.fixture(scope="module")
def reports() -> list[RunReport]:
    return SimulatedCluster(counted=True).run_many(range(SEEDS))


def test_seeds_hold_whatever_happens_to_what_is_counted(reports: list[RunReport]) -> None:
    failed = [f"seed {report.seed}: {report.failure}" for report in reports if not report.passed]
    assert failed == [], "keep them in seeds.txt as 'counted SEED'"


def test_what_the_seeds_went_through(reports: list[RunReport]) -> None:
    covered = coverage(reports)
    total = [sum(report.counting[i] for report in reports) for i in range(6)]
    assert total[IMMEDIATES] > 10_000
    assert total[ADDED] > 1_000
    assert min(total[WAITED], total[ABORTED], total[STRAYS]) > 0
    for name in ("peer_reopened", "endpoint_replaced", "quarantined", "peer_declared_dead"):
        assert covered.events[name] > 0, name


def test_seeds_that_failed_once() -> None:
    for report in SimulatedCluster(counted=True).run_many(int(seed) for seed in kept("counted")):
        assert report.passed, report.failure


def test_without_faults_every_request_succeeds_and_most_signals_are_counted() -> None:
    for report in SimulatedCluster(counted=True, faults=NetworkFaults(late_delivery=0.5)).run_many(range(40)):
        assert report.passed, report.failure
        assert "DRAINING->FAILED" not in report.transitions
        assert report.counting[ABORTED] == report.counting[STRAYS] == 0


@pytest.mark.parametrize("mutant", ["count_one_fewer", "tag_freed_at_failure", "no_gate"])
def test_the_oracle_sees_a_count_that_is_not_kept(mutant: str) -> None:
    cluster = SimulatedCluster(counted=True, check_engine=False)
    with kept_mutant(mutant):
        found = [report for report in cluster.run_many(range(2 * SEEDS), stop_at_failure=True) if not report.passed]
    assert found
    assert "overtook" in found[0].failure


@pytest.mark.parametrize("how", ["operation", "post", "lost"])
def test_the_nth_operation_fails_for_every_n(how: str) -> None:
    result = simulation().run_engine_nth(3, how, counted=True)
    assert result["failures"] == []
    assert result["struck"] > 20
