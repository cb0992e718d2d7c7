"""Random transfers of one agent to and from its own part of the others' memory, several at once, compared byte by byte."""

from __future__ import annotations

import random
from typing import Any

import numpy

from expertwire.testing.oracle import check_payload, payload, payload_seed
from expertwire.transfer import Card, TransferState
from transfer.bodies import take
from transfer.world import ARENA_BYTES, Here

PART = ARENA_BYTES // 3
SIZES = (1, 8, 100, 4096, 5000, 70_000, 200_000)
Plan = list[tuple[int, list[tuple[int, int]]]]


def prepare(here: Here) -> Card:
    """The arena is for the others; two more memories are this agent's own."""
    here.kept["from"], here.kept["to"] = (numpy.zeros(PART, dtype=numpy.uint8) for _ in range(2))
    for memory in (here.arena, here.kept["from"], here.kept["to"]):
        here.agent.register([(int(memory.ctypes.data), len(memory), 0)], "DRAM")
    card: Card = here.agent.card()
    return card


def meet(here: Here, cards: list[Card]) -> None:
    for card in cards:
        if card.name != here.agent.name:
            here.agent.add_remote(card)


def plan_of(draw: random.Random, source: int) -> Plan:
    """Up to 12 transfers, each of some pieces that no other one touches: (whose memory, [(offset, bytes)])."""
    plan: Plan = []
    used = 0
    for _ in range(draw.randrange(1, 13)):
        size, pieces = draw.choice(SIZES), []
        for _ in range(draw.randrange(1, 20)):
            at = used + draw.choice((0, 0, 13))  # neighbours are merged, now and then
            if at + size > PART:
                break
            pieces.append((at, size))
            used = at + size
        if pieces:
            plan.append((draw.choice([other for other in range(3) if other != source]), pieces))
    return plan


def transfers(
    here: Here, operation: str, memory: Any, plan: Plan, names: list[str], bases: list[int], draw: random.Random
) -> dict[str, int]:
    """All of them on their way at once; how many messages went to whom."""
    told: dict[str, int] = {}
    under_way = []
    for whose, pieces in plan:
        rows = [(int(memory.ctypes.data) + at, size, 0) for at, size in pieces]
        there = [(bases[whose] + here.source * PART + at, size, 0) for at, size in pieces]
        word = draw.random() < 0.5
        transfer = here.agent.initialize(operation, rows, there, names[whose], b"with data" if word else b"", "DRAM")
        transfer.post()
        under_way.append(transfer)
        alone = draw.random() < 0.3
        if alone:
            here.agent.notify(names[whose], b"alone")
        told[names[whose]] = told.get(names[whose], 0) + word + alone
    draw.shuffle(under_way)
    for transfer in under_way:
        if draw.random() < 0.5:
            transfer.wait()
        while transfer.check() is not TransferState.DONE:
            pass
        transfer.release()
    return told


def run(here: Here, seed: int, rounds: int, names: list[str], bases: list[int]) -> tuple[dict[str, int], list[str]]:
    """(messages sent to each, what was read back wrong)."""
    draw = random.Random(3 * seed + here.source)
    told: dict[str, int] = {}
    wrong = []
    for epoch in range(rounds):
        here.kept["from"][:] = payload(payload_seed(here.source, epoch), 0, PART)
        here.kept["to"][:] = 0
        plan = plan_of(draw, here.source)
        for operation, memory in (("WRITE", here.kept["from"]), ("READ", here.kept["to"])):
            for name, count in transfers(here, operation, memory, plan, names, bases, draw).items():
                told[name] = told.get(name, 0) + count
        for at, size in (piece for _, pieces in plan for piece in pieces):
            found = check_payload(here.kept["to"][at : at + size], payload_seed(here.source, epoch), at)
            if found is not None:
                wrong.append(f"epoch {epoch}, {size} bytes at {at}: {found}")
    return told, wrong


def count(here: Here, expected: int) -> dict[str, int]:
    return {name: len(payloads) for name, payloads in take(here, expected).items()}
