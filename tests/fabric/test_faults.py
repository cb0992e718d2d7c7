"""Faults between real processes: docs/faults.md has the table of which is tested where."""

from __future__ import annotations

import pytest

from expertwire.fabric.config import Settings
from fabric import bodies, fault_bodies
from fabric.ranks import LOCAL, TCP, ranks

BOTH = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])


@BOTH
def test_who_comes_back_meets_the_others_at_their_barriers(settings: Settings) -> None:
    """Barriers are numbered: another endpoint under the same rank counts on from where the others are."""
    with ranks(3, settings) as group:
        group.all(bodies.barrier_in_order, 3)
        for returning in (1, 0, 1):
            blob = group[returning].call(fault_bodies.return_as_another)
            others = {member.rank: member for member in group.members if member.rank != returning}
            group[returning].ask(fault_bodies.meet, {rank: member.call(fault_bodies.blob) for rank, member in others.items()})
            for member in others.values():
                member.call(fault_bodies.replace_peer, returning, blob)
            group[returning].answer()
            for seen in group.all(fault_bodies.barriers_in_order, 2):
                assert seen == [2, 4]
