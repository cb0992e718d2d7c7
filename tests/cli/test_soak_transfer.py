"""`soak transfer`: its plan, equal hashes of equal seeds whatever carries the bytes, every fault injected, damage seen, a death told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from expertwire.cli.main import main
from expertwire.cli.report import Exit, Report
from expertwire.cli.soak import transfer, transfer_plan
from expertwire.cli.soak.plan import AREA_BYTES
from expertwire.cli.soak.transfer_worker import Setup, Worker
from expertwire.errors import ExpertwireError

ITERATIONS = 3  # a registration is taken back in the second, an agent killed in the third
KINDS = {
    "stale registrations, refused",
    "unregistered memory, refused",
    "writes to who is killed",
    "killed, and started again under its name",
}


def test_the_pieces_of_an_iteration_never_overlap_nor_leave_their_area() -> None:
    lists = posted_again = prepared = 0
    for iteration in range(60):
        found = transfer_plan.moves(9, iteration, 0, 1)
        assert found == transfer_plan.moves(9, iteration, 0, 1)
        assert 1 <= len(found) <= transfer_plan.MOVES_MAX
        for kind in ("write", "read"):
            pieces = [piece for move in found if move.kind == kind for piece in move.pieces]
            for start in ("offset", "place"):
                ranges = sorted((getattr(piece, start), getattr(piece, start) + piece.nbytes) for piece in pieces)
                assert all(end <= following for (_, end), (following, _) in pairwise(ranges))
                assert not ranges or (ranges[0][0] >= 0 and ranges[-1][1] <= AREA_BYTES)
        for move in found:
            assert not move.order or sorted(move.order) == list(range(len(move.pieces)))
            lists = max(lists, len(move.pieces))
            posted_again += move.again
            prepared += bool(move.order)
    assert lists > 400
    assert posted_again > 0
    assert prepared > 0


def test_every_fault_comes_in_a_short_soak() -> None:
    found = [transfer_plan.faults(1, iteration, 3) for iteration in range(2 * transfer_plan.KILL_EVERY)]
    assert sum(one.killed is not None for one in found) == 2
    assert sum(one.stale is not None for one in found) == 4
    assert any(sum(one.unregistered) for one in found)


def test_equal_seeds_have_equal_hashes_and_every_fault_is_injected() -> None:
    """Whatever carries the bytes, and whatever else goes wrong: they are the same."""
    setup, outcome, report = Setup(2, "tcp", 3), transfer.Outcome(), Report("soak transfer", {})
    with transfer.Coordinator(setup, outcome) as coordinator:
        coordinator.soak(0.0, ITERATIONS)
    assert outcome.faults == []
    assert set(outcome.injected) == KINDS, outcome.injected
    assert outcome.injected["killed, and started again under its name"] == 1
    assert outcome.injected["stale registrations, refused"] == 2  # a READ and a WRITE
    injected = outcome.injected.total()
    transfer.add_rows(report, setup, outcome)
    assert report.exit_status() == Exit.OK
    rows = {row.name: row for row in report.rows}
    assert (rows["iterations"].value, rows["faults_injected"].value, rows["failures"].value) == (ITERATIONS, injected, 0)
    with agents(3) as workers:
        expected = hashlib.blake2b()
        for iteration in range(ITERATIONS):
            go(workers, iteration)
            for worker in workers:
                expected.update(worker.check()["digest"].encode())
        assert [worker.tell()["faults"] for worker in workers] == [[], []]
    assert rows["payload_hash"].labels["blake2b"] == expected.hexdigest()[:64]


@contextmanager
def agents(seed: int) -> Iterator[list[Worker]]:
    """Two in this process, inside the host."""
    workers = [Worker(Setup(2, "local", seed), number) for number in (0, 1)]
    try:
        cards = [worker.card() for worker in workers]
        for worker in workers:
            worker.meet(cards)
        yield workers
    finally:
        for worker in workers:
            worker.agent.close()


def go(workers: list[Worker], iteration: int) -> None:
    for worker in workers:
        worker.fill(iteration)
    for worker in workers:
        worker.go()


@pytest.mark.parametrize("what", ["nothing", "a byte of a piece", "a byte beside them", "a notification"])
def test_it_sees_what_it_is_meant_to_see(what: str) -> None:
    seed = next(seed for seed in range(99) if any(move.kind == "write" for move in transfer_plan.moves(seed, 0, 0, 1)))
    piece = next(move for move in transfer_plan.moves(seed, 0, 0, 1) if move.kind == "write").pieces[0]
    with agents(seed) as workers:
        go(workers, 0)
        if "byte" in what:
            workers[1].memory["receive"][piece.place if "piece" in what else AREA_BYTES - 1] ^= 1
        elif what == "a notification":
            workers[1].taken[0].append(b"nobody sent this")
        for worker in workers:
            worker.check()
        assert workers[0].tell()["faults"] == []
        assert bool(workers[1].tell()["faults"]) == (what != "nothing")


def test_an_agent_that_dies_unasked_ends_the_soak_and_is_named() -> None:
    with transfer.Coordinator(Setup(2, "local", 1), transfer.Outcome()) as coordinator:
        coordinator._start([0, 1])
        coordinator._agents[1].process.kill()
        coordinator._agents[1].process.wait()
        with pytest.raises(ExpertwireError, match="agent 1"):
            coordinator._all("card")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--agents", "1"], "--agents is 1; it must be 2 to 16"),
        (["--iterations", "-1"], "--iterations is -1"),
        (["--seconds", "0"], "--seconds is 0.0"),
        (["--seed", "-3"], "--seed is -3"),
        (["--number", "1"], "--number and --meet belong together"),
    ],
)
def test_wrong_numbers_name_option_value_and_limit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "transfer", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err
