"""One agent of `soak transfer` in its process: does what the plan says when it is told to, and checks every byte that reaches it."""

from __future__ import annotations

import base64
import hashlib
import mmap
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from expertwire.cli.meeting import Meeting, meet
from expertwire.cli.soak import transfer_plan as plan
from expertwire.cli.soak.plan import AREA_BYTES
from expertwire.cli.soak.transfer_plan import BURST, SINK_BYTES, VICTIM_BYTES, Move
from expertwire.errors import DeadlineError, ExpertwireError, NotFoundError
from expertwire.fabric.config import DEFAULT_TIMEOUT_MS, Settings
from expertwire.testing.oracle import check_payload, payload
from expertwire.transfer.agent import Agent
from expertwire.transfer.metadata import decode, encode
from expertwire.transfer.requests import Transfer
from expertwire.transfer.states import TransferState

Bytes = npt.NDArray[np.uint8]

KIND = "DRAM"
WAIT_MS = 30_000  # of every wait, unless the environment asks for another
HEADER = struct.Struct("<QiB")  # of a notification: iteration, number, whether it stands alone
FAULTS_KEPT = 20
FRESH, HELD = 0x5A, 0xA5  # what memory has that nothing was moved to, and that whose registration is taken back


@dataclass(frozen=True)
class Setup:
    """What to do; the same for every agent."""

    agents: int
    provider: str
    seed: int


class Worker:
    """The agent of number `number`, and its memory."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.setup, self.number = setup, number
        self.others = [other for other in range(setup.agents) if other != number]
        settings = replace(Settings.from_environment(), provider=setup.provider)
        if settings.timeout_ms == DEFAULT_TIMEOUT_MS:
            settings = replace(settings, timeout_ms=WAIT_MS)
        self.timeout_ms = settings.timeout_ms
        self.agent = Agent(name_of(number), settings)
        self.memory: dict[str, Bytes] = {}
        self.bases: dict[int, dict[str, int]] = {}  # other → where its memory is
        for what, nbytes in (
            ("send", 2 * setup.agents * AREA_BYTES),  # by other: what I write to it, then what it reads from me
            ("receive", setup.agents * AREA_BYTES),
            ("fetched", setup.agents * AREA_BYTES),
            ("sink", setup.agents * SINK_BYTES),
        ):
            self._register(what, nbytes)
        self.unregistered = np.frombuffer(mmap.mmap(-1, VICTIM_BYTES), dtype=np.uint8)
        self._register("victim", VICTIM_BYTES)
        self.burst: list[tuple[int, Transfer]] = []
        self.taken: dict[int, list[bytes]] = {other: [] for other in self.others}
        self.iteration = 0
        self.counted: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.faults: list[str] = []

    # ---- what the coordinator asks for

    def card(self) -> dict[str, Any]:
        """This agent's card, and where its memory is."""
        bases = {what: _address(memory) for what, memory in self.memory.items()}
        return {"number": self.number, "card": base64.b64encode(encode(self.agent.card())).decode(), "bases": bases}

    def meet(self, cards: list[dict[str, Any]]) -> dict[str, Any]:
        """Add the others, or what is new of them."""
        for one in cards:
            if one["number"] != self.number:
                self.agent.add_remote(decode(base64.b64decode(one["card"])))
                self.bases[one["number"]] = one["bases"]
        return {}

    def fill(self, iteration: int) -> dict[str, Any]:
        """What I write, what the others read from me; and nothing where something is to arrive."""
        self.iteration = iteration
        for other in self.others:
            for half, kind, source, target in ((0, "write", self.number, other), (1, "read", other, self.number)):
                end = _end(plan.moves(self.setup.seed, iteration, source, target), kind)
                at = (2 * other + half) * AREA_BYTES
                self.memory["send"][at : at + end] = payload(self._content(kind, source, target), 0, end)
        for what in ("receive", "fetched"):
            self.memory[what][:] = FRESH
        return {}

    def go(self) -> dict[str, Any]:
        """Post everything, wait for everything, post some of it again; and what must be refused."""
        posted = []
        for other in self.others:
            for move in plan.moves(self.setup.seed, self.iteration, self.number, other):
                transfer = self._make(move)
                self.agent.post(transfer)
                posted.append((move, transfer))
            for number, nbytes in enumerate(plan.standalone(self.setup.seed, self.iteration, self.number, other)):
                self.agent.notify(name_of(other), self._notification(self.number, other, number, nbytes, True))
        for _ in range(plan.faults(self.setup.seed, self.iteration, self.setup.agents).unregistered[self.number]):
            self._use_unregistered()
        for move, transfer in posted:
            transfer.wait(self.timeout_ms)
            if move.again:
                self.agent.post(transfer)
                transfer.wait(self.timeout_ms)
            self.counted["bytes"] += (1 + move.again) * move.nbytes
            self.counted["descriptors"] += (1 + move.again) * len(move.pieces)
            self.counted["transfers"] += 1 + move.again
            transfer.release()
        return {}

    def check(self) -> dict[str, Any]:
        """Every byte that came, every byte beside them, every notification; and the hash of it all."""
        found = hashlib.blake2b()
        for other in self.others:
            for where, kind, source, target in (("receive", "write", other, self.number), ("fetched", "read", self.number, other)):
                self._check_area(where, kind, source, target, found)
            for taken in self._notifications(other):
                found.update(taken)
        return {"digest": found.hexdigest()}

    def withdraw(self) -> dict[str, Any]:
        """Take the registration of the victim's memory back."""
        self.memory["victim"][:] = HELD
        self.agent.deregister([(_address(self.memory["victim"]), VICTIM_BYTES, 0)], KIND, self.timeout_ms)
        return {}

    def use_stale(self, owner: int) -> dict[str, Any]:
        """Both operations with memory whose registration is gone: each must fail, and its release must succeed."""
        for kind in ("WRITE", "READ"):
            try:
                transfer = self._direct(kind, owner, "fetched", 0, self.bases[owner]["victim"], VICTIM_BYTES // 2)
                self.agent.post(transfer)
                transfer.wait(self.timeout_ms)
            except DeadlineError as error:
                self._fail(f"a {kind} with a stale registration of {name_of(owner)} has not ended: {error}")
            except ExpertwireError:
                self.injected["stale registrations, refused"] += 1
                transfer.release()
            else:
                self._fail(f"a {kind} with a stale registration of {name_of(owner)} ended well")
        return {}

    def restore(self) -> dict[str, Any]:
        """Check that nobody wrote there, and register other memory in its place."""
        if wrong := int((self.memory["victim"] != HELD).sum()):
            self._fail(f"{wrong} bytes were written to memory whose registration had been taken back")
        self._register("victim", VICTIM_BYTES)
        return self.card()

    def begin_burst(self, victim: int) -> dict[str, Any]:
        """Post writes to who will be killed, and to whoever else there is; wait for none."""
        for other in self.others:
            for _ in range(BURST):
                there = self.bases[other]["sink"] + self.number * SINK_BYTES
                transfer = self._direct("WRITE", other, "send", 0, there, SINK_BYTES)
                self.agent.post(transfer)
                self.burst.append((other, transfer))
        return {}

    def end_burst(self, victim: int) -> dict[str, Any]:
        """Those to the dead must end, one way or the other; those to the living must end well."""
        for other, transfer in self.burst:
            try:
                transfer.wait(self.timeout_ms)
            except DeadlineError as error:
                self._fail(f"a write to {name_of(other)}, of whom {name_of(victim)} was killed, has not ended: {error}")
                continue
            except ExpertwireError as error:
                if other != victim:
                    self._fail(f"a write to {name_of(other)} failed although only {name_of(victim)} was killed: {error}")
                self.counted["transfers cut off"] += 1
            if other == victim:
                self.injected["writes to who is killed"] += 1
        self.agent.remove_remote(name_of(victim))
        for other, transfer in self.burst:
            if transfer.state() is TransferState.ACTIVE:
                self._fail(f"a write to {name_of(other)} outlives the removal of {name_of(victim)}")
            else:
                transfer.release()
        self.burst.clear()
        self.taken[victim].clear()
        return {}

    def tell(self) -> dict[str, Any]:
        """What there is to tell since the last time."""
        told = {"faults": self.faults[:FAULTS_KEPT], "counted": dict(self.counted), "injected": dict(self.injected)}
        self.faults, self.counted, self.injected = [], Counter(), Counter()
        return told

    # ---- transfers

    def _make(self, move: Move) -> Transfer:
        write, other = move.kind == "write", move.target
        mine = _address(self.memory["send"]) + 2 * other * AREA_BYTES if write else _address(self.memory["fetched"]) + other * AREA_BYTES
        theirs = self.bases[other]["receive"] + self.number * AREA_BYTES
        if not write:
            theirs = self.bases[other]["send"] + (2 * self.number + 1) * AREA_BYTES
        here, there = np.empty((len(move.pieces), 3), dtype=np.uint64), np.empty((len(move.pieces), 3), dtype=np.uint64)
        for row, piece in enumerate(move.pieces):
            local, remote = (piece.offset, piece.place) if write else (piece.place, piece.offset)
            here[row] = (mine + local, piece.nbytes, 0)
            there[row] = (theirs + remote, piece.nbytes, 0)
        notification = b""
        if move.notification >= 0:
            notification = self._notification(self.number, other, move.number, move.notification, False)
        operation, name = move.kind.upper(), name_of(other)
        if not move.order:
            return self.agent.initialize(operation, here, there, name, notification, KIND)
        order = np.array(move.order, dtype=np.int64)
        local_side, remote_side = self.agent.prepare("", here, KIND), self.agent.prepare(name, there, KIND)
        return self.agent.make(operation, local_side, order, remote_side, order, notification)

    def _direct(self, operation: str, other: int, mine: str, offset: int, there: int, nbytes: int) -> Transfer:
        here = [(_address(self.memory[mine]) + offset, nbytes, 0)]
        return self.agent.initialize(operation, here, [(there, nbytes, 0)], name_of(other), kind=KIND)

    def _use_unregistered(self) -> None:
        other = self.others[0]
        there = [(self.bases[other]["receive"], VICTIM_BYTES, 0)]
        try:
            self.agent.initialize("WRITE", [(_address(self.unregistered), VICTIM_BYTES, 0)], there, name_of(other), kind=KIND)
        except NotFoundError:
            self.injected["unregistered memory, refused"] += 1
        else:
            self._fail("a transfer from memory that was never registered was taken")

    def _notification(self, source: int, target: int, number: int, nbytes: int, alone: bool) -> bytes:
        seed = plan.content_seed(self.setup.seed, self.iteration, "notification", source, target)
        return HEADER.pack(self.iteration, number, alone) + payload(seed, 512 * number + 256 * alone, nbytes).tobytes()

    # ---- checks

    def _check_area(self, where: str, kind: str, source: int, target: int, found: Any) -> None:
        """Every piece, and every byte beside them."""
        other = source if where == "receive" else target
        area = self.memory[where][other * AREA_BYTES : (other + 1) * AREA_BYTES]
        seed = self._content(kind, source, target)
        beside = np.ones(AREA_BYTES, dtype=np.bool_)
        for move in plan.moves(self.setup.seed, self.iteration, source, target):
            for piece in move.pieces if move.kind == kind else ():
                came = area[piece.place : piece.place + piece.nbytes]
                beside[piece.place : piece.place + piece.nbytes] = False
                found.update(came.data)
                if (wrong := check_payload(came, seed, piece.offset)) is not None:
                    self._fail(f"{kind} {move.number} of {name_of(source)} to {name_of(target)}: {wrong}")
        if wrong_beside := int((area[beside] != FRESH).sum()):
            self._fail(f"{where} of {name_of(other)}: {wrong_beside} bytes beside the pieces were written")

    def _notifications(self, other: int) -> list[bytes]:
        """All that `other` sent in this iteration: those alone in their order, the attached in any; in the order of the plan."""
        seed, iteration = self.setup.seed, self.iteration
        alone = [
            self._notification(other, self.number, number, nbytes, True)
            for number, nbytes in enumerate(plan.standalone(seed, iteration, other, self.number))
        ]
        attached = [
            self._notification(other, self.number, move.number, move.notification, False)
            for move in plan.moves(seed, iteration, other, self.number)
            for _ in range(1 + move.again)
            if move.notification >= 0
        ]
        deadline = time.monotonic() + self.timeout_ms / 1000
        while len(self.taken[other]) < len(alone) + len(attached) and time.monotonic() < deadline:
            for name, payloads in self.agent.notifications().items():
                self.taken[number_of(name)] += payloads
        came, self.taken[other] = self.taken[other], []
        if [one for one in came if one in alone] != alone:
            self._fail(f"of {len(alone)} notifications that {name_of(other)} sent alone others came, or in another order")
        if sorted(one for one in came if one not in alone) != sorted(attached):
            self._fail(f"{name_of(other)} attached {len(attached)} notifications; {len(came) - len(alone)} came, or others")
        self.counted["notifications"] += len(came)
        return [*alone, *attached]

    def _content(self, kind: str, source: int, target: int) -> int:
        return plan.content_seed(self.setup.seed, self.iteration, kind, source, target)

    def _register(self, what: str, nbytes: int) -> None:
        self.memory[what] = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.memory[what][:] = FRESH
        self.agent.register([(_address(self.memory[what]), nbytes, 0)], KIND)

    def _fail(self, what: str) -> None:
        self.faults.append(f"{name_of(self.number)}, iteration {self.iteration}, --seed {self.setup.seed}: {what}")


def serve(setup: Setup, number: int, where: str) -> None:
    """The whole life of a process: do what the coordinator says, until it says that this was all."""
    with meet(where, True) as meeting:
        worker = Worker(setup, number)
        try:
            _obey(worker, meeting)
        finally:
            worker.agent.close()


def _obey(worker: Worker, meeting: Meeting) -> None:
    steps: dict[str, Callable[..., dict[str, Any]]] = {
        step.__name__: step
        for step in (
            worker.card, worker.meet, worker.fill, worker.go, worker.check, worker.withdraw, worker.use_stale, worker.restore,
            worker.begin_burst, worker.end_burst, worker.tell,
        )
    }  # fmt: skip
    while (asked := meeting.receive("step"))["name"] != "end":
        meeting.send("done", **steps[asked["name"]](**asked["arguments"]))
    meeting.send("done")


def name_of(number: int) -> str:
    """Of an agent."""
    return f"agent{number}"


def number_of(name: str) -> int:
    """Of the agent of that name."""
    return int(name.removeprefix("agent"))


def _address(memory: Bytes) -> int:
    return int(memory.ctypes.data)


def _end(found: list[Move], kind: str) -> int:
    return max((piece.offset + piece.nbytes for move in found if move.kind == kind for piece in move.pieces), default=0)
