"""Agents over the simulated network, by seed: transfers again and again, faults, deaths, removals; and what holds of them all the while.

Each seed names a run. What did not hold is raised as `StateError`, as is anything that an agent raises where it should not.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy

from expertwire.errors import ExpertwireError, StateError
from expertwire.testing.faults import NTH_FAULTS, NetworkFaults
from expertwire.testing.oracle import check_payload, payload, payload_seed
from expertwire.testing.transport import SimulatedNetwork
from expertwire.transfer import Agent, Transfer, TransferState

if TYPE_CHECKING:
    from expertwire.transfer.ground import Ground

__all__ = ["ARENA", "Side", "World", "run"]

JOBS, SPAN = 6, 2048  # transfers that one agent keeps, each with so many bytes to itself here and there
ARENA = JOBS * SPAN
NAMES = ("a", "b", "c")
TURNS = 30_000
_ACTIVE, _DONE, _FAILED = TransferState.ACTIVE, TransferState.DONE, TransferState.FAILED


def _hold(holds: bool, why: str) -> None:
    if not holds:
        raise StateError(why)


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
        ground = cast("Ground", network.ground())
        self.agent = Agent(name, ground=ground, peers_max=network.peers_max, operations_max=network.operations_max)
        self.memory = {each: numpy.zeros(ARENA * len(NAMES), dtype=numpy.uint8) for each in ("outbox", "library", "inbox", "landing")}
        for memory in self.memory.values():
            self.agent.register([(int(memory.ctypes.data), memory.nbytes, 0)], "DRAM")
        self.memory["library"][:] = payload(payload_seed(self.place, 0), 0, ARENA * len(NAMES))
        self.alive = True

    def at(self, memory: str, place: int) -> int:
        """The address of a byte of its memory."""
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
        """Each adds each."""
        for one in self.sides.values():
            for other in self.sides.values():
                if one is not other and other.agent.name not in one.agent.remotes():
                    one.agent.add_remote(other.agent.card())

    def make(self, name: str) -> None:
        """A transfer to somebody, of pieces that are nobody's neighbours."""
        side, draw = self.sides[name], self.draw
        other = draw.choice([each for each in NAMES if each != name])
        index, reads = len(self.jobs[name]), draw.random() < 0.4
        spans: list[tuple[int, int]] = []
        at = 0
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

    def may_fail(self) -> bool:
        """A dead one's work that does not end has its endpoint closed, at once in this network, with what it held for the living."""
        return self.faults.can_fail() or not all(side.alive for side in self.sides.values())

    # ---- what is done

    def post(self, name: str, job: Job) -> None:
        """Once more, with other bytes; where that is refused it may only be for a fault."""
        side = self.sides[name]
        index = self.jobs[name].index(job)
        if job.transfer.state() in (_ACTIVE, TransferState.RELEASED):
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
            if not self.may_fail():
                raise
            if not self.healed or job.target.alive:
                self.again(name, job.target.agent.name)
            return
        job.epoch, job.noticed = epoch, not note
        if job.transfer.state() is _ACTIVE:
            try:
                job.transfer.post()
            except StateError:
                return
            _hold(False, "it was posted again while it was on its way")

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
        """What each agent's door does once a second."""
        for side in self.sides.values():
            if side.alive:
                side.agent._connections.look_around()
                side.agent._connections.join()

    def settle(self, name: str, job: Job) -> None:
        """An end is seen once, stays as it is, and means what it says."""
        state = job.transfer.state()
        if job.ended >= job.epoch or state not in (_DONE, _FAILED):
            return
        job.ended = job.epoch
        _hold(job.transfer.state() is state, f"it was {state.value}, and then {job.transfer.state().value}")
        self.outcomes[state.value] += 1
        if state is _FAILED:
            error = job.transfer.error
            _hold(error is not None, "it failed, and does not say why")
            _hold(self.may_fail(), f"it failed where nothing can fail: {error}")
            self.outcomes[type(error).__name__] += 1
            return
        side, index = self.sides[name], self.jobs[name].index(job)
        if job.reads:
            seed, found = payload_seed(job.target.place, 0), side.memory["landing"][job.here : job.here + SPAN]
        else:
            seed, found = payload_seed(side.place * 100 + index, job.epoch), job.target.memory["inbox"][job.there : job.there + SPAN]
        for at, nbytes in job.spans:
            wrong = check_payload(found[at : at + nbytes], seed, (job.there if job.reads else 0) + at)
            _hold(wrong is None, f"DONE, and yet {wrong}")

    def hear(self, name: str) -> None:
        """A notification comes once, and after what it is about."""
        for sender, payloads in self.sides[name].agent.notifications().items():
            for note in payloads:
                place, index, epoch = map(int, note.split(b"/"))
                job = self.jobs[sender][index]
                _hold(self.sides[sender].place == place, f"{note!r} came from {sender!r}")
                _hold(job.heard < epoch <= job.epoch, f"{note!r} came twice, or before it was sent")
                job.heard = epoch
                job.noticed = job.noticed or epoch == job.epoch
                if job.reads or epoch != job.epoch:
                    continue
                found, seed = self.sides[name].memory["inbox"][job.there : job.there + SPAN], payload_seed(place * 100 + index, epoch)
                for at, nbytes in job.spans:
                    _hold(check_payload(found[at : at + nbytes], seed, at) is None, f"{note!r} came before its data")

    # ---- the run

    def run(self) -> None:
        """Some hundred turns in which anything may happen, then the end."""
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
            _hold(not self.network.broken, self.network.broken)
        if kill_at > 0:
            self.network.bury(self.sides["c"].place)
        self.end()

    def act(self, name: str) -> None:
        """One thing that a user of an agent does."""
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
        if any(job.transfer.state() is _ACTIVE and job.target.agent.name == other for job in self.jobs[name]):
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
            _hold(not self.network.broken, self.network.broken)
            if turn % 500 == 499:
                self.look_around()  # as each agent's door does: work for who has died ends when it is let go
            for name in NAMES:
                if self.sides[name].alive:
                    self.hear(name)
                    for job in self.jobs[name]:
                        self.settle(name, job)
            if all(job.transfer.state() is not _ACTIVE for name in NAMES if self.sides[name].alive for job in self.jobs[name]):
                break
        for _ in range(2000):
            self.network.step()
        living = [name for name in NAMES if self.sides[name].alive]
        for name in living:
            self.hear(name)
        for name in living:
            for job in self.jobs[name]:
                state = job.transfer.state()
                _hold(state is not _ACTIVE, f"it never ended: {job.transfer}")
                _hold(job.ended == job.epoch, f"the end of post {job.epoch} was not seen: {job.transfer}")
                _hold(state is not _DONE or job.noticed or not job.target.alive, f"its notification never came: {job.transfer}")
                job.transfer.release()
                _hold(job.transfer.state() is TransferState.RELEASED, f"it was released, and is not: {job.transfer}")
        left = [endpoint.place for endpoint in self.network.endpoints if endpoint.ending and not endpoint.killed]
        _hold(not left, f"requests that were given up have not ended at places {left}")


def run(seed: int) -> tuple[int, dict[str, int], Counter[str]]:
    """(hash of the trace, faults that struck, how posts ended). Raises what did not hold."""
    world = World(seed)
    try:
        world.run()
    finally:
        for side in world.sides.values():
            side.agent.close(0)
    return world.network.native.trace_hash, world.network.native.faults, world.outcomes
