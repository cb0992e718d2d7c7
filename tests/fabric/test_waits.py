"""Every wait has a deadline, answers Ctrl-C, and leaves ownership where it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expertwire.errors import DeadlineError, InvalidArgumentError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, TCP, Group, ranks
from fabric.test_replacement import stopped

BOTH = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
INTERRUPT_S_MAX = 0.1


@pytest.fixture(scope="module", params=[LOCAL, TCP], ids=["local", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Group]:
    with ranks(2, request.param) as group:
        group.all(bodies.barrier_in_order, 1)  # connected: no test measures that by accident
        yield group


@pytest.mark.parametrize("how", ["counter", "barrier", "doorbell"])
def test_ctrl_c_ends_a_wait(two: Group, how: str) -> None:
    assert two[0].call(bodies.interrupted_wait, how, 63) <= INTERRUPT_S_MAX
    if how == "barrier":  # the interrupted barrier was announced: the other rank is not held up by it
        two[1].call(bodies.barrier_briefly, 10_000)


def test_awaiting_many_requests(two: Group) -> None:
    before = two[1].call(bodies.counter, 3)
    assert two[0].call(bodies.awaited, 1, 40) == sum(range(40))
    assert two[1].call(bodies.counter, 3) == before + 40


def test_quiet_covers_what_was_submitted(two: Group) -> None:
    assert two[0].call(bodies.quiet_covers, 1, 30) == 30
    assert two[1].call(bodies.counter, 5) >= 30


def test_a_missed_counter_is_false_not_an_error(two: Group) -> None:
    assert two[0].call(bodies.wait_counter_briefly, 62, 1, 30) is False


@pytest.mark.parametrize("share", [False, True], ids=["fabric", "mapped"])
@BOTH
def test_a_barrier_orders_behind_earlier_traffic(settings: Settings, share: bool) -> None:
    with ranks(4, settings, share=share) as group:
        for seen in group.all(bodies.barrier_in_order, 5):
            assert seen == [3, 6, 9, 12, 15]


def test_a_barrier_names_who_is_missing(two: Group) -> None:
    with ranks(3, LOCAL) as group, pytest.raises(DeadlineError, match=r"have not arrived: rank 1 .*, rank 2"):
        group[0].call(bodies.barrier_briefly, 100)


def test_a_deadline_leaves_ownership_with_the_request() -> None:
    """The target is stopped with more on its way than the sockets hold; when it goes on, everything ends well."""
    with ranks(2, TCP, heartbeat_ms=1000) as pair:
        pair[0].call(bodies.write_signalled, 1, 4096, 1)
        with stopped(pair, 1):
            late, owned, refusal = pair[0].call(bodies.stuck_write, 1, 1 << 20, 300)
        assert late
        assert owned
        assert "in use by" in refusal
        assert pair[0].call(bodies.finish_stuck) == 64
        assert pair[1].call(bodies.counter, 6) == 64


def test_mapped_ranks_wake_each_other_by_the_doorbell() -> None:
    with ranks(2, LOCAL, share=True) as pair:
        pair[1].ask(bodies.wait_stored, 77)
        pair[0].call(bodies.touch_peer, 1, 77)
        assert pair[1].answer()


def test_wait_word_refuses_what_is_no_word() -> None:
    with Endpoint(0, 1, LOCAL, counters=2) as endpoint, pytest.raises(InvalidArgumentError, match="offset 4 is no 8-byte word"):
        endpoint.native.wait_word(endpoint.native.region("counters"), 4, 1, 10)
