"""The gate policy on real libfabric: who overtakes whom when payload and signal travel on two endpoints.

What happens without a gate, or with one on the ordinary completion, is counted and printed; that nothing overtakes with a gate on
delivery-complete (DESIGN "What providers promise", ordering class B), or where the target counts the writes (class C), is asserted. In
class C the signal leaves right behind its write, as it does without a gate.
"""

from __future__ import annotations

import ctypes
import time

import numpy
import pytest

from fabric.provider_peer import DATA, DEADLINE_S, WORDS, Pair, pair
from fabric.provider_setups import SETUPS, Setup

ROUNDS = {"none": 800, "completion": 800, "delivery": 2000, "counted": 2000}  # by what a signal waits for
LENGTHS = (7 << 10, 64 << 10)
WINDOW = 8  # a backlog on the payload's endpoint is what a signal overtakes
WIRES = {name: SETUPS[name] for name in ("tcp-system-atomic", "tcp-wheel-message")}


def signalled_rounds(both: Pair, gate: str, length: int, rounds: int) -> tuple[int, int]:
    """(signals the target looked at, signals that were there before their payload).

    Round n's payload holds n or more in every word (the buffer is used again while it is being sent), and its signal adds 1.
    """
    stamps = numpy.frombuffer((ctypes.c_char * length).from_address(both.side.data), dtype=numpy.uint64)
    start = stamp = both.ask("word", 0)
    both.pipe.send(("watch_stamps", 0, length, start, rounds))
    free, due, done = list(range(WINDOW)), [], 0  # slots to write from; slots whose signal may leave
    request = [0] * WINDOW  # class C: whose write the slot carries, 0 in other classes
    in_flight = [0] * WINDOW
    end = time.monotonic() + DEADLINE_S
    while done < rounds:
        while free and stamp < start + rounds:
            stamps[:] = stamp + 1
            request[free[-1]] = stamp + 1 if gate == "counted" else 0
            delivered, counted = gate in ("delivery", "counted"), request[free[-1]]
            if both.post("write", free[-1], local=DATA, remote=DATA, bytes=length, delivered=delivered, counted=counted)[0] != "posted":
                break
            stamp += 1
            in_flight[free[-1]] = 2
            if gate in ("none", "counted"):
                due.append(free[-1])
            free.pop()
        while due and both.post("signal", WINDOW + due[0], remote=WORDS, operand=1, endpoint=1, counted=request[due[0]])[0] == "posted":
            due.pop(0)
        entries = both.probe.poll()[0]
        for slot, _, status, _ in entries:
            assert status == "ok"
            in_flight[slot % WINDOW] -= 1
            if slot < WINDOW and gate not in ("none", "counted"):
                due.append(slot)
            if in_flight[slot % WINDOW] == 0:
                free.append(slot % WINDOW)
                done += 1
        assert time.monotonic() < end, f"{done} of {rounds} rounds ended"
        if not entries:
            both.probe.sleep(1)  # the target may need this core
    looked, early = both._answer()
    return looked, early


@pytest.mark.parametrize("setup", WIRES.values(), ids=WIRES.keys())
def test_a_signal_on_another_endpoint_overtakes_unless_it_waits_for_delivery(setup: Setup) -> None:
    setup.require()
    with pair(setup.kind, {**setup.options, "endpoints": 2, "ordering": "counted", "trust_immediates": True}) as both:
        assert both.probe.capabilities()["ordering"] == "counted_immediates"
        assert both.run("signal", remote=WORDS, remote_offset=8, operand=1, endpoint=1) == "ok"  # both connections are made
        assert both.run("write", local=DATA, remote=DATA, bytes=8) == "ok"
        for length in LENGTHS:
            for gate, rounds in ROUNDS.items():
                looked, early = signalled_rounds(both, gate, length, rounds)
                print(f"{length} bytes, gate on {gate}: {early} of {looked} signals seen were there before their payload")
                assert looked > rounds // 20
                assert early == 0 or gate not in ("delivery", "counted")
