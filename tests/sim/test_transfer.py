"""Agents over the simulated network, with faults: what X2 to X4 of SPEC.md ask of transfers, in virtual time, by seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from expertwire.errors import ExpertwireError
from expertwire.testing.faults import NetworkFaults
from expertwire.testing.oracle import check_payload, payload, payload_seed
from expertwire.testing.transfers import ARENA, Side, run
from expertwire.testing.transport import SimulatedNetwork
from expertwire.transfer import TransferState

SEEDS = 25
SEEDS_FILE = Path(__file__).with_name("seeds.txt")
TURNS = 30_000
ACTIVE, DONE, FAILED = TransferState.ACTIVE, TransferState.DONE, TransferState.FAILED


def test_every_seed_ends_each_post_once_with_what_it_says_and_nothing_before_its_data() -> None:
    seen: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            _, faults, outcomes = run(seed)
        except ExpertwireError as error:
            error.add_note(f"seed {seed}")
            raise
        seen += outcomes
        struck += Counter(faults)
    print(dict(seen), dict(struck))
    assert seen["done"] > 20 * SEEDS
    assert seen["failed"] > SEEDS / 2
    assert {"failed_operation", "failed_post", "lost_completion", "late_delivery", "again", "dead_peer"} <= set(struck)


def test_seeds_that_failed_before() -> None:
    rows = [line.split() for line in SEEDS_FILE.read_text().splitlines()]
    for row in rows:
        if row[:1] == ["transfer"]:
            run(int(row[1]))


def test_the_same_seed_gives_the_same_run() -> None:
    assert [run(seed)[0] for seed in (1, 2)] == [run(seed)[0] for seed in (1, 2)]


def pair(faults: NetworkFaults, seed: int = 1, **options: Any) -> tuple[SimulatedNetwork, Side, Side]:
    network = SimulatedNetwork(seed, 2, faults, **options)
    a, b = Side(network, "a"), Side(network, "b")
    a.agent.add_remote(b.agent.card())
    return network, a, b


def rows(side: Side, memory: str, count: int, nbytes: int, step: int) -> list[tuple[int, int, int]]:
    return [(side.at(memory, index * step), nbytes, 0) for index in range(count)]


def test_513_descriptors_both_ways_and_a_handle_posted_again_and_again() -> None:
    """X2 and X4, over a network that reorders and pushes back: 14 at once, then 129 reuses, each with other bytes."""
    _, a, b = pair(NetworkFaults(again=0.2, late_delivery=0.5, late_completion=0.5, duplicate=0.3), operations_max=2000)
    for operation, mine, theirs in (("WRITE", "outbox", "inbox"), ("READ", "landing", "library")):
        whole = a.agent.initialize(operation, rows(a, mine, 513, 16, 24), rows(b, theirs, 513, 16, 32), "b", b"all", kind="DRAM")
        a.memory["outbox"][:] = payload(payload_seed(7, 1), 0, ARENA * 3)
        whole.post()
        whole.wait()
        for index in range(513):
            if operation == "WRITE":
                assert check_payload(b.memory["inbox"][index * 32 : index * 32 + 16], payload_seed(7, 1), index * 24) is None
            else:
                assert check_payload(a.memory["landing"][index * 24 : index * 24 + 16], payload_seed(b.place, 0), index * 32) is None
    assert b.agent.notifications() == {"a": [b"all", b"all"]}
    many = [
        a.agent.initialize("WRITE", [(a.at("outbox", 900 * i), 900, 0)], [(b.at("inbox", 1000 * i), 900, 0)], "b", kind="DRAM")
        for i in range(14)
    ]
    for epoch in range(130):
        a.memory["outbox"][:] = payload(payload_seed(8, epoch), 0, ARENA * 3)
        for index, transfer in enumerate(many):
            transfer.post(b"%d/%d" % (epoch, index))
        for index, transfer in enumerate(many):
            transfer.wait()
            assert check_payload(b.memory["inbox"][1000 * index : 1000 * index + 900], payload_seed(8, epoch), 900 * index) is None
        assert sorted(b.agent.notifications()["a"]) == sorted(b"%d/%d" % (epoch, index) for index in range(14))


@pytest.mark.parametrize("how", ["operation", "post"])
def test_wherever_the_nth_operation_fails_what_is_behind_it_ends_in_order_and_its_word_never_leaves(how: str) -> None:
    """X3: the one that fails, and then none of those that queue behind it is done before one that was posted earlier has ended."""
    for nth in range(1, 13):
        network, a, b = pair(NetworkFaults(fail_at=nth, fail_how=how), seed=nth)
        transfers = [
            a.agent.initialize("WRITE", rows(a, "outbox", 2, 64, 80), rows(b, "inbox", 2, 64, 80), "b", b"%d" % index, kind="DRAM")
            for index in range(4)
        ]
        for transfer in transfers:
            transfer.post()
        ended: list[int] = []
        for _ in range(TURNS):
            network.step()
            ended += [index for index, transfer in enumerate(transfers) if transfer.state() is not ACTIVE and index not in ended]
            if len(ended) == 4:
                break
        assert sorted(ended) == [0, 1, 2, 3]
        failed = [index for index, transfer in enumerate(transfers) if transfer.state() is FAILED]
        assert failed, f"the {nth}th operation failed, and no transfer has"
        said = [int(note) for note in b.agent.notifications().get("a", [])]
        assert said == sorted(said)
        assert not set(said) & set(failed)
        assert {index for index in range(4) if transfers[index].state() is DONE} == set(said)
        assert not network.broken


def test_a_stale_registration_is_an_error_and_a_safe_release() -> None:
    network, a, b = pair(NetworkFaults(late_delivery=0.5))
    good = a.agent.initialize("WRITE", rows(a, "outbox", 1, 64, 80), rows(b, "library", 1, 64, 80), "b", kind="DRAM")
    stale = a.agent.initialize("WRITE", rows(a, "outbox", 1, 64, 80), rows(b, "inbox", 1, 64, 80), "b", b"never", kind="DRAM")
    inbox = b.memory["inbox"]
    b.agent.deregister([(int(inbox.ctypes.data), inbox.nbytes, 0)], "DRAM")
    a.memory["outbox"][:] = 9
    stale.post()
    good.post()
    with pytest.raises(ExpertwireError, match="bad_key"):
        stale.wait()
    stale.release()
    assert not inbox.any()
    for _ in range(100):
        network.step()
    assert b.agent.notifications() == {}
    if good.state() is not DONE:  # it stood behind the other, and was aborted with it
        good.post()
        good.wait()
    good.release()
