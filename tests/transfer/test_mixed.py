"""Three agents that all move random things to and from each other at once: every byte, every message."""

from __future__ import annotations

import dataclasses

import pytest

from transfer import bodies, mixed_bodies
from transfer.world import LOCAL, TCP, agents

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize(
    "settings",
    [LOCAL, dataclasses.replace(TCP, max_outstanding=4)],
    ids=["local", "tcp-four-slots"],
)
def test_random_transfers_of_all_to_all(settings: object) -> None:
    with agents(NAMES, settings) as group:  # type: ignore[arg-type]
        cards = [group[name].call(mixed_bodies.prepare) for name in NAMES]
        bases = [group[name].call(bodies.base_of) for name in NAMES]
        for name in NAMES:
            group[name].call(mixed_bodies.meet, cards)
        for name in NAMES:
            group[name].ask(mixed_bodies.run, 7, 8, NAMES, bases)
        answers = {name: group[name].answer() for name in NAMES}
        assert not [each for _, wrong in answers.values() for each in wrong]
        for name in NAMES:
            expected = {other: told[name] for other, (told, _) in answers.items() if told.get(name)}
            assert group[name].call(mixed_bodies.count, sum(expected.values())) == expected
