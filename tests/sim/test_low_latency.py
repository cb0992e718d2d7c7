"""Whole clusters in low-latency mode in virtual time: 1…8 ranks, every byte against an oracle of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertwire import _simulation

SEEDS_FILE = Path(__file__).with_name("seeds.txt")
SEEDS = 1_000
MUTANTS = {  # and within how many seeds it must be seen
    "no_gate": 60,
    "long_write": 60,
    "no_consumed_gate": 60,
    "flag_before_rows": 200,
    "consumed_before_packed": 200,
    "consumed_in_flight": 1_000,
    "any_flag": 60,
    "reused_in_flight": 60,
    "mask_forgets_consumed": 60,
    "told_of_overwritten": 60,
}
LATE_ROWS = (17839, 65395)  # of seeds.txt: rows that come late are rare
SITUATIONS = (
    "began_while_others_were_behind",
    "combines",
    "disagreements",
    "dispatches",
    "duplicate_ids",
    "epochs_across_2_32",
    "fewer_experts_than_ranks",
    "given_up",
    "heard_that_it_is_out",
    "hooks_before_own_rows_left",
    "masked",
    "masked_in_a_call",
    "ordered",
    "put_failures",
    "rank_all_minus_one",
    "rank_without_tokens",
    "refused_since_one_may_have_written",
    "refused_while_one_may_write",
    "second_hook_first",
    "submissions_pushed_back",
    "two_live",
    "uneven_experts",
    "unmasked",
    "zero_copy",
)


def test_every_byte_is_right() -> None:
    result: dict[str, Any] = _simulation.run_low_latency_seeds(0, SEEDS)
    assert result["failures"] == [], "\n".join(f"seed {seed}: {text}" for seed, text in result["failures"][:3])
    coverage = result["coverage"]
    print("\n" + " ".join(f"{name}={count}" for name, count in sorted(coverage.items())))
    names = [*SITUATIONS, *(f"ranks_{ranks}" for ranks in range(1, 9)), *(f"nodes_{nodes}" for nodes in range(1, 5))]
    names += [f"format_{kind}" for kind in range(4)]
    assert [name for name in names if coverage.get(name, 0) == 0] == []


def test_same_seed_same_trace() -> None:
    first = _simulation.run_low_latency_seeds(0, 40)["trace_hashes"]
    assert _simulation.run_low_latency_seeds(0, 40)["trace_hashes"] == first
    assert len(set(first)) > 35


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_catches(mutant: str) -> None:
    result = _simulation.run_low_latency_seeds(0, MUTANTS[mutant], mutant=mutant, stop=True)
    assert result["failures"], f"{mutant} went unseen through {MUTANTS[mutant]} seeds"


def test_the_oracle_catches_late_rows_that_are_forgotten() -> None:
    for seed in LATE_ROWS:
        assert _simulation.run_low_latency_seeds(seed, 1, mutant="late_rows_forgotten")["failures"], f"seed {seed}"


def test_seeds_that_failed_once() -> None:
    lines = (line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines())
    for seed in [int(words[1]) for words in lines if words and words[0] == "low_latency"]:
        assert _simulation.run_low_latency_seeds(seed, 1)["failures"] == [], f"seed {seed}"


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(ValueError, match="is no mutant"):
        _simulation.run_low_latency_seeds(0, 1, mutant="nonsense")
