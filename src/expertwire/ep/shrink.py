"""`Buffer.shrink` at its edge: carries the records of `ep/membership.py` over the old context's fabric, looks at the peers, and has the
members make a new context among themselves.

The old context is only left once all members have the new one. So late words and rows of a rank that was stopped reach regions that nobody
reads and keys of an endpoint that is closed: it is fenced off by being left behind.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from expertwire.ep.bootstrap import Launch
from expertwire.ep.membership import Agreement, Members, Phase, Record
from expertwire.ep.processes import Process, has_ended
from expertwire.errors import DeadlineError, ExcludedError, ExpertwireError, PeerError

if TYPE_CHECKING:
    from expertwire.fabric.native import Context

_FRAME = struct.Struct("<BIIII")  # kind, round, step, part, parts
_RECORD, _SHARE = 1, 2
_SILENCE_S = 5.0  # without a heartbeat, as everywhere; half of a deadline where that is shorter …
_SILENCE_LEAST_S = 1.5  # … but more than one beat, which comes every second
_RESEND_S = 0.25
_LOOK_S = 0.02
_SEND_MS = 50
_HOPELESS_S = 0.5  # the last words of who has left may come behind the word that it leaves


class _Made(Protocol):
    def close(self, *, linger: bool) -> None: ...


Made = TypeVar("Made", bound=_Made)


class _RoundOverError(Exception):
    """The others have gone into the next round, or a member was lost: what was being made is for nothing."""


@dataclass(frozen=True)
class _Letter:
    sender: int
    kind: int
    round: int
    step: int
    payload: bytes


class _Mail:
    """Messages of any length between the ranks of a context, in order from each sender, as notifications."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._part_bytes = int(context.capabilities["notification_bytes_max"]) - _FRAME.size
        self._parts: dict[int, list[bytes]] = {}
        self.refused: set[int] = set()  # nothing can be sent to them: dead to this rank

    def send(self, to: int, kind: int, turn: int, step: int, payload: bytes) -> None:
        """Hand it over. Whether it arrives is the receiver's to say: what is not answered is sent again, or is a matter of the deadline."""
        count = max(1, -(-len(payload) // self._part_bytes))
        try:
            for part in range(count):
                piece = payload[part * self._part_bytes : (part + 1) * self._part_bytes]
                frame = _FRAME.pack(kind, turn, step, part, count) + piece
                self._context.submit(to, "write", [], [], frame, False, _SEND_MS)
            self.refused.discard(to)
        except PeerError:
            self.refused.add(to)
        except ExpertwireError:
            return  # full, as with one that does not look

    def take(self) -> list[_Letter]:
        """What has come."""
        letters = []
        for sender, frame in self._context.take_notifications():
            kind, turn, step, part, count = _FRAME.unpack_from(frame)
            parts = self._parts.setdefault(sender, [])
            if part != len(parts):
                parts.clear()  # the sender gave up in the middle of one
            if part == len(parts):
                parts.append(frame[_FRAME.size :])
            if len(parts) == count:
                letters.append(_Letter(sender, kind, turn, step, b"".join(parts)))
                parts.clear()
        return letters


class Survivors:
    """The ranks of one context, until they have become another group."""

    def __init__(self, context: Context, rank: int, processes: Sequence[Process], *, ends_are_known: bool) -> None:
        self.rank = rank
        self._context = context
        self._processes = processes
        self._ends_are_known = ends_are_known
        self._others = [other for other in range(len(processes)) if other != rank]
        self._agreement = Agreement(rank, len(processes))
        self._mail = _Mail(context)
        self._shares: dict[tuple[int, int, int], bytes] = {}  # (round, step, sender)
        self._told = -1
        self._tell_at = self._look_at = 0.0
        self._silence_s = _SILENCE_S
        self._given_up: dict[int, str] = {}
        self._asleep: set[int] = set()  # not heard for more than a beat
        self._left: Members = frozenset()
        self._hopeless_since: float | None = None
        self._timeout_ms = 0
        self._deadline = 0.0

    def excluded(self) -> ExcludedError | None:
        """Why nobody answers, if the others have said so: they went on without this rank."""
        self._listen()
        for record in self._agreement.heard:
            members = self._agreement.excluding(record)
            if members is not None:
                return self._exclusion(members)
        return None

    def shrink(self, make: Callable[[Launch, tuple[int, ...]], Made], timeout_ms: int) -> tuple[tuple[int, ...], Made]:
        """Agree on who is left, and `make` what these share, on each of them. Members ascending, and what was made here.

        Raises DeadlineError, PeerError, ExcludedError; what `make` raises.
        """
        self._timeout_ms = timeout_ms
        self._deadline = time.monotonic() + timeout_ms / 1000
        self._silence_s = min(_SILENCE_S, max(_SILENCE_LEAST_S, timeout_ms / 2000))
        self._agreement.begin()
        while True:
            self._until(lambda: self._agreement.phase is Phase.wiring)
            made = self._wire(make)
            if made is not None:
                return tuple(sorted(self._agreement.members)), made

    # ---- rounds

    def _wire(self, make: Callable[[Launch, tuple[int, ...]], Made]) -> Made | None:
        """What all members of the round have made, or None where it is over before they have."""
        members = tuple(sorted(self._agreement.members))
        turn = self._agreement.round
        try:
            made = make(self._launch(turn, members), members)
        except _RoundOverError:
            return None
        try:
            self._turn()
            if self._agreement.phase is Phase.wiring and self._agreement.round == turn:
                self._agreement.wiring_done()
                self._until(lambda: self._agreement.phase is not Phase.wired)
            if self._agreement.phase is not Phase.settled:
                made.close(linger=False)
                return None
        except BaseException:
            made.close(linger=False)
            raise
        return made

    def _launch(self, turn: int, members: tuple[int, ...]) -> Launch:
        steps = itertools.count()

        def all_gather(mine: Any) -> list[Any]:
            step = next(steps)
            payload = pickle.dumps(mine)
            for member in members:
                if member != self.rank:
                    self._mail.send(member, _SHARE, turn, step, payload)
            self._shares[turn, step, self.rank] = payload

            def over() -> bool:
                return self._agreement.round != turn or self._agreement.phase is not Phase.wiring

            keys = [(turn, step, member) for member in members]
            self._until(lambda: over() or all(key in self._shares for key in keys))
            if over():
                raise _RoundOverError
            return [pickle.loads(self._shares.pop(key)) for key in keys]

        return Launch(members.index(self.rank), len(members), all_gather, self._deadline)

    # ---- turns

    def _until(self, reached: Callable[[], bool]) -> None:
        while True:
            seen = self._context.doorbell_seen()
            self._turn()
            if self._agreement.phase is Phase.excluded:
                members = self._agreement.excluding(self._agreement.record)
                raise self._exclusion(members if members is not None else frozenset())
            if reached():
                return
            self._check()
            self._context.doorbell_wait(seen, int(1000 * _LOOK_S))

    def _turn(self) -> None:
        """Everything that can be done without waiting."""
        self._listen()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        version = -1
        while version != self._agreement.record.version:
            version = self._agreement.record.version
            self._agreement.step(now)
        if version != self._told or now >= self._tell_at:
            self._tell()

    def _listen(self) -> None:
        for letter in self._mail.take():
            if letter.kind == _RECORD:
                record = pickle.loads(letter.payload)
                if isinstance(record, Record) and record.rank == letter.sender:
                    self._agreement.hear(record)
            elif letter.kind == _SHARE and letter.round >= self._agreement.round:
                self._shares[letter.round, letter.step, letter.sender] = letter.payload

    def _tell(self) -> None:
        record = self._agreement.record
        news = record.version != self._told
        payload = pickle.dumps(record)
        for other in self._others:
            # One that does not look is told only what it will need when it wakes up: the little that a provider keeps for it would be full
            # of words that it has heard before, and the last one, that the others go on without it, would find no room.
            if other in record.ended or (other in self._asleep and not news):
                continue
            if other not in self._given_up or (news and record.decisions):
                self._mail.send(other, _RECORD, 0, 0, payload)
        self._told = record.version
        self._tell_at = time.monotonic() + _RESEND_S

    def _look(self) -> None:
        ended, left, self._given_up, self._asleep = [], [], {}, set()
        for other in self._others:
            if self._ends_are_known and has_ended(self._processes[other], self._processes[self.rank]):
                ended.append(other)
                continue
            _, _, _, age_ns, leaving = self._context.pulse(other)
            if age_ns >= _SILENCE_LEAST_S * 1e9:
                self._asleep.add(other)
            if leaving:
                left.append(other)
                self._given_up[other] = "has closed its Buffer, or gone on without this rank"
            elif age_ns >= self._silence_s * 1e9:
                self._given_up[other] = f"is silent: no heartbeat for {age_ns / 1e9:.1f} s"
            elif other in self._mail.refused:
                self._given_up[other] = "is held dead: nothing can be sent to it"
        self._left = frozenset(left)
        self._agreement.see(ended, self._given_up)

    # ---- ends

    def _check(self) -> None:
        now = time.monotonic()
        undecided = self._agreement.phase in (Phase.gathering, Phase.preparing, Phase.proposing)
        if not undecided or not self._agreement.hopeless(self._left):
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        elif now - self._hopeless_since >= _HOPELESS_S:
            raise PeerError(
                f"rank {self.rank}: shrink cannot succeed: {self._table()}; what may still come is no majority of the ranks "
                f"{sorted(self._agreement.members)}: destroy this Buffer and make a new one",
                min(self._left),
            )
        if now >= self._deadline:
            raise DeadlineError(
                f"rank {self.rank}: shrink did not end within {self._timeout_ms} ms: {self._table()}{self._too_few()}; "
                "call shrink again, on all of them, or destroy this Buffer"
            )

    def _table(self) -> str:
        agreement = self._agreement
        phases = {record.rank: record.phase for record in agreement.heard}
        rows = []
        for rank in sorted(agreement.members - {self.rank}):
            _, _, _, age_ns, _ = self._context.pulse(rank)
            if rank in agreement.ended:
                rows.append(f"rank {rank} has ended")
            elif rank in self._given_up:
                rows.append(f"rank {rank} {self._given_up[rank]}")
            elif rank not in agreement.here:
                rows.append(f"rank {rank} has not called shrink (heartbeat {age_ns / 1e9:.1f} s ago)")
            else:
                rows.append(f"rank {rank} is here ({phases[rank].value if rank in phases else 'unheard'})")
        return "; ".join([*rows, f"this rank is in {agreement.phase.value}"])

    def _too_few(self) -> str:
        agreement = self._agreement
        silent = sorted((agreement.members & frozenset(self._given_up)) - agreement.ended)
        here = sorted(agreement.here - agreement.ended - frozenset(self._given_up))
        if not silent or agreement.phase is not Phase.gathering or 2 * len(here) > len(agreement.members):
            return ""
        return (
            f"; ranks {here} are no majority of {sorted(agreement.members)}, and ranks {silent} may wake up: nobody goes on without them "
            "before their processes have ended"
        )

    def _exclusion(self, members: Members) -> ExcludedError:
        return ExcludedError(
            f"rank {self.rank}: ranks {sorted(members)} have agreed by shrink to go on without this one, which did not answer them; "
            "nothing that it sends reaches them any more: destroy this Buffer",
            tuple(sorted(members)),
        )
