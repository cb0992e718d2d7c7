"""What one rank of `bench fabric` does: fills, sends or serves, checks, for each engine in turn."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from expertwire.cli.bench.fabric import ARMS, BYTES_MAX, Setup, Shape, raw_shapes
from expertwire.cli.bench.raw import RawSide
from expertwire.cli.launch import Rank
from expertwire.errors import TransferError
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import best_library, choose_interface
from expertwire.fabric.endpoint import Endpoint

REGION_BYTES = 2 * BYTES_MAX  # sent from, and as much received into
# Every window goes round the same places: one place stays in the caches (4.5 GB/s at 1 MiB and window 1 against 3.3 at 64), and the raw
# loop's best window would be the one with the fewest places.
PLACES = 64
BATCHES = 4  # of a window: one is filled while the others are under way
STATUS_CHECKS = 200
WARMUP_S = 0.02

Words = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Sample:
    """What one side sent in one timed window; posts and polls are the raw loop's, the rest of the costs the async arm's."""

    operations: int
    seconds: float
    posts: int = 0
    polls: int = 0
    post_ns: float = 0.0
    status_check_ns: float = 0.0


@dataclass
class Measured:
    """What a rank hands back: by engine and combination, one sample per round and the wrong words of all rounds."""

    provider: str
    samples: dict[tuple[str, Shape], list[Sample]] = field(default_factory=dict)
    wrong: dict[tuple[str, Shape], int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Arm(Protocol):
    """One engine on one rank."""

    def fill(self, nbytes: int, seed: int) -> None:
        """Make the first `nbytes` to send those of `seed`, and zero as many received."""
        ...

    def start(self, shape: Shape, slots: int, seconds: float) -> None:
        """Begin to send, where that takes no thread of the caller's."""
        ...

    def sent(self, shape: Shape, slots: int, seconds: float) -> Sample:
        """Send until the time is up and everything has been delivered."""
        ...

    def serve(self) -> None:
        """Begin to make progress for the other side."""
        ...

    def stop(self) -> None:
        """The other side has ended too."""
        ...

    def wrong_words(self, nbytes: int, seed: int) -> int:
        """How many 8-byte words of the first `nbytes` received are not those of `seed`."""
        ...


class RawArm:
    """The raw loop, in its own process."""

    def __init__(self, side: RawSide) -> None:
        self.side = side
        self.fill = side.fill
        self.serve = side.serve
        self.wrong_words = side.wrong_words

    def start(self, shape: Shape, slots: int, seconds: float) -> None:
        """See `Arm`."""
        self.side.start(shape.nbytes, shape.window, slots, round(seconds * 1000))

    def sent(self, shape: Shape, slots: int, seconds: float) -> Sample:
        """See `Arm`."""
        del shape, slots, seconds
        got = self.side.sent()
        return Sample(got.operations, got.seconds, got.posts + got.again, got.polls)

    def stop(self) -> None:
        """See `Arm`."""
        self.side.stop()


class EndpointArm:
    """Our endpoint. `batches`: how many requests a window is made of."""

    def __init__(self, endpoint: Endpoint, batches: int, pattern: Words) -> None:
        self.endpoint = endpoint
        self.batches = batches
        self.pattern = pattern
        self.scratch = np.empty_like(pattern)
        self.out = endpoint.region("out", REGION_BYTES)
        self.inbox = endpoint.region("in", REGION_BYTES)
        self.peer = 1 - endpoint.rank

    def fill(self, nbytes: int, seed: int) -> None:
        """See `Arm`."""
        words = nbytes // 8
        np.bitwise_xor(self.pattern[:words], mask(seed), out=self.out.numpy("uint64", (words,)))
        self.inbox.numpy("uint64", (words,))[:] = 0

    def wrong_words(self, nbytes: int, seed: int) -> int:
        """See `Arm`."""
        words = nbytes // 8
        wanted = np.bitwise_xor(self.pattern[:words], mask(seed), out=self.scratch[:words])
        got = self.inbox.numpy("uint64", (words,))
        return 0 if np.array_equal(got, wanted) else int((got != wanted).sum())

    def start(self, shape: Shape, slots: int, seconds: float) -> None:
        """See `Arm`: the caller's thread is what sends."""

    def serve(self) -> None:
        """See `Arm`: its progress thread does."""

    def stop(self) -> None:
        """See `Arm`."""

    def sent(self, shape: Shape, slots: int, seconds: float) -> Sample:
        """See `Arm`."""
        batch = max(1, shape.window // self.batches)
        depth = shape.window // batch
        places = np.arange(math.lcm(batch, slots), dtype=np.uint64) % np.uint64(slots) * np.uint64(shape.nbytes)
        turns = [places[at : at + batch] for at in range(0, len(places), batch)]
        pending: deque[Any] = deque()
        post_ns = batches = 0
        write, out, peer, nbytes = self.endpoint.write_many, self.out, self.peer, shape.nbytes
        begin = time.perf_counter_ns()
        end = begin + round(seconds * 1e9)
        before = begin
        while before < end:
            while len(pending) < depth:
                offsets = turns[batches % len(turns)]
                before = time.perf_counter_ns()
                pending.append(write(peer, out, "in", nbytes, offsets, offsets))
                post_ns += time.perf_counter_ns() - before
                batches += 1
            last = pending.popleft()
            last.wait()
        while pending:
            last = pending.popleft()
            last.wait()
        elapsed = time.perf_counter_ns() - begin
        operations = batches * batch
        return Sample(operations, elapsed / 1e9, 0, 0, post_ns / operations, status_check_ns(last))


def status_check_ns(request: Any) -> float:
    """What one look at a request's status costs its caller."""
    begin = time.perf_counter_ns()
    for _ in range(STATUS_CHECKS):
        request.status()
    return (time.perf_counter_ns() - begin) / STATUS_CHECKS


def mask(seed: int) -> np.uint64:
    """What turns the pattern into that of `seed`."""
    return np.uint64(seed * 0xBF58_476D_1CE4_E5B9 % 2**64)


def make_pattern() -> Words:
    """Another word at every place of a region."""
    return (np.arange(REGION_BYTES // 8, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)


def gather(mine: Any) -> list[Any]:
    """What each rank gave, by rank. Collective."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine)
    return found


def open_arms(setup: Setup, rank: int, stack: ExitStack) -> tuple[dict[str, Arm], str]:
    """The engines, connected; and what libfabric calls the provider. Collective."""
    settings = replace(Settings.from_environment(), provider=setup.provider, sync_writes=False)
    pattern = make_pattern()
    arms: dict[str, Arm] = {}
    endpoints = []
    for name, batches in (("async", BATCHES), ("sync", 1)):
        endpoint = stack.enter_context(Endpoint(rank, 2, replace(settings, sync_writes=name == "sync")))
        arms[name] = EndpointArm(endpoint, batches, pattern)
        endpoints.append(endpoint)
    interface = choose_interface(settings, 1).address
    provider = endpoints[0].provider
    raw = stack.enter_context(RawSide(best_library(settings), provider, interface, REGION_BYTES))
    blobs = gather(([endpoint.blob() for endpoint in endpoints], raw.address))
    for number, endpoint in enumerate(endpoints):
        endpoint.add_peer(1 - rank, blobs[1 - rank][0][number])
        endpoint.start()
    raw.connect(blobs[1 - rank][1])
    arms["raw"] = RawArm(raw)
    dist.barrier()
    return arms, provider


def steps(setup: Setup) -> int:
    """Samples of all engines and rounds."""
    return setup.iterations * (2 * len(setup.shapes) + len(raw_shapes(setup.shapes)))


def sample(arm: Arm, rank: int, shape: Shape, seconds: float, seed: int) -> tuple[Sample | None, int]:
    """One timed window of one engine: what this rank sent, if it sends, and how many wrong words it received. Collective."""
    slots = min(PLACES, REGION_BYTES // shape.nbytes)
    sends = rank == 0 or shape.direction == "bi"
    arm.fill(shape.nbytes * slots, 2 * seed + rank)
    if not sends:
        arm.serve()
    dist.barrier()
    got = None
    if sends:
        arm.start(shape, slots, seconds)
        got = arm.sent(shape, slots, seconds)
    dist.barrier()
    arm.stop()
    theirs = gather(got.operations if got else 0)[1 - rank]
    return got, arm.wrong_words(shape.nbytes * min(slots, theirs), 2 * seed + 1 - rank) if theirs else 0


def measure(rank: Rank, setup: Setup) -> Measured:
    """Everything that one of the two ranks does."""
    with ExitStack() as stack:
        arms, provider = open_arms(setup, rank.rank, stack)
        measured = Measured(provider)
        for arm in arms.values():
            sample(arm, rank.rank, Shape(4096, 4, "bi"), WARMUP_S, 0)
        rank.progress("both sides ready", 1, 1)
        seed, done, every = setup.seed * 1_000_003, 0, raw_shapes(setup.shapes)
        for number in range(setup.iterations):
            for shape in every:
                names = ARMS if shape in setup.shapes else ARMS[:1]
                for at in range(len(names)):
                    name = names[(at + number) % len(names)]
                    seed += 1
                    got, wrong = sample(arms[name], rank.rank, shape, setup.seconds, seed)
                    note(measured, name, shape, got, wrong)
                    done += 1
                    rank.progress("measuring", done, steps(setup))
        dist.barrier()  # nobody closes what the other may still be writing to
        return measured


def note(measured: Measured, name: str, shape: Shape, got: Sample | None, wrong: int) -> None:
    """Keep one sample."""
    if got is not None:
        if got.operations == 0:
            raise TransferError(f"{name}: not one write of {shape.nbytes} bytes was delivered")
        measured.samples.setdefault((name, shape), []).append(got)
    measured.wrong[name, shape] = measured.wrong.get((name, shape), 0) + wrong
    if wrong:
        measured.faults.append(f"{name}, {shape.nbytes} bytes, window {shape.window}, {shape.direction}: {wrong} wrong words received")
