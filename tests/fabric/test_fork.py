"""A forked child can use nothing of the parent's endpoint, and breaks nothing of it."""

from __future__ import annotations

import pytest

from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, TCP, ranks


@pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
def test_calls_in_a_forked_child_raise_and_its_exit_closes_nothing(settings: Settings) -> None:
    with ranks(2, settings) as pair:
        message, code = pair[0].call(bodies.child_refuses)
        assert "parent of this forked process" in message
        assert code == 0
        pair[0].call(bodies.place, 31, 65_536)
        pair[0].call(bodies.write_signalled, 1, 65_536, 1)
        assert pair[1].call(bodies.holds, 31, 65_536)
        assert pair[1].call(bodies.child_refuses)[1] == 0
        pair[0].call(bodies.write_signalled, 1, 65_536, 2)
        assert pair[1].call(bodies.wait_counter, 0, 3)
