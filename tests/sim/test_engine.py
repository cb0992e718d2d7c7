"""The engine over the simulated network: a thousand seeds, what they covered, replays, and the kept mutants."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from expertwire.errors import InvalidArgumentError
from expertwire.testing import sweep
from expertwire.testing.cluster import RunReport, SimulatedCluster, coverage, kept_mutant, simulation
from expertwire.testing.faults import NTH_FAULTS, NetworkFaults
from expertwire.testing.oracle import check_payload, payload, payload_seed

SEEDS = 1200
SEEDS_FILE = Path(__file__).with_name("seeds.txt")
ENGINE_MUTANTS = (
    "no_gate",
    "count_for_prefix",
    "no_generation_check",
    "publish_before_drain",
    "buffer_freed_at_timeout",
    "long_write",  # seen by the shadow of the memory alone
    "never_reopens",  # seen by what must end once the network has healed
    "join_over_gap",
    "join_ends_one",
)


def kept_seeds() -> list[int]:
    lines = (line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines())
    return [int(words[1]) for words in lines if words and words[0] == "engine"]


def kept_nth() -> list[str]:
    lines = (line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines())
    return [words[1] for words in lines if words and words[0] == "engine-nth"]


def fail_with(failed: list[RunReport]) -> None:
    """Keeps the seeds and says how to replay them."""
    known = set(kept_seeds())
    with SEEDS_FILE.open("a") as file:
        for report in failed:
            if report.seed not in known:
                file.write(f"engine {report.seed}  # {report.failure}\n")
    shown = "\n".join(f"seed {report.seed}: {report.failure}\n  replay: {report.replay_command()}" for report in failed[:5])
    pytest.fail(f"{len(failed)} seeds failed; they were added to {SEEDS_FILE.name}\n{shown}", pytrace=False)


@pytest.fixture(scope="module")
def thousand() -> list[RunReport]:
    return SimulatedCluster().run_many(range(SEEDS))


def test_a_thousand_seeds_hold(thousand: list[RunReport]) -> None:
    failed = [report for report in thousand if not report.passed]
    if failed:
        fail_with(failed)
    assert len(thousand) == SEEDS
    assert all(report.requests > 0 and report.landings > 0 for report in thousand)


def test_coverage(thousand: list[RunReport], capsys: pytest.CaptureFixture[str]) -> None:
    covered = coverage(thousand)
    with capsys.disabled():
        print(f"\nengine simulation:\n{covered.text()}")
    assert set(covered.transitions) == set(simulation().transitions()), "a transition of the table was never taken"
    assert [name for name, count in covered.faults.items() if count == 0] == []
    assert [name for name, count in covered.events.items() if count == 0] == []
    assert min(covered.scopes) > 1000
    assert min(covered.queue_pairs_per_peer) >= 2
    assert covered.ranks[12] >= SEEDS // 25
    assert SEEDS // 6 < covered.ordered_runs < SEEDS // 2


@pytest.mark.parametrize("seed", kept_seeds())
def test_seeds_that_failed_once(seed: int) -> None:
    report = SimulatedCluster().run(seed)
    assert report.passed, f"{report.failure}; replay: {report.replay_command()}"


@pytest.mark.parametrize("nth", kept_nth())
def test_nth_operations_that_failed_once(nth: str) -> None:
    assert sweep.main(["--replay", f"engine-nth:{nth}"]) == 0


def test_same_seed_same_trace(thousand: list[RunReport]) -> None:
    again = SimulatedCluster().run_many(range(40))
    assert again == thousand[:40]
    assert len({report.trace_hash for report in thousand}) > SEEDS - 3


def test_twelve_ranks_by_request() -> None:
    report = SimulatedCluster(ranks=12, requests_per_rank=6).run(7)
    assert report.passed, report.failure
    assert report.ranks == 12


@pytest.mark.parametrize("mutant", ENGINE_MUTANTS)
def test_the_oracle_catches_the_kept_mutant(mutant: str) -> None:
    """Within the default seeds, by what is seen from outside alone: the engine's own checks are off."""
    with kept_mutant(mutant):
        reports = SimulatedCluster(check_engine=False).run_many(range(SEEDS), stop_at_failure=True)
    assert not reports[-1].passed, f"{mutant} survived {SEEDS} seeds"
    assert SimulatedCluster(check_engine=False).run(reports[-1].seed).passed, "the seed fails without the mutant as well"


def test_without_faults_everything_succeeds() -> None:
    for report in SimulatedCluster(faults=NetworkFaults()).run_many(range(50)):
        assert report.passed, report.failure
        assert "DRAINING->FAILED" not in report.transitions


@pytest.mark.parametrize("how", NTH_FAULTS)
def test_the_nth_operation_fails_for_every_n(how: str) -> None:
    """The n-th operation fails, and nothing else does: everything that does not depend on it goes on, for every n."""
    for seed, ranks in ((1, 2), (2, 3), (3, 2)):
        result = simulation().run_engine_nth(seed, how, ranks, 6)
        assert result["failures"] == [], f"replay: python -m expertwire.testing.sweep --replay engine-nth:{seed}:{how}:N"
        assert result["struck"] > 20


def test_every_kind_of_fault_was_on_without_each_other(thousand: list[RunReport]) -> None:
    """Swarm testing: a kind that is always there hides what another would show alone."""
    swarms = [set(report.swarm) for report in thousand]
    kinds = set().union(*swarms)
    assert len(kinds) == 21
    missing = [(a, b) for a, b in permutations(kinds, 2) if not any(a in swarm and b not in swarm for swarm in swarms)]
    assert missing == []


def test_another_process_sees_the_same_trace(thousand: list[RunReport]) -> None:
    for report in thousand[3:5]:
        command = [sys.executable, "-m", "expertwire.testing.sweep", "--replay", f"engine:{report.seed}", "--trace", "100000"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert f"engine:{report.seed}: held; trace {report.trace_hash:#018x}" in done.stdout
        assert "the network heals" in done.stdout


def test_again_torture() -> None:
    faults = NetworkFaults(again=0.7, again_burst_max=6, late_completion=0.5)  # more, and the hard deadline would strike, rightly
    for report in SimulatedCluster(faults=faults).run_many(range(20)):
        assert report.passed, report.failure
        assert report.faults["again"] > 0
        assert "DRAINING->FAILED" not in report.transitions, "back-pressure is never fatal"


def test_four_slots_for_more_lanes_and_the_shortest_queues() -> None:
    """Nothing fails, order is kept (the engine counts a post out of turn as misuse), and no lane starves."""
    for report in SimulatedCluster(squeeze=True).run_many(range(30)):
        assert report.passed, report.failure
        assert report.ranks == 12
        assert report.faults["full_queue"] > 0
        assert "DRAINING->FAILED" not in report.transitions
        assert 0 < report.longest_wait <= 4 * 36, "the bound of the check"


def test_options_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match=r"again is 1\.5"):
        NetworkFaults(again=1.5)
    with pytest.raises(InvalidArgumentError, match="fail_how is 'never'"):
        NetworkFaults(fail_how="never")
    with pytest.raises(InvalidArgumentError, match="ranks=65"):
        SimulatedCluster(ranks=65)
    with pytest.raises(InvalidArgumentError, match="no_such"), kept_mutant("no_such"):
        pass


def test_payload_oracle_sees_stale_shifted_and_torn_bytes() -> None:
    seed = payload_seed(source=3, epoch=9)
    data = payload(seed, 5, 4096)
    assert check_payload(data, seed, 5) is None
    assert np.array_equal(payload(seed, 0, 5000)[5:4101], data)
    stale = check_payload(data, payload_seed(3, 8), 5)
    shifted = check_payload(data, seed, 6)
    assert stale is not None
    assert stale.wrong > 4000
    assert shifted is not None
    assert shifted.wrong > 4000
    torn = data.copy()
    torn[1000] ^= 1
    found = check_payload(torn, seed, 5)
    assert found is not None
    assert (found.offset, found.wrong) == (1005, 1)
