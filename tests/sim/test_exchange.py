"""Whole clusters of exchanges in virtual time: 1…12 ranks (now and then 70), every byte against an oracle of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertwire import _simulation
from expertwire.testing.faults import NTH_FAULTS

SEEDS_FILE = Path(__file__).with_name("seeds.txt")
SEEDS = 1_000
BATCH = 125
MUTANT_SEEDS = 60

FAULTS = (
    "again",
    "late_delivery",
    "late_completion",
    "early_local",
    "failed_operation",
    "failed_post",
    "lost_completion",
    "duplicate",
    "wrong_generation",
    "null_context",
    "full_queue",
)
SITUATIONS = (
    "began_while_others_were_behind",
    "capacity_errors",
    "combine_copied",
    "combine_in_rounds",
    "dispatch_in_rounds",
    "combine_in_place",
    "combine_only_weights_copied",
    "combine_weights",
    "dispatch_cached",
    "dispatch_scales",
    "dispatch_weights",
    "dispatch_without_topk",
    "duplicate_ids",
    "endpoints_replaced",
    "epochs_across_2_31",
    "epochs_across_2_32",
    "epochs_used_up",
    "fewer_experts_than_ranks",
    "index_i32",
    "index_i64",
    "mask_of_two_words",
    "mismatch_errors",
    "nobody_has_tokens",
    "odd_row_bytes",
    "put_failures",
    "rank_all_minus_one",
    "rank_without_tokens",
    "rendezvous",
    "scattered_nodes",
    "submissions_pushed_back",
    "uneven_experts",
    "uneven_nodes",
    "window_of_one_row",
    "worst_tokens",
    "worst_tokens_cached",
    "worst_tokens_overflow",
    "mismatch_of_worst_tokens",
)


@pytest.fixture(scope="module")
def coverage() -> dict[str, int]:
    """What the batches of this module have covered together."""
    return {}


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_byte_is_right(first: int, coverage: dict[str, int]) -> None:
    result: dict[str, Any] = _simulation.run_exchange_seeds(first, BATCH)
    assert result["failures"] == [], "\n".join(f"seed {seed}: {text}" for seed, text in result["failures"][:3])
    assert len(result["trace_hashes"]) == BATCH
    for name, count in result["coverage"].items():
        coverage[name] = coverage.get(name, 0) + count


def test_the_seeds_cover_what_they_should(coverage: dict[str, int]) -> None:
    if not coverage:
        pytest.skip("the batches did not run")
    print("\n" + " ".join(f"{name}={count}" for name, count in sorted(coverage.items())))
    names = [f"fault_{name}" for name in FAULTS] + list(SITUATIONS)
    names += [f"ranks_{ranks}" for ranks in range(1, 13)] + [f"nodes_{nodes}" for nodes in range(1, 5)]
    names += [f"bias_{biases}" for biases in range(3)] + [f"lanes_{lanes}" for lanes in range(1, 4)]
    assert [name for name in names if coverage.get(name, 0) == 0] == []


def test_same_seed_same_trace() -> None:
    first = _simulation.run_exchange_seeds(0, 40)["trace_hashes"]
    assert _simulation.run_exchange_seeds(0, 40)["trace_hashes"] == first
    assert len(set(first)) > 35, "one rank that is refused its second call leaves nearly no trace"


@pytest.mark.parametrize(
    "mutant",
    [
        "no_gate",
        "no_epoch_in_counters",
        "no_wait_for_notify",
        "combine_without_notify",
        "no_staging_credit",
        "no_wait_for_window",
        "no_wait_for_readers",
        "long_write",
    ],
)
def test_the_oracle_catches(mutant: str) -> None:
    result = _simulation.run_exchange_seeds(0, MUTANT_SEEDS, mutant=mutant, stop=True)
    assert result["failures"], f"{mutant} went unseen through {MUTANT_SEEDS} seeds"


@pytest.mark.parametrize("how", NTH_FAULTS)
def test_the_nth_operation_fails_for_every_n(how: str) -> None:
    """Whoever ends well has the right bytes, whoever does not knows why, and every ticket ends."""
    result = _simulation.run_exchange_nth(2, how)
    assert result["failures"] == []
    assert result["struck"] > 50
    assert result["coverage"].get("endpoints_replaced", 0) > 0 or how != "lost"
    put_failures = result["coverage"]["put_failures"]
    assert put_failures > 20 or how in ("again", "lost")
    assert put_failures == 0 or how != "again", "being pushed back is never fatal"


def kept_seeds() -> list[int]:
    lines = (line.split("#")[0].split() for line in SEEDS_FILE.read_text().splitlines())
    return [int(words[1]) for words in lines if words and words[0] == "exchange"]


def test_seeds_that_failed_once() -> None:
    for seed in kept_seeds():
        assert _simulation.run_exchange_seeds(seed, 1)["failures"] == [], f"seed {seed}"


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(ValueError, match="is no mutant"):
        _simulation.run_exchange_seeds(0, 1, mutant="nonsense")
