"""A rank of the soak: its endpoint, its traffic, and the checks of every byte that it is sent, reads, or must find untouched."""

from __future__ import annotations

import hashlib
import mmap
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from expertwire.cli.soak import plan
from expertwire.cli.soak.plan import AREA_BYTES, LANES, SINK_BYTES, TRANSFERS_MAX, VICTIM_BYTES, Transfer
from expertwire.errors import DeadlineError, InvalidArgumentError, PeerError, StateError, TransferError
from expertwire.fabric import Chunk, Endpoint, Request, Scope, Signal, Status
from expertwire.fabric.config import Settings
from expertwire.testing.oracle import check_payload, payload

if TYPE_CHECKING:
    from expertwire.cli.launch import Rank

Bytes = npt.NDArray[np.uint8]

HEADER = struct.Struct("<QI")  # of a notification: iteration, number
FAILURES_KEPT = 20
TIMEOUT_MS = 30_000  # of every wait, unless the environment asks for another
SAY_EVERY_S = 0.5
ALTERNATE_EVERY = 5  # iterations with delivery-complete on, then as many with it off
CUT_OFF_WRITES = 3  # to a rank that leaves meanwhile
COUNTED = (
    "requests_done", "requests_failed", "requests_cancelled", "submissions_pushed_back", "posts_again", "controls_held", "lanes_reopened",
    "notifications", "provider_posted",
)  # fmt: skip
NEVER = ("misuses", "thread_failures", "notifications_dropped", "completions_unknown")  # nothing that the soak does may cause them


@dataclass(frozen=True)
class Setup:
    """What to do; the same on every rank. Ends after `iterations`, or where that is 0 after `seconds`."""

    ranks: int
    provider: str
    seed: int
    seconds: float
    iterations: int
    delivery_complete: str = "auto"  # or "on", "off", "alternate": every endpoint anew, with the other of the two
    ordering_off: str = "auto"  # Settings.ordering of an endpoint without it: "counted" where no gate may do without


@dataclass
class Outcome:
    """What one rank has to tell."""

    iterations: int = 0
    digest: str = ""
    payload_bytes: int = 0
    requests: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)  # the first few, in words
    injected: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)  # of the endpoints' statistics


def soak(rank: Rank, setup: Setup) -> Outcome:
    """The whole life of a rank."""
    import os

    rank.progress("pid", os.getpid(), 0)
    worker = Worker(rank.rank, setup)
    begun, said = time.monotonic(), 0.0
    going = True
    while going:
        going = worker.iterate(time.monotonic() - begun)
        now = time.monotonic()
        if rank.rank == 0 and (now - said >= SAY_EVERY_S or not going):
            said = now
            rank.progress("iteration", worker.outcome.iterations, 0)
        steps = setup.iterations or round(setup.seconds)
        at = worker.outcome.iterations if setup.iterations else min(steps, int(now - begun))
        rank.progress("iterations" if setup.iterations else "seconds", steps if not going else min(at, steps - 1), steps)
    return worker.finish()


class Worker:
    """One rank. All ranks do the same iterations; what each does follows from the plan."""

    def __init__(self, rank: int, setup: Setup) -> None:
        self.rank = rank
        self.size = setup.ranks
        self.setup = setup
        self.others = [other for other in range(setup.ranks) if other != rank]
        self.outcome = Outcome()
        self._hash = hashlib.blake2b()
        self._incarnation = 0
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="soak")
        self._victims: dict[int, str] = {}  # rank → the name of its victim region
        self._victims_made = 0
        self._victim_memory = mmap.mmap(-1, VICTIM_BYTES)
        self._victim_held = b""  # when its region was closed
        self._iteration = 0
        self._lock = threading.Lock()
        self._open()
        self._begin(self._exchange_blobs())

    def iterate(self, elapsed_s: float) -> bool:
        """One iteration; False: it was the last."""
        self._iteration = number = self.outcome.iterations
        faults = plan.faults(self.setup.seed, number, self.size)
        outgoing = {other: plan.transfers(self.setup.seed, number, self.rank, other) for other in self.others}
        incoming = {other: plan.transfers(self.setup.seed, number, other, self.rank) for other in self.others}
        self._fill(outgoing, incoming)
        if faults.revoked == self.rank:
            self._victim.close()
            self._victim_held = self._victim_memory[:]
        self.endpoint.barrier()
        requests = self._submit_all(outgoing)
        self._inject(faults)
        self._check_arrivals(incoming)
        self._check_ends(requests)
        last = number + 1 >= self.setup.iterations if self.setup.iterations else elapsed_s >= self.setup.seconds
        if self.rank == 0 and last and not self.setup.iterations:
            for other in self.others:
                self.endpoint.signal(other, 1, 8 * self._stop, scope=Scope.PEER)
        self.endpoint.barrier()
        self._check_everything(outgoing, incoming, faults)
        self.outcome.iterations += 1
        if last if self.rank == 0 or self.setup.iterations else int(self._counters[self._stop]) > 0:
            return False
        if faults.revoked is not None:
            self._restore(faults.revoked)
        if faults.leaver is not None:
            self._leave_and_return(faults.leaver, old_blobs=faults.old_blobs)
        if self.setup.delivery_complete == "alternate" and self.outcome.iterations % ALTERNATE_EVERY == 0:
            self._begin_anew()
        return True

    def finish(self) -> Outcome:
        """Close, and what there is to tell."""
        self._close()
        self._pool.shutdown()
        self.outcome.digest = self._hash.hexdigest()
        return self.outcome

    # ---- the endpoint

    def _open(self) -> None:
        settings = Settings.from_environment()
        delivery_complete = self._delivery_complete()
        settings = replace(
            settings,
            provider=self.setup.provider,
            delivery_complete=delivery_complete,
            ordering=self.setup.ordering_off if delivery_complete == "0" and self.setup.ordering_off != "auto" else settings.ordering,
            max_outstanding=plan.pressure(self.setup.seed, self.rank, self._incarnation),
            trust_immediates=True,  # nothing is cut off here where they may end a target: _leave_and_return
            timeout_ms=settings.timeout_ms if "EXPERTWIRE_TIMEOUT_MS" in settings.given() else TIMEOUT_MS,
        )
        counting = ", counted" if settings.ordering == "counted" else ""
        self.outcome.counted[f"endpoints opened, delivery-complete {settings.delivery_complete}{counting}"] += 1
        self._stop = self.size * TRANSFERS_MAX  # the counter that says: this is the last iteration
        self.endpoint = Endpoint(self.rank, self.size, settings, counters=self._stop + 1, lanes=LANES + 1)
        lengths = {"send": 2 * AREA_BYTES, "receive": AREA_BYTES, "fetched": AREA_BYTES, "sink": SINK_BYTES, "unread": SINK_BYTES}
        self._regions = {name: self.endpoint.region(name, self.size * length) for name, length in lengths.items()}
        self._bytes: dict[str, Bytes] = {name: region.numpy("uint8") for name, region in self._regions.items()}
        self._shadow: dict[str, Bytes] = {name: np.zeros_like(self._bytes[name]) for name in ("receive", "fetched")}
        self._counters = self.endpoint.counters().numpy("uint64")
        self._expected = [0] * self._stop
        self._make_victim()

    def _make_victim(self) -> None:
        """A region whose memory can be looked at after it has been closed."""
        self._victims_made += 1
        self._victim = self.endpoint.region(f"victim {self._victims_made}", VICTIM_BYTES)
        self._victim_memory.close()
        self._victim_memory = mmap.mmap(self._victim.fileno(), VICTIM_BYTES)

    def _exchange_blobs(self) -> dict[int, bytes]:
        """Of the others, by rank; their victims' names are noted."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.endpoint.blob(), self._victim.name))
        self._victims = {other: found[other][1] for other in self.others}
        return {other: found[other][0] for other in self.others}

    def _begin(self, blobs: dict[int, bytes]) -> None:
        for other, blob in blobs.items():
            self.endpoint.add_peer(other, blob)
        self.endpoint.start()
        dist.barrier()  # who is not known yet cannot be heard

    def _close(self) -> None:
        counted = self.endpoint.statistics()
        self.outcome.counted.update({name: getattr(counted, name) for name in (*COUNTED, *NEVER)})
        for name in NEVER:
            if getattr(counted, name):
                self._fail(f"{name} is {getattr(counted, name)}")
        self.endpoint.close()

    def _begin_anew(self) -> None:
        """All close, and meet again as others."""
        dist.barrier()
        self._close()
        self._incarnation += 1
        self._open()
        self._begin(self._exchange_blobs())

    def _delivery_complete(self) -> str:
        """For an endpoint that is opened now: all ranks take the same, whoever comes back."""
        words = {"auto": "auto", "on": "1", "off": "0"}
        return words.get(self.setup.delivery_complete, "01"[self.outcome.iterations // ALTERNATE_EVERY % 2])

    def _restore(self, revoked: int) -> None:
        """The victim's owner registers it anew; with its new key the others reach it."""
        if revoked == self.rank:
            self._make_victim()
        blobs = self._exchange_blobs()
        if revoked != self.rank:
            self.endpoint.add_peer(revoked, blobs[revoked])
            self.endpoint.write(revoked, self._regions["send"], self._victims[revoked], VICTIM_BYTES, lane=LANES).wait()

    def _leave_and_return(self, leaver: int, *, old_blobs: bool) -> None:
        """It closes its endpoint while the others still write to it, and comes back as another; they forget the one and take the other."""
        cut_off: list[Request] = []
        if leaver == self.rank:
            self._close()
            self._incarnation += 1
            self._open()
        else:
            # A counted write that breaks off ends its target over libfabric's rxm (docs/counted_immediates.md).
            breaking = 0 if self._delivery_complete() == "0" and self.setup.ordering_off == "counted" else CUT_OFF_WRITES
            chunk = Chunk(self._regions["send"], "unread", SINK_BYTES, 0, self.rank * SINK_BYTES, LANES)
            for _ in range(breaking):
                try:
                    cut_off.append(self.endpoint.submit("write", leaver, [chunk]))
                except PeerError:  # its farewell was heard first
                    self._count("writes to who leaves")
                    self.outcome.counted["writes cut off"] += 1
        dist.barrier()  # the writes shall meet an endpoint that closes, not a removal
        # A removal may replace the endpoint: a blob from before leads to one that is closed, and the others greet who has it.
        blobs = self._exchange_blobs() if old_blobs else {}
        if leaver != self.rank:
            self.endpoint.remove_peer(leaver)
        blobs = blobs or self._exchange_blobs()
        if leaver == self.rank:
            self._begin(blobs)
            self._count("left and came back")
            self.outcome.counted["came back by blobs from before its removal"] += old_blobs
            return
        for request in cut_off:
            if not request.done:
                self._fail(f"a write to rank {leaver} outlives its removal")
            self._count("writes to who leaves")
            if request.status() is not Status.OK:
                self.outcome.counted["writes cut off"] += 1
        self.endpoint.add_peer(leaver, blobs[leaver])
        dist.barrier()

    # ---- traffic

    def _fill(self, outgoing: dict[int, list[Transfer]], incoming: dict[int, list[Transfer]]) -> None:
        """What I write, and what the others read from me."""
        for other in self.others:
            for half, kind, source, target, found in (
                (0, "write", self.rank, other, outgoing[other]),
                (1, "read", other, self.rank, incoming[other]),
            ):
                content = self._content(kind, source, target, found)
                at = (2 * other + half) * AREA_BYTES
                self._bytes["send"][at : at + content.size] = content

    def _content(self, kind: str, source: int, target: int, found: Sequence[Transfer]) -> Bytes:
        """All that is written or read between two ranks in this iteration, from the first byte to the last that is used."""
        pieces = [piece for transfer in found if transfer.kind == kind for piece in transfer.pieces]
        end = max((piece.offset + piece.nbytes for piece in pieces), default=0)
        return payload(plan.content_seed(self.setup.seed, self._iteration, kind, source, target), 0, end)

    def _submit_all(self, outgoing: dict[int, list[Transfer]]) -> list[tuple[Transfer, Request]]:
        """From one thread or from two, each with peers of its own; between two ranks in the order of the plan."""
        chance = plan.draw(self.setup.seed, self._iteration, self.rank, "order")
        threads = chance.randint(1, 2)
        shares = [self._interleave(chance, [outgoing[other] for other in self.others[index::threads]]) for index in range(threads)]
        return [pair for done in self._pool.map(self._submit_share, shares) for pair in done]

    @staticmethod
    def _interleave(chance: random.Random, queues: list[list[Transfer]]) -> list[Transfer]:
        order = [index for index, queue in enumerate(queues) for _ in queue]
        chance.shuffle(order)
        heads = [iter(queue) for queue in queues]
        return [next(heads[index]) for index in order]

    def _submit_share(self, share: list[Transfer]) -> list[tuple[Transfer, Request]]:
        done = []
        for transfer in share:
            request = self._submit(transfer)
            if transfer.cancel:
                cancelled = request.cancel()
                self._count("cancelled" if cancelled else "cancellations refused")
                if cancelled:
                    if request.status() is not Status.CANCELLED:
                        self._fail(f"a cancelled request is {request.status().name}")
                    request = self._submit(transfer)
            done.append((transfer, request))
        return done

    def _submit(self, transfer: Transfer) -> Request:
        other, write = transfer.target, transfer.kind == "write"
        here, there = (2 * other * AREA_BYTES, self.rank * AREA_BYTES) if write else (other * AREA_BYTES, (2 * self.rank + 1) * AREA_BYTES)
        region, remote = (self._regions["send"], "receive") if write else (self._regions["fetched"], "send")
        chunks = [
            Chunk(region, remote, piece.nbytes, here + piece.offset, there + piece.place, transfer.lane)
            if write
            else Chunk(region, remote, piece.nbytes, here + piece.place, there + piece.offset, transfer.lane)
            for piece in transfer.pieces
        ]
        counter = 8 * (self.rank * TRANSFERS_MAX + transfer.number)
        signals = [Signal(transfer.signal, counter, scope=Scope(transfer.scope), lane=transfer.lane)] if transfer.signal else []
        notification = self._notification(transfer) if transfer.notification else None
        return self.endpoint.submit(transfer.kind, other, chunks, signals, notification)

    def _notification(self, transfer: Transfer) -> bytes:
        seed = plan.content_seed(self.setup.seed, self._iteration, "notification", transfer.source, transfer.target)
        return HEADER.pack(self._iteration, transfer.number) + payload(seed, 256 * transfer.number, transfer.notification).tobytes()

    # ---- what goes wrong on purpose

    def _inject(self, faults: plan.Faults) -> None:
        for number in range(faults.out_of_range[self.rank]):
            self._write_out_of_range(self.others[number % len(self.others)], number)
        peer = faults.in_use[self.rank]
        if peer is not None:
            self._close_in_use(peer)
        if faults.revoked not in (None, self.rank):
            self._use_revoked_key(int(faults.revoked or 0))

    def _write_out_of_range(self, peer: int, number: int) -> None:
        at = self.size * AREA_BYTES - number
        call = self.endpoint.write if number % 2 == 0 else self.endpoint.read
        try:
            call(peer, self._regions["fetched"], "receive", number + 1, remote_offset=at)
        except InvalidArgumentError:
            self._count("out of range, refused")
        else:
            self._fail(f"{number + 1} bytes at {at} of a region of {self.size * AREA_BYTES} were taken")

    def _close_in_use(self, peer: int) -> None:
        """The write goes on, or had ended: its memory is never taken away from it."""
        memory = self._sink_content(self.rank, peer).copy()
        region = self.endpoint.register(memory)
        request = self.endpoint.write(peer, region, "sink", remote_offset=self.rank * SINK_BYTES, lane=LANES)
        try:
            region.close(0)
        except StateError:
            self._count("closes of a region in use, refused")
        else:
            self._count("closes of a region after its use")
            if not request.done:
                self._fail("a region was closed under a request that had not ended")
        request.wait()
        region.close()

    def _use_revoked_key(self, revoked: int) -> None:
        """Writes, reads and signals with the key of a region that is closed: each fails, and the lane is open again for the next."""
        name, region = self._victims[revoked], self._regions["fetched"]
        for what in ("write", "read", "signal"):
            chunks = [] if what == "signal" else [Chunk(region, name, VICTIM_BYTES, revoked * AREA_BYTES, 0, LANES)]
            signals = [Signal(1, 0, name, lane=LANES)] if what == "signal" else []
            request = self.endpoint.submit("read" if what == "read" else "write", revoked, chunks, signals)
            try:
                request.wait()
            except TransferError:
                self._count("keys revoked, refused")
                if request.status() is not Status.BAD_KEY:
                    self._fail(f"a {what} with a revoked key ended as {request.status().name}")
            else:
                self._fail(f"a {what} with a revoked key ended well")

    # ---- checks

    def _check_arrivals(self, incoming: dict[int, list[Transfer]]) -> None:
        """At every signal and notification all that it covers is here."""
        awaited = [transfer for found in incoming.values() for transfer in found if transfer.signal]
        plan.draw(self.setup.seed, self._iteration, self.rank, "arrivals").shuffle(awaited)
        for transfer in awaited:
            index = transfer.source * TRANSFERS_MAX + transfer.number
            self._expected[index] += transfer.signal
            if not self.endpoint.wait_counter(index, self._expected[index]):
                raise DeadlineError(f"rank {self.rank}: signal {transfer.number} of rank {transfer.source} did not come; {self._where()}")
            self._check_written(self._covered(transfer, incoming[transfer.source]), "at its signal")
        self._check_notifications(incoming)

    def _covered(self, transfer: Transfer, found: list[Transfer]) -> list[Transfer]:
        """Writes that were submitted before it and lie within its scope; a cancelled one may have moved behind it."""
        lanes = {Scope.REQUEST: (), Scope.QUEUE_PAIR: (transfer.lane,), Scope.PEER: range(LANES)}[Scope(transfer.scope)]
        earlier = [one for one in found[: transfer.number] if one.lane in lanes and not one.cancel]
        return [one for one in (*earlier, transfer) if one.kind == "write"]

    def _check_notifications(self, incoming: dict[int, list[Transfer]]) -> None:
        wanted = {(one.source, one.number): one for found in incoming.values() for one in found if one.notification}
        deadline = time.monotonic() + self.endpoint.timeout_ms / 1000
        while wanted:
            seen = self.endpoint.native.doorbell_seen()
            taken = self.endpoint.notifications()
            for source, content in taken:
                number = HEADER.unpack_from(content)[1]
                transfer = wanted.pop((source, number), None)
                if transfer is None or content != self._notification(transfer):
                    self._fail(f"a notification of rank {source} that nobody sent now: {content[:24]!r}")
                else:
                    self._check_written([transfer] if transfer.kind == "write" else [], "at its notification")
            if wanted and not taken:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"rank {self.rank}: notifications {sorted(wanted)} did not come; {self._where()}")
                self.endpoint.native.doorbell_wait(seen, 20)

    def _check_written(self, found: Iterable[Transfer], when: str) -> None:
        for transfer in found:
            self._check_pieces(transfer, "receive", transfer.source * AREA_BYTES, when)

    def _check_pieces(self, transfer: Transfer, where: str, base: int, when: str) -> None:
        seed = plan.content_seed(self.setup.seed, self._iteration, transfer.kind, transfer.source, transfer.target)
        for piece in transfer.pieces:
            at = base + piece.place
            wrong = check_payload(self._bytes[where][at : at + piece.nbytes], seed, piece.offset)
            if wrong is not None:
                self._fail(f"{transfer.kind} {transfer.number} of rank {transfer.source}, {piece.nbytes} bytes, {when}: {wrong}")

    def _check_ends(self, requests: list[tuple[Transfer, Request]]) -> None:
        for transfer, request in requests:
            request.wait()
            if transfer.kind == "read":
                self._check_pieces(transfer, "fetched", transfer.target * AREA_BYTES, "at its end")
            self.outcome.payload_bytes += transfer.nbytes
        self.outcome.requests += len(requests)

    def _check_everything(self, outgoing: dict[int, list[Transfer]], incoming: dict[int, list[Transfer]], faults: plan.Faults) -> None:
        """After the barrier: every byte that was sent or read, and every byte beside them as it was; counters exact; the hash."""
        for other in self.others:
            for where, kind, source, target, found in (
                ("receive", "write", other, self.rank, incoming[other]),
                ("fetched", "read", self.rank, other, outgoing[other]),
            ):
                content, area = self._content(kind, source, target, found), slice(other * AREA_BYTES, (other + 1) * AREA_BYTES)
                shadow, actual = self._shadow[where][area], self._bytes[where][area]
                for piece in (piece for one in found if one.kind == kind for piece in one.pieces):
                    shadow[piece.place : piece.place + piece.nbytes] = content[piece.offset : piece.offset + piece.nbytes]
                    self._hash.update(actual[piece.place : piece.place + piece.nbytes].data)
                if not np.array_equal(shadow, actual):
                    wrong = np.flatnonzero(shadow != actual)
                    self._fail(f"{where} of rank {other}: {wrong.size} bytes are wrong after the barrier, the first at {wrong[0]}")
                    shadow[:] = actual
            if faults.in_use[other] == self.rank:
                sunk = self._bytes["sink"][other * SINK_BYTES : (other + 1) * SINK_BYTES]
                if not np.array_equal(sunk, self._sink_content(other, self.rank)):
                    self._fail(f"what rank {other} wrote from memory that it closed meanwhile is not whole")
        for index, expected in enumerate(self._expected):
            if int(self._counters[index]) != expected:
                self._fail(f"counter {index} is {int(self._counters[index])}; it should be {expected}")
        if faults.revoked == self.rank and self._victim_memory[:] != self._victim_held:
            self._fail("memory was written to after its key had been revoked")

    def _sink_content(self, source: int, target: int) -> Bytes:
        return payload(plan.content_seed(self.setup.seed, self._iteration, "sink", source, target), 0, SINK_BYTES)

    def _count(self, what: str) -> None:
        with self._lock:
            self.outcome.injected[what] += 1

    def _where(self) -> str:
        return f"iteration {self._iteration}, --seed {self.setup.seed}"

    def _fail(self, what: str) -> None:
        with self._lock:
            self.outcome.failed += 1
            if len(self.outcome.failures) < FAILURES_KEPT:
                self.outcome.failures.append(f"rank {self.rank}, {self._where()}: {what}")
