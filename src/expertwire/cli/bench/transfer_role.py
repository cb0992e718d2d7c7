"""One process of a pair of `bench transfer`: the source, which times and checks what it reads, or the target, which serves and checks.

No artificial delay, fault or tracing is in a timed stretch; payloads are made before it and checked after it.
"""

from __future__ import annotations

import base64
import gc
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from expertwire.cli.bench.transfer_engines import ENGINES, Agent, Bytes, Place
from expertwire.cli.bench.transfer_oracle import STALE, Content, last_of
from expertwire.cli.bench.transfer_plan import WINDOW, Phase, Samples, Settings, areas
from expertwire.cli.meeting import Meeting, meet, same_settings
from expertwire.errors import DeadlineError

STUCK_NS = 60_000_000_000  # of one transfer
LOOK_EVERY = 4096  # polls between two looks at that
SERVE_TURNS = 64  # of a polled engine between two looks at what the source says
STALE_POSTS_S = 20.0
LATE_S = 0.5

now = time.perf_counter_ns


@dataclass
class Outcome:
    """What the source has to tell."""

    samples: dict[int, Samples] = field(default_factory=dict)  # by number of the phase
    checked: int = 0  # places whose every byte was compared, on both sides
    late: int = 0  # faults of writes that were gone when the target looked again: done was said before the bytes were there
    faults: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # with a target-fault: operation → what was raised


@dataclass
class Side:
    """An agent with its memory."""

    agent: Agent
    memory: Bytes


def open_sides(settings: Settings, names: list[str], host: str, stack: ExitStack) -> list[Side]:
    """Agents of the engine, each with a region of its own."""
    engine, nbytes = ENGINES[settings.engine], settings.layout().nbytes
    sides = []
    for name in names:
        agent = engine.open(Place(name, host, settings.provider, settings.lanes))
        stack.callback(agent.close)
        memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)  # page-aligned, and touched now
        memory[:] = 0
        agent.region(memory)
        sides.append(Side(agent, memory))
    return sides


def run_source(settings: Settings, where: str) -> Outcome:
    """Measure. Raises what the engine raised, where a transfer failed in a clean run."""
    with meet(where, True) as meeting, ExitStack() as stack:
        mine = asdict(settings)
        meeting.send("settings", **mine)
        hello = meeting.receive("settings")
        faulty, unique = hello.pop("faulty"), hello.pop("unique")
        same_settings(_plain(mine), hello, "target")
        (side,) = open_sides(settings, [f"source-{unique}"], meeting.host, stack)
        for card in meeting.receive("cards")["cards"]:
            side.agent.add(base64.b64decode(card))
        source = Source(settings, meeting, side)
        if faulty:
            return source.meet_faults()
        for phase in settings.phases():
            source.measure(phase)
        meeting.send("end")
        meeting.receive("end")
        return source.outcome


class Source:
    """What the source does in a pair that has met."""

    def __init__(self, settings: Settings, meeting: Meeting, side: Side) -> None:
        self.settings = settings
        self.meeting = meeting
        self.agent, self.memory = side.agent, side.memory
        self.outcome = Outcome()

    def measure(self, phase: Phase) -> None:
        """One phase: both sides make their payloads, the stretch is timed, both sides check."""
        contents = contents_of(phase, self.settings)
        total = self.settings.warmup + self.settings.iterations
        for content in contents:
            content.fill(self.memory, False) if phase.operation == "write" else content.clear(self.memory)
        self.meeting.send("begin", phase=phase.number)
        self.meeting.receive("ready")
        lanes = [Lane(self.agent, self.memory, phase.operation, content, total) for content in contents]
        with without_collector():
            samples = self._bandwidth(lanes[0], total) if phase.kind == "bandwidth" else self._one_by_one(lanes, total)
        for lane in lanes:
            self.outcome.faults += lane.faults
            lane.release()
        self.outcome.samples[phase.number] = samples
        self.meeting.send("check", phase=phase.number, transfers=total)
        self._check(phase, contents, total)

    def _one_by_one(self, lanes: list[Lane], total: int) -> Samples:
        samples = Samples()
        bulk = lanes[0] if len(lanes) > 1 else None
        for number in range(total):
            for lane in lanes:
                lane.mark(number)
            first, of_bulk, both, post = _alone(lanes[0], number) if bulk is None else _beside(bulk, lanes[1], number)
            for lane in lanes:
                lane.look(number)
            if number >= self.settings.warmup:
                samples.first.append(first)
                samples.post.append(post)
                if bulk is not None:
                    samples.bulk.append(of_bulk)
                    samples.both.append(both)
        return samples

    def _bandwidth(self, lane: Lane, total: int) -> Samples:
        """Several in flight; the clock runs from the post of the first measured one to the status of the last."""
        samples = Samples()
        window = min(WINDOW, lane.area.places)
        begin = 0
        for number in range(total + window):
            if number >= window:
                wait_for(lane, number - window)
                lane.look(number - window)
                if number - window + 1 == self.settings.warmup:
                    begin = now()
            if number < total:
                lane.mark(number)
                begin = begin or now()
                lane.agent.post(lane.handle(number))
        samples.elapsed_ns = now() - begin
        samples.moved_bytes = self.settings.iterations * lane.area.nbytes
        return samples

    def _check(self, phase: Phase, contents: list[Content], total: int) -> None:
        if phase.operation == "read":
            checked, faults = check(contents, [self.memory] * len(contents), total, True)
            self.outcome.checked += checked
            self.outcome.faults += faults
        theirs = self.meeting.receive("checked")
        self.outcome.checked += theirs["checked"]
        self.outcome.late += theirs["late"]
        self.outcome.faults += theirs["faults"]

    def meet_faults(self) -> Outcome:
        """What went well fails once the target has taken its registration back, is released, and leaves the target's memory as it is."""
        handles = {operation: self.agent.prepare(operation, 0, 0, self.settings.small_bytes) for operation in self.settings.operations}
        for handle in handles.values():
            self.agent.post(handle)
            _poll(self.agent, handle, now() + STUCK_NS)
        self.meeting.send("withdraw")
        self.meeting.receive("withdrawn")
        for operation, handle in handles.items():
            try:
                self.agent.post(handle)
                _poll(self.agent, handle, now() + round(STALE_POSTS_S * 1e9))
            except DeadlineError:
                self.outcome.faults.append(f"a {operation} to memory that is not registered any more has not ended")
            except Exception as error:
                self.outcome.refused[operation] = f"{type(error).__name__}: {error}"
                self.agent.release(handle)
            else:
                self.outcome.faults.append(f"a {operation} to memory that is not registered any more ended well")
        self.meeting.send("end")
        theirs = self.meeting.receive("end")
        self.outcome.checked += 1
        self.outcome.faults += theirs["faults"]
        return self.outcome


class Lane:
    """The prepared transfers of one area, one a place, used in turn."""

    def __init__(self, agent: Agent, memory: Bytes, operation: str, content: Content, total: int) -> None:
        self.agent, self.content, self.area = agent, content, content.area
        self.faults: list[str] = []
        self._writes = operation == "write"
        self._handles = [
            agent.prepare(operation, self.area.peer, self.area.offset(place), self.area.nbytes) for place in range(self.area.places)
        ]
        self._words = [content.marker_at(memory, place) for place in range(self.area.places)]
        # By transfer, made beforehand: mixing one takes as long as posting.
        self._markers = [content.marker(number if self._writes else number % self.area.places) for number in range(total)]

    def handle(self, number: int) -> Any:
        """What transfer `number` is posted by."""
        return self._handles[number % self.area.places]

    def mark(self, number: int) -> None:
        """Give what is sent the marker of this transfer, or take that of an earlier one from where this one's will arrive."""
        self._words[number % self.area.places][0] = self._markers[number] if self._writes else 0

    def look(self, number: int) -> None:
        """Of a read that is done: is its marker here?"""
        if not self._writes and int(self._words[number % self.area.places][0]) != self._markers[number]:
            self.faults.append(f"read {number} of phase {self.content.phase} was done and its marker was not here")

    def release(self) -> None:
        """All of them."""
        for handle in self._handles:
            self.agent.release(handle)


def _alone(lane: Lane, number: int) -> tuple[int, int, int, int]:
    """Post, poll until done: (ns, 0, 0, ns in the post)."""
    handle, agent = lane.handle(number), lane.agent
    begin = now()
    agent.post(handle)
    posted = now()
    end = _poll(agent, handle, begin + STUCK_NS)
    return end - begin, 0, 0, posted - begin


def _beside(bulk: Lane, small: Lane, number: int) -> tuple[int, int, int, int]:
    """A bulk and then a small one, each looked at until done: ns of (small, bulk, both from the first post, the small one's post)."""
    large, little, poll = bulk.handle(number), small.handle(number), small.agent.poll
    begin = now()
    bulk.agent.post(large)
    middle = now()
    small.agent.post(little)
    posted = now()
    little_end = large_end = polls = 0
    while not (little_end and large_end):
        if not little_end and poll(little):
            little_end = now()
        if not large_end and poll(large):
            large_end = now()
        polls += 1
        if polls % LOOK_EVERY == 0:
            _not_stuck(begin + STUCK_NS)
    return little_end - middle, large_end - begin, max(little_end, large_end) - begin, posted - middle


def _poll(agent: Agent, handle: Any, deadline_ns: int) -> int:
    """Until it is done: when that was seen."""
    poll, polls = agent.poll, 0
    while not poll(handle):
        polls += 1
        if polls % LOOK_EVERY == 0:
            _not_stuck(deadline_ns)
    return now()


def wait_for(lane: Lane, number: int) -> None:
    """Until transfer `number` is done."""
    _poll(lane.agent, lane.handle(number), now() + STUCK_NS)


def _not_stuck(deadline_ns: int) -> None:
    if now() > deadline_ns:
        raise DeadlineError(f"a transfer has not ended within its {STUCK_NS / 1e9:.0f} s")


def run_target(settings: Settings, where: str, faulty: bool) -> None:
    """Serve the source, phase by phase, until it says that this was all."""
    with meet(where, False) as meeting, ExitStack() as stack:
        unique = os.urandom(4).hex()
        mine = asdict(settings)
        theirs = meeting.receive("settings")
        meeting.send("settings", **mine, faulty=faulty, unique=unique)
        same_settings(_plain(mine), theirs, "source")
        sides = open_sides(settings, [f"target{number}-{unique}" for number in range(settings.targets)], meeting.host, stack)
        cards = [base64.b64encode(side.agent.card()).decode() for side in sides]
        meeting.send("cards", cards=cards)
        if faulty:
            withdraw(sides, meeting)
            return
        for phase in settings.phases():
            serve_phase(settings, phase, sides, meeting)
        _serve(sides, meeting)
        meeting.receive("end")
        meeting.send("end")


def withdraw(sides: list[Side], meeting: Meeting) -> None:
    """Serve until the source has moved something, take the registrations back, and see that nothing is written there from then on."""
    _serve(sides, meeting)
    meeting.receive("withdraw")
    for side in sides:
        side.memory[:] = STALE
        side.agent.withdraw()
    meeting.send("withdrawn")
    _serve(sides, meeting)
    meeting.receive("end")
    wrong = sum(int((side.memory != STALE).sum()) for side in sides)
    meeting.send("end", faults=[f"{wrong} bytes of memory that is not registered any more were written"] if wrong else [])


def serve_phase(settings: Settings, phase: Phase, sides: list[Side], meeting: Meeting) -> None:
    """Make the payloads, serve, check."""
    contents = contents_of(phase, settings)
    _serve(sides, meeting)
    meeting.receive("begin")
    for content in contents:
        memory = sides[content.area.peer].memory
        content.clear(memory) if phase.operation == "write" else content.fill(memory, True)
    meeting.send("ready")
    _serve(sides, meeting)
    total = meeting.receive("check")["transfers"]
    checked = late = 0
    faults: list[str] = []
    if phase.operation == "write":
        memories = [sides[content.area.peer].memory for content in contents]
        checked, faults = check(contents, memories, total, False)
        if faults:
            _let_arrive(sides)
            first = len(faults)
            checked, faults = check(contents, memories, total, False)
            late = first - len(faults)
    meeting.send("checked", checked=checked, late=late, faults=faults)


def _let_arrive(sides: list[Side]) -> None:
    """Make progress for a while: an engine whose "done" means "has left here" may have bytes on their way."""
    end = time.monotonic() + LATE_S
    while time.monotonic() < end:
        for side in sides:
            side.agent.progress()
        time.sleep(0 if sides[0].agent.polled else LATE_S)


def _serve(sides: list[Side], meeting: Meeting) -> None:
    """Make progress until the source says something; engines with threads of their own need nobody for it."""
    polled = [side.agent.progress for side in sides if side.agent.polled]
    if not polled:
        return
    while not meeting.waiting():
        for _ in range(SERVE_TURNS):
            for progress in polled:
                progress()


def contents_of(phase: Phase, settings: Settings) -> list[Content]:
    """What the phase moves, the bulk first."""
    return [
        Content(area, 0 if phase.operation == "write" else 1 + area.peer, settings.seed, phase.number) for area in areas(phase, settings)
    ]


def check(contents: list[Content], memories: list[Bytes], total: int, read: bool) -> tuple[int, list[str]]:
    """Every byte of every place: (places, what is wrong, the first few)."""
    checked = 0
    faults: list[str] = []
    for content, memory in zip(contents, memories, strict=True):
        for place, last in enumerate(last_of(content.area, total)):
            faults += content.untouched(memory, place) if last is None else content.faults(memory, place, None if read else last)
            checked += 1
    return checked, faults[:20]


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's garbage collector stands still: it would stop any engine's arm at any time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As it looks after its way through JSON."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
