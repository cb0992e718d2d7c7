"""The low-latency mode where a rank is left out: it wakes up, hears of it, and comes back; and what a deadline says of each peer."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from ep import low_latency_left_out as ranks
from harness import World


def patience_ms() -> int:
    """How long the others wait for one that was stopped. Each rank that lives must have had a core by then, or it is left out as well: at
    35 processes for two cores 3 s were not enough."""
    return 3000 if os.getloadavg()[0] < 8 * (os.cpu_count() or 1) else 12_000


@pytest.mark.parametrize("provider", ["local", "tcp"])
def test_a_deadline_tells_not_in_the_call_sent_and_silent_apart(world: World, provider: str) -> None:
    for _ in range(8):  # where a rank that is not stopped gets no core for 2 s, it is silent
        error, reports = world.run(4, ranks.three_that_do_not_come, (0, 0, 1, 1), provider)[0]
        assert error is not None
        kind, _, message = error
        said = {int(line.split(":")[0].split()[1]): line for line in message.splitlines()[1:]}
        if "it is silent" not in said[1] + said[2]:
            break
    assert kind == "DeadlineError"
    moved = r"low_latency_dispatch \(call 3\) on rank 0, phase wait: nothing has moved for (\d+\.\d) s\n  rank 1: waiting"
    still = [float(re.match(moved, report)[1]) for report in reports]  # type: ignore[index]
    assert still[0] >= 2, "the first after 2 s"
    assert all(later - sooner >= 5 for sooner, later in itertools.pairwise(still)), "and then only every 5 s"
    assert sorted(said) == [1, 2, 3]
    assert re.search(r"waiting for its rows.*; it is not in this call: its last was call 2, phase done \(heartbeat \d\.\d s ago\)", said[1])
    assert "it is in call 3, phase wait, and has sent its 17 rows of this call, which have not arrived (heartbeat" in said[2]
    assert re.search(r"it is silent: no heartbeat for \d\.\d s", said[3])


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_what_was_sent_is_said(world: World, node_of: tuple[int, ...]) -> None:
    assert all(rows > 0 for rows in world.run(2, ranks.what_is_said, node_of, "local"))


@pytest.mark.parametrize(("provider", "moment"), [("local", "in a send"), ("tcp", "before its hook"), ("tcp", "in a send")])
def test_a_stopped_rank_wakes_up_hears_that_it_is_out_and_comes_back(world: World, provider: str, moment: str, tmp_path: Path) -> None:
    victim = 2
    answers = world.run(
        4, ranks.stopped_and_woken, (0, 0, 1, 1), provider, victim, moment, str(tmp_path / "heard"), patience_ms(), timeout_s=150
    )
    woken = answers.pop(victim)
    for kind, _, message in woken.values():
        assert kind == "ExcludedError", message
        assert re.search(r"ranks? [013](, [013])*( and [013])? ha(s|ve) left this rank out of call \d+", message)
        assert "low_latency_update_mask_buffer(2, False) on each of them" in message
    for rank, out in zip((0, 1, 3), answers, strict=True):
        kind, _, message = out["moved"]
        assert kind == "StateError", f"rank {rank}: {message}"
        assert "rank 2 is left out but may still write rows" in message
        kind, _, message = out["moved at once"]
        assert kind == "StateError", f"rank {rank}: {message}"
        assert "rank 2 was left out and may have written over rows that have come for this call" in message


def test_rows_on_their_way_at_a_mask_are_right_or_never_told_of(world: World) -> None:
    """In the simulation: seed 71115 of tests/sim/seeds.txt."""
    error = world.run(3, ranks.masked_with_rows_on_their_way, patience_ms())[2]
    assert error is not None
    kind, _, message = error
    assert kind == "ExcludedError", message
    assert re.search(r"left this rank out of call 1\b", message)


def test_a_rank_that_has_ended_keeps_the_shape_until_what_it_had_sent_has_come() -> None:
    """Its kernel still delivers. Two calls take far less than that may."""
    own = World(2)
    try:
        own.start(2, ranks.ended_and_moved, (0, 1), "tcp", 1)
        returned, what = own.finish(60, without=[1])[0]
    finally:
        own.close()
    assert returned, what
    *first, _, last = what["told"]
    assert first
    for kind, _, message in first:
        assert kind == "StateError"
        assert "rank 1 is left out but may still write rows" in message
    assert "rank 1 is left out and may have written over rows" in last[2]
    assert 0.9 < what["kept_s"] < 25
