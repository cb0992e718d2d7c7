"""What ranks do in tests/ep/test_failures: die, stop, leave, call something else, get interrupted."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep.work import EXPERTS, Described, caught, described, dispatch, dispatch_rows, round_trip, rows_of
from expertwire.ep import Buffer
from expertwire.ep.renewal import State
from expertwire.errors import ExpertwireError
from harness import Rank


def kill_oneself(at: threading.Event) -> None:
    """SIGKILL by a thread of its own, once `at` is set: in the middle of what this thread does then."""

    def die() -> None:
        at.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def missed(buffer: Any, rank: int, calls: Callable[[], object]) -> dict[str, Any]:
    """What a survivor is told, when, and what works afterwards."""
    last_good = time.monotonic()
    deadline = last_good + 40  # within what the test waits for an answer
    try:
        while time.monotonic() < deadline:
            calls()
            last_good = time.monotonic()
        raise AssertionError("calls have gone well for 40 s: nobody was missed")
    except ExpertwireError as caught_error:
        error = caught_error
    seen_s = time.monotonic() - last_good
    later = caught(lambda: dispatch(buffer, rank))
    begin = time.monotonic()
    buffer.destroy()
    buffer.destroy()
    return {"error": described(error), "seen_s": seen_s, "later": later, "destroy_s": time.monotonic() - begin}


def die_in_dispatch(
    rank: Rank, node_of: Sequence[int], victims: Sequence[int], environment: dict[str, str], provider: str | None
) -> dict[str, Any]:
    """Dispatch and combine until the victims, killed in the middle of a call, are missed."""
    os.environ.update(environment)
    buffer = Buffer(rank.group, 16 << 20, node_of=node_of, provider=provider)
    for _ in range(3):
        round_trip(buffer, rank.rank, tokens=64)
    if rank.rank in victims:
        in_call = threading.Event()
        kill_oneself(in_call)
        in_call.set()
    return missed(buffer, rank.rank, lambda: round_trip(buffer, rank.rank, tokens=64))


def die_in_combine(rank: Rank, node_of: Sequence[int], victims: Sequence[int], environment: dict[str, str]) -> dict[str, Any]:
    """The victims are killed while they combine, the others never leave theirs."""
    os.environ.update(environment)
    buffer = Buffer(rank.group, 16 << 20, node_of=node_of, provider="tcp")
    round_trip(buffer, rank.rank, tokens=64)
    received, _, _, _, handle, _ = dispatch(buffer, rank.rank, tokens=64)
    in_call = threading.Event()
    if rank.rank in victims:
        kill_oneself(in_call)

    def combine() -> None:
        in_call.set()
        buffer.combine(received, handle)

    return missed(buffer, rank.rank, combine)


def die_in_bootstrap(rank: Rank, node_of: Sequence[int], victim: int) -> dict[str, Any]:
    """The victim is killed between two steps of making a Buffer, where the others wait for it."""
    from expertwire.ep import bootstrap

    if rank.rank == victim:
        bootstrap._choose_provider = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    begin = time.monotonic()
    error = caught(lambda: Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=4000))
    return {"error": error, "seen_s": time.monotonic() - begin}


def who_does_not_come(rank: Rank, absent: Sequence[int]) -> Described:
    """All but those make a Buffer."""
    if rank.rank in absent:
        return ("", -1, "")
    return caught(lambda: Buffer(rank.group, 4 << 20, timeout_ms=1500))


def leave_behind_a_stopped_rank(rank: Rank) -> dict[str, Any]:
    """Rank 2 stops; rank 1 has seen that nothing comes from it, says nothing, and leaves; rank 0 is in a call."""
    os.environ.update({"EXPERTWIRE_LIVENESS": "heartbeat"})
    buffer = Buffer(rank.group, 4 << 20, node_of=(0, 1, 2), provider="tcp")
    round_trip(buffer, rank.rank)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    context = buffer.runtime._context
    deadline = time.monotonic() + 20
    while context.pulse(2)[3] < 1_300_000_000:  # ns: more than one heartbeat is missing
        assert time.monotonic() < deadline, f"rank 2 has not stopped: heard {context.pulse(2)[3]} ns ago"
        context.doorbell_wait(context.doorbell_seen(), 50)
    if rank.rank == 1:
        buffer._state = State.failed  # leave at once, as after an error
        buffer.destroy()
        return {}
    return missed(buffer, rank.rank, lambda: round_trip(buffer, rank.rank))


def leave_before_a_call(rank: Rank, node_of: Sequence[int], leaver: int, environment: dict[str, str]) -> dict[str, Any]:
    """One rank has an argument refused, gives up and closes its Buffer; the others are in that call already, or come to it later."""
    os.environ.update(environment)
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, provider="tcp")
    round_trip(buffer, rank.rank)
    if rank.rank == leaver:
        refused = caught(lambda: buffer.dispatch(torch.zeros((4, 8)), num_tokens_per_rank=None))
        buffer.destroy()
        return {"error": refused}
    return missed(buffer, rank.rank, lambda: round_trip(buffer, rank.rank))


def deadline(rank: Rank, node_of: Sequence[int], absent: int) -> dict[str, Any]:
    """All but one rank dispatch; that one is elsewhere."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=5000)
    round_trip(buffer, rank.rank)
    out: dict[str, Any] = {}
    if rank.rank != absent:
        reports = logging.handlers.BufferingHandler(100)
        logging.getLogger("expertwire.ep").addHandler(reports)
        begin = time.monotonic()
        out["error"] = caught(lambda: dispatch(buffer, rank.rank))
        out["waited_s"] = time.monotonic() - begin
        logging.getLogger("expertwire.ep").removeHandler(reports)
        out["reports"] = [record.getMessage() for record in reports.buffer]
        out["later"] = caught(lambda: buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=torch.int64), 4))
    rank.kept["deadline"] = buffer  # the absent rank lives on, it does not leave
    return out


def stopped(rank: Rank, node_of: Sequence[int], asleep: int) -> dict[str, Any]:
    """One rank is stopped by its own hand; the harness wakes it."""
    os.environ.update({"EXPERTWIRE_LIVENESS": "heartbeat"})
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of)
    round_trip(buffer, rank.rank)
    if rank.rank == asleep:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    begin = time.monotonic()
    error = caught(lambda: dispatch(buffer, rank.rank))
    seen_s = time.monotonic() - begin
    buffer.destroy()
    return {"error": error, "seen_s": seen_s}


def end_of_deadline(rank: Rank) -> float:
    begin = time.monotonic()
    rank.kept.pop("deadline").destroy()
    return time.monotonic() - begin


def other_call(rank: Rank, node_of: Sequence[int]) -> Described:
    """One rank combines while the others dispatch; afterwards all of them go on."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of)
    received, _, _, _, handle, _ = dispatch(buffer, rank.rank)
    error = caught(lambda: buffer.combine(received, handle) if rank.rank == 1 else dispatch(buffer, rank.rank))
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return error


def other_shape(rank: Rank, node_of: Sequence[int]) -> Described:
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of)
    hidden = 48 if rank.rank == 1 else 32
    error = caught(lambda: dispatch(buffer, rank.rank, hidden=hidden))
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return error


def other_type(rank: Rank, node_of: Sequence[int]) -> Described:
    """Rows of as many bytes, of another type on one rank."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of)
    x, ids, _ = rows_of(rank.rank)
    given: Any = x
    if rank.rank == 1:
        given = (torch.zeros((len(x), 2 * x.shape[1]), dtype=torch.float8_e4m3fn), torch.ones(len(x), 1))
    error = caught(lambda: dispatch_rows(buffer, given, ids, None))
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return error


def other_handle(rank: Rank, node_of: Sequence[int]) -> Described:
    """Two handles of equal shape; one rank combines by the other one."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of)
    received, _, _, _, first, _ = dispatch(buffer, rank.rank)
    second = dispatch(buffer, rank.rank)[4]
    error = caught(lambda: buffer.combine(received, second if rank.rank == 1 else first))
    buffer.combine(received, first)
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return error


def too_much(rank: Rank, node_of: Sequence[int]) -> Described:
    """A row that the data region of a rank has no room for: what more rows need goes in rounds."""
    buffer = Buffer(rank.group, 64 << 10, node_of=node_of)
    x = torch.ones((400, 40 << 10), dtype=torch.bfloat16)
    ids = torch.zeros((400, 1), dtype=torch.int64)
    error = caught(lambda: dispatch_rows(buffer, x, ids, None))
    round_trip(buffer, rank.rank)
    buffer.destroy()
    return error


def interrupted(rank: Rank, node_of: Sequence[int]) -> dict[str, Any]:
    """Rank 0 waits for rank 1, which never comes, and gets Ctrl-C."""
    buffer = Buffer(rank.group, 4 << 20, node_of=node_of, timeout_ms=20_000)
    round_trip(buffer, rank.rank)
    out: dict[str, Any] = {}
    if rank.rank == 0:
        sent: list[float] = []
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupt() -> None:
            while buffer._within != "dispatch":
                os.sched_yield()
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        x, ids, weights = rows_of(0)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, ids, weights)
        except KeyboardInterrupt:
            out["answered_s"] = time.monotonic() - sent[0]
        thread.join()
        out["later"] = caught(lambda: dispatch(buffer, rank.rank))
        begin = time.monotonic()
        buffer.destroy()
        out["destroy_s"] = time.monotonic() - begin
    else:
        rank.kept["interrupted"] = buffer
    return out


def end_of_interrupted(rank: Rank) -> None:
    buffer = rank.kept.pop("interrupted", None)
    if buffer is not None:
        buffer.destroy()


# ---- sharing and teardown
