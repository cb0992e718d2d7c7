"""Agents over the simulated network, with faults: what X2 to X4 of SPEC.md ask of transfers, in virtual time, by seed."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest

from expertwire.errors import ExpertwireError, StateError
from expertwire.testing.faults import NTH_FAULTS, NetworkFaults
from expertwire.testing.oracle import check_payload, payload, payload_seed
from expertwire.testing.transport import SimulatedNetwork
from expertwire.transfer import Agent, Transfer, TransferState

SEEDS = int(os.environ.get("EXPERTWIRE_TRANSFER_SEEDS", "0")) or 25
JOBS, SPAN = 6, 2048  # transfers that one agent keeps, each with so many bytes to itself here and there
ARENA = JOBS * SPAN
NAMES = ("a", "b", "c")
TURNS = 30_000
ACTIVE, DONE, FAILED = TransferState.ACTIVE, TransferState.DONE, TransferState.FAILED


def draw_faults(draw: random.Random) -> NetworkFaults:
    """Swarm testing: each kind is on or off, and what is on strikes seldom or often."""

    def weight(share: float, most: float) -> float:
        return most * draw.choice((1, 1 / 3, 1 / 9, 1 / 27)) if draw.random() < share else 0.0

    return NetworkFaults(
        again=weight(0.5, 0.3),
        late_delivery=weight(0.5, 0.6),
        late_completion=weight(0.5, 0.6),
        failed_post=weight(0.2, 0.05),
        failed_operation=weight(0.25, 0.08),
        lost_completion=weight(0.15, 0.03),
        fail_at=draw.randrange(1, 60) if draw.random() < 0.25 else 0,
        fail_how=draw.choice(NTH_FAULTS),
        duplicate=weight(0.5, 0.4),
        wrong_generation=weight(0.5, 0.4),
        null_context=weight(0.5, 0.1),
    )


class Side:
    """An agent and its memory: `outbox` and `library` it fills, `inbox` and `landing` are filled."""

    def __init__(self, network: SimulatedNetwork, name: str) -> None:
        self.place = len(network.endpoints)
        self.agent = Agent(name, ground=network.ground(), peers_max=network.peers_max, operations_max=network.operations_max)
        self.memory = {each: numpy.zeros(ARENA * len(NAMES), dtype=numpy.uint8) for each in ("outbox", "library", "inbox", "landing")}
        for memory in self.memory.values():
            self.agent.register([(int(memory.ctypes.data), memory.nbytes, 0)], "DRAM")
        self.memory["library"][:] = payload(payload_seed(self.place, 0), 0, ARENA * len(NAMES))
        self.alive = True

    def at(self, memory: str, place: int) -> int:
        return int(self.memory[memory].ctypes.data) + place


@dataclass
class Job:
    """One transfer, again and again: which bytes it moves, and what has been seen of it."""

    transfer: Transfer
    target: Side
    reads: bool
    spans: list[tuple[int, int]]  # (offset in its own span, bytes)
    here: int  # of its span, in outbox or landing
    there: int  # in inbox or library
    epoch: int = 0
    ended: int = 0  # posts whose end was seen
    heard: int = 0  # epochs whose notification has come
    quiet: bytes = b""  # of its place there when it had failed
    noticed: bool = True


class World:
    """Everything that one seed is about."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.faults = draw_faults(self.draw)
        self.network = SimulatedNetwork(seed, len(NAMES) + 2, self.faults)
        self.sides = {name: Side(self.network, name) for name in NAMES}
        self.jobs: dict[str, list[Job]] = {name: [] for name in NAMES}
        self.outcomes: Counter[str] = Counter()
        self.healed = False

    def meet(self) -> None:
        for one in self.sides.values():
            for other in self.sides.values():
                if one is not other and other.agent.name not in one.agent.remotes():
                    one.agent.add_remote(other.agent.card())

    def make(self, name: str) -> None:
        """A transfer to somebody, of pieces that are nobody's neighbours."""
        side, draw = self.sides[name], self.draw
        other = draw.choice([each for each in NAMES if each != name])
        index, reads = len(self.jobs[name]), draw.random() < 0.4
        spans, at = [], 0
        while at < SPAN - 80 and (not spans or draw.random() < 0.85):
            nbytes = draw.choice((1, 8, 61, 300))
            nbytes = min(nbytes, SPAN - at)
            spans.append((at, nbytes))
            at += nbytes + draw.choice((0, 1, 17))
        here = index * SPAN
        there = (NAMES.index(name) * JOBS + index) * SPAN if not reads else index * SPAN
        mine, theirs = ("landing", "library") if reads else ("outbox", "inbox")
        transfer = side.agent.initialize(
            "READ" if reads else "WRITE",
            [(side.at(mine, here + at), nbytes, 0) for at, nbytes in spans],
            [(self.sides[other].at(theirs, there + at), nbytes, 0) for at, nbytes in spans],
            other,
            kind="DRAM",
        )
        self.jobs[name].append(Job(transfer, self.sides[other], reads, spans, here, there))

    # ---- what is done

    def post(self, name: str, job: Job) -> None:
        side = self.sides[name]
        index = self.jobs[name].index(job)
        if job.transfer.state() in (ACTIVE, TransferState.RELEASED):
            return
        self.settle(name, job)
        epoch = job.epoch + 1
        if not job.reads:
            side.memory["outbox"][job.here : job.here + SPAN] = payload(payload_seed(side.place * 100 + index, epoch), 0, SPAN)
        note = b"%d/%d/%d" % (side.place, index, epoch) if self.draw.random() < 0.7 else b""
        if not note and job.transfer.notification:
            return  # an empty one would keep the earlier one
        try:
            job.transfer.post(note)
        except ExpertwireError as error:
            self.outcomes[f"refused: {type(error).__name__}"] += 1
            if not (self.faults.can_fail() or not job.target.alive):
                raise
            if not self.healed or job.target.alive:
                self.again(name, job.target.agent.name)
            return
        job.epoch, job.noticed = epoch, not note
        if job.transfer.state() is ACTIVE:
            with pytest.raises(StateError):
                job.transfer.post()

    def again(self, name: str, other: str) -> None:
        """As a caller does whose lane has failed: remove it, and add it again."""
        agent = self.sides[name].agent
        if other not in agent.remotes():
            return
        try:
            agent.remove_remote(other)
            self.look_around()
        except ExpertwireError as error:
            self.outcomes[f"not removed: {type(error).__name__}"] += 1

    def look_around(self) -> None:
        for side in self.sides.values():
            if side.alive:
                side.agent._connections.look_around()
                side.agent._connections.join()

    def settle(self, name: str, job: Job) -> None:
        """An end is seen once, stays as it is, and means what it says."""
        state = job.transfer.state()
        if job.ended >= job.epoch or state not in (DONE, FAILED):
            return
        job.ended = job.epoch
        assert job.transfer.state() is state
        self.outcomes[state.value] += 1
        if state is FAILED:
            assert job.transfer.error is not None
            assert self.faults.can_fail() or not job.target.alive, job.transfer.error
            self.outcomes[type(job.transfer.error).__name__] += 1
            return
        side, index = self.sides[name], self.jobs[name].index(job)
        if job.reads:
            seed, found = payload_seed(job.target.place, 0), side.memory["landing"][job.here : job.here + SPAN]
        else:
            seed, found = payload_seed(side.place * 100 + index, job.epoch), job.target.memory["inbox"][job.there : job.there + SPAN]
        for at, nbytes in job.spans:
            wrong = check_payload(found[at : at + nbytes], seed, (job.there if job.reads else 0) + at)
            assert wrong is None, f"DONE, and yet {wrong}"

    def hear(self, name: str) -> None:
        """A notification comes once, and after what it is about."""
        for sender, payloads in self.sides[name].agent.notifications().items():
            for note in payloads:
                place, index, epoch = map(int, note.split(b"/"))
                job = self.jobs[sender][index]
                assert self.sides[sender].place == place
                assert job.heard < epoch <= job.epoch, f"{note!r} came twice, or before it was sent"
                job.heard = epoch
                job.noticed = job.noticed or epoch == job.epoch
                if job.reads or epoch != job.epoch:
                    continue
                found, seed = self.sides[name].memory["inbox"][job.there : job.there + SPAN], payload_seed(place * 100 + index, epoch)
                for at, nbytes in job.spans:
                    assert check_payload(found[at : at + nbytes], seed, at) is None, f"{note!r} came before its data"

    # ---- the run

    def run(self) -> None:
        self.meet()
        for name in NAMES:
            for _ in range(self.draw.randrange(2, JOBS)):
                self.make(name)
        kill_at = self.draw.randrange(50, 400) if self.draw.random() < 0.3 else -1
        for turn in range(600):
            if turn == kill_at:
                self.network.kill(self.sides["c"].place)
                self.sides["c"].alive = False
            if turn == kill_at + 100 and kill_at > 0:
                self.network.bury(self.sides["c"].place)
            name = self.draw.choice(NAMES)
            if not self.sides[name].alive:
                continue
            self.act(name)
            self.network.step()
            assert not self.network.broken, self.network.broken
        if kill_at > 0:
            self.network.bury(self.sides["c"].place)
        self.end()

    def act(self, name: str) -> None:
        job = self.draw.choice(self.jobs[name])
        what = self.draw.random()
        if what < 0.5:
            if job.target.alive and job.target.agent.name not in self.sides[name].agent.remotes():
                self.remake(name, job.target.agent.name)
            else:
                self.post(name, job)
        elif what < 0.7:
            self.hear(name)
        elif what < 0.75:
            job.transfer._native.cancel()  # where nothing of it was posted it has failed
            self.faults = replace(self.faults, fail_at=self.faults.fail_at or 1, fail_how="operation")
        elif what < 0.78:
            self.look_around()
        for each in self.jobs[name]:
            self.settle(name, each)

    def remake(self, name: str, other: str) -> None:
        """It was removed: it is added again, and its transfers are others then."""
        if any(job.transfer.state() is ACTIVE and job.target.agent.name == other for job in self.jobs[name]):
            return
        try:
            self.sides[name].agent.add_remote(self.sides[other].agent.card())
        except ExpertwireError as error:
            self.outcomes[f"not added: {type(error).__name__}"] += 1
            return
        for job in self.jobs[name]:
            if job.target.agent.name != other:
                continue
            side, old = self.sides[name], job.transfer
            self.settle(name, job)
            mine, theirs = ("landing", "library") if job.reads else ("outbox", "inbox")
            job.transfer = side.agent.initialize(
                old.operation,
                [(side.at(mine, job.here + at), nbytes, 0) for at, nbytes in job.spans],
                [(job.target.at(theirs, job.there + at), nbytes, 0) for at, nbytes in job.spans],
                other,
                kind="DRAM",
            )
            job.noticed = True
            old.release()

    def end(self) -> None:
        """The network heals, and everything has to come to its end."""
        self.network.native.heal()
        self.healed = True
        for turn in range(TURNS):
            self.network.step()
            assert not self.network.broken, self.network.broken
            if turn % 500 == 499:
                self.look_around()  # as each agent's door does: work for who has died ends when it is let go
            for name in NAMES:
                if self.sides[name].alive:
                    self.hear(name)
                    for job in self.jobs[name]:
                        self.settle(name, job)
            if all(job.transfer.state() is not ACTIVE for name in NAMES if self.sides[name].alive for job in self.jobs[name]):
                break
        for _ in range(2000):
            self.network.step()
        living = [name for name in NAMES if self.sides[name].alive]
        for name in living:
            self.hear(name)
        for name in living:
            for job in self.jobs[name]:
                state = job.transfer.state()
                assert state is not ACTIVE, f"it never ended: {job.transfer}"
                assert job.ended == job.epoch
                assert state is not DONE or job.noticed or not job.target.alive, f"its notification never came: {job.transfer}"
                job.transfer.release()
                assert job.transfer.state() is TransferState.RELEASED
        assert not any(endpoint.ending for endpoint in self.network.endpoints if not endpoint.killed)


def run(seed: int) -> tuple[int, dict[str, int], Counter[str]]:
    world = World(seed)
    try:
        world.run()
    finally:
        for side in world.sides.values():
            side.agent.close(0)
    return world.network.native.trace_hash, world.network.native.faults, world.outcomes


def test_every_seed_ends_each_post_once_with_what_it_says_and_nothing_before_its_data() -> None:
    seen: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            _, faults, outcomes = run(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        seen += outcomes
        struck += Counter(faults)
    print(dict(seen), dict(struck))
    assert seen["done"] > 20 * SEEDS
    assert seen["failed"] > SEEDS / 2
    assert {"failed_operation", "failed_post", "lost_completion", "late_delivery", "again", "dead_peer"} <= set(struck)


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
