"""Writes, reads and signals between real processes: every byte, and no signal before its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from expertwire.errors import CapacityError, DeadlineError, InvalidArgumentError, InvalidTypeError, MismatchError, StateError
from expertwire.fabric import Chunk, Endpoint, Region, Request, Signal
from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, SHM, TCP, Group, ranks

EVERY = pytest.mark.parametrize("settings", [LOCAL, TCP, SHM], ids=["local", "tcp", "shm"])


@pytest.fixture(scope="module", params=[LOCAL, TCP, SHM], ids=["local", "tcp", "shm"])
def two(request: pytest.FixtureRequest) -> Iterator[Group]:
    with ranks(2, request.param, lanes=2) as group:
        yield group


@pytest.fixture
def lone() -> Iterator[Endpoint]:
    with Endpoint(0, 2, LOCAL, counters=4) as endpoint:
        yield endpoint


def test_write_read_signal_and_notification_carry_every_byte(two: Group) -> None:
    before = two[1].call(bodies.counter, 0)
    for seed, length, count in ((1, 1, 1), (2, 8, 3), (3, 4097, 5), (4, 65_536, 8)):
        two[0].call(bodies.place, seed, length * count)
        two[0].call(bodies.write_signalled, 1, length, count)
        before += count
        assert two[1].call(bodies.wait_counter, 0, before)
        assert two[1].call(bodies.holds, seed, length * count)
    two[1].call(bodies.place, 9, 200_000)
    assert two[0].call(bodies.read_back, 1, 200_000, 9)
    assert two[1].call(bodies.take_notifications, 1) == [(0, b"read it")]


def test_many_chunks_end_once_and_the_signal_follows_all(two: Group) -> None:
    two[0].call(bodies.place, 11, 300 * 1000)
    before = two[1].call(bodies.counter, 2)
    two[0].call(bodies.write_many_chunks, 1, 300, 1000)
    assert two[1].call(bodies.counter, 2) == before + 7
    assert two[1].call(bodies.holds, 11, 300 * 1000)
    assert two[1].call(bodies.take_notifications, 1) == [(0, b"all of it")]


def test_a_batch_crosses_in_one_call_and_carries_every_byte(two: Group) -> None:
    for seed, count, length in ((21, 1, 8), (22, 300, 1000), (23, 512, 2000)):
        two[0].call(bodies.place, seed, count * length)
        assert two[0].call(bodies.write_batch, 1, count, length) >= count
        assert two[1].call(bodies.holds, seed, count * length)


def test_a_batch_that_cannot_be_meant_is_refused_whole(two: Group) -> None:
    unpaired, source, target = two[0].call(bodies.refused_batches, 1)
    assert "1 local and 2 remote offsets do not pair" in unpaired
    assert "local region 'data' has 1048576 bytes; 16 bytes at offset 1048568" in source
    assert "remote region 'data' has 1048576 bytes; 16 bytes at offset 1048568" in target


@pytest.mark.parametrize(
    ("settings", "length"),
    [(LOCAL, 65_536), (TCP, 7168), (TCP, 65_536), (SHM, 7168), (SHM, 65_536)],
    ids=["local", "tcp-7k", "tcp-64k", "shm-7k", "shm-64k"],
)
def test_a_signal_never_overtakes_its_payload(settings: Settings, length: int) -> None:
    with ranks(2, settings) as pair:
        pair[1].ask(bodies.check_each_arrival, 5, length, 100)
        pair[0].call(bodies.write_rounds, 5, length, 100)
        assert pair[1].answer() == 0


@EVERY
def test_four_slots_carry_many_requests(settings: Settings) -> None:
    with ranks(2, dataclasses.replace(settings, max_outstanding=4)) as pair:
        pair[0].call(bodies.place, 21, 4096 * 200)
        pair[0].call(bodies.write_signalled, 1, 4096, 200)
        assert pair[1].call(bodies.wait_counter, 0, 200)
        assert pair[1].call(bodies.holds, 21, 4096 * 200)
        counted = pair[0].call(bodies.statistics)
        assert counted.slots_counted_peak <= 4
        assert counted.misuses == 0


@EVERY
def test_sync_writes_keep_one_request_in_flight(settings: Settings) -> None:
    with ranks(2, dataclasses.replace(settings, sync_writes=True)) as pair:
        pair[0].call(bodies.place, 22, 4096 * 20)
        pair[0].call(bodies.write_signalled, 1, 4096, 20)
        assert pair[1].call(bodies.counter, 0) == 20
        assert pair[1].call(bodies.holds, 22, 4096 * 20)
        assert pair[0].call(bodies.statistics).slots_counted_peak <= 2 + 1  # one write or its signal, and a pulse


def test_user_memory_is_written_from_where_it_is(two: Group) -> None:
    sent = two[0].call(bodies.register_and_write, 1)
    assert two[1].call(bodies.first_bytes, len(sent)) == sent


def test_regions_are_zeroed_and_share_their_memory_with_views(lone: Endpoint) -> None:
    with lone.region("mine", 4096) as region:
        assert not region.numpy("uint8").any()
        region.numpy("int32", (4,), 16)[:] = 7
        assert bytes(region.memoryview(16, 4)) == b"\x07\0\0\0"
        view = region.memoryview()
        with pytest.raises(StateError, match="views of its memory"):
            region.close()
        del view
    with pytest.raises(StateError, match="closed"):
        region.memoryview()
    region.close()


def test_a_tensor_shares_the_region(lone: Endpoint) -> None:
    torch = pytest.importorskip("torch")
    region = lone.region("tensor", 4096)
    region.torch(torch.bfloat16, (8, 8)).fill_(1.0)
    assert region.numpy("uint16", (64,)).tolist() == [0x3F80] * 64


def test_wrong_arguments_name_value_and_limit(lone: Endpoint) -> None:
    region = lone.region("data", 4096)
    other = Endpoint(1, 2, LOCAL, counters=4)
    with other:
        other.region("data", 1000)
        lone.add_peer(1, other.blob())
        with pytest.raises(InvalidArgumentError, match=r"'data' has 1000 bytes; 4096 bytes at offset 0"):
            lone.write(1, region, "data")
        with pytest.raises(InvalidArgumentError, match=r"'data' has 4096 bytes; 10 bytes at offset 4090"):
            lone.write(1, region, "data", 10, offset=4090)
        with pytest.raises(InvalidArgumentError, match="0 bytes"):
            lone.write(1, region, "data", 0)
        with pytest.raises(InvalidArgumentError, match="rank 7; ranks are 0 to 1"):
            lone.write(7, region, "data", 8)
        with pytest.raises(InvalidArgumentError, match="'nothing'; it has: counters, data, runtime"):
            lone.write(1, region, "nothing", 8)
        with pytest.raises(InvalidArgumentError, match=r"counter 4 does not exist.*counters=4"):
            lone.signal(1, 1, 32)
        with pytest.raises(InvalidArgumentError, match="multiple of 8"):
            lone.signal(1, 1, 4)
        with pytest.raises(InvalidArgumentError, match="belongs to the endpoint"):
            lone.signal(1, 1, 64, remote="runtime")
        with pytest.raises(InvalidArgumentError, match="lane is 3; this endpoint has 1"):
            lone.submit("write", 1, [Chunk(region, "data", 8, lane=3)], [Signal(1)])
    with pytest.raises(InvalidArgumentError, match="name is taken"):
        lone.region("data", 8)
    with pytest.raises(InvalidArgumentError, match="2\\^48"):
        lone.region("huge", 1 << 60)
    with pytest.raises(InvalidTypeError, match="writable"):
        lone.register(b"constant")
    with pytest.raises(InvalidArgumentError, match="rank is 2; it must be below size, 2"):
        Endpoint(2, 2, LOCAL)


def test_a_blob_that_is_none_is_refused(lone: Endpoint) -> None:
    blob = lone.blob()
    for cut in range(0, len(blob), 7):
        with pytest.raises(InvalidArgumentError, match="malformed"):
            lone.add_peer(1, blob[:cut])
    with pytest.raises(InvalidArgumentError, match="follow its end"):
        lone.add_peer(1, blob + b"x")
    with pytest.raises(MismatchError, match="has rank 0"):
        lone.add_peer(1, blob)
    with pytest.raises(MismatchError, match="blob version 513"):
        lone.add_peer(1, blob[:4] + b"\x01\x02\0\0" + blob[8:])
    with Endpoint(1, 3, LOCAL) as third, pytest.raises(MismatchError, match="size 3"):
        lone.add_peer(1, third.blob())


def test_two_endpoints_in_one_process() -> None:
    with Endpoint(0, 2, LOCAL, counters=2) as one, Endpoint(1, 2, LOCAL, counters=2) as other:
        source, target = one.region("data", 4096), other.region("data", 4096)
        one.add_peer(1, other.blob())
        other.add_peer(0, one.blob())
        one.start()
        other.start()
        source.numpy("uint8")[:] = 5
        one.write(1, source, "data", signal=Signal(1)).wait()
        assert other.wait_counter(0, 1, 5000)
        assert target.numpy("uint8").tolist() == [5] * 4096
        assert isinstance(source, Region)


@EVERY
def test_a_removed_peer_may_be_added_again(settings: Settings) -> None:
    with ranks(2, settings) as pair:
        pair[0].call(bodies.write_signalled, 1, 4096, 3)
        pair.all(bodies.barrier_in_order, 1)
        pair[0].call(bodies.remove_and_add, 1)
        pair[0].call(bodies.place, 41, 4096)
        pair[0].call(bodies.write_signalled, 1, 4096, 1)
        assert pair[1].call(bodies.holds, 41, 4096)
        pair.all(bodies.barrier_in_order, 1)


def test_no_room_is_an_error_with_both_numbers(lone: Endpoint) -> None:
    with pytest.raises(CapacityError, match=r"'vast' needs 140737488355328 bytes, and \d+ are available \("):
        lone.region("vast", 1 << 47)


def test_a_table_full_of_finished_handles_says_so() -> None:
    """Nothing runs and nothing queues: it is the caller's own handles that fill it."""
    with Endpoint(0, 2, LOCAL, requests_max=16) as one, Endpoint(1, 2, LOCAL) as other:
        source, _ = one.region("data", 64), other.region("data", 64)
        one.add_peer(1, other.blob())
        other.add_peer(0, one.blob())
        one.start()
        other.start()
        handles: list[Request] = []

        def keep_one_more() -> None:
            handles.append(one.write(1, source, "data", timeout_ms=100))
            handles[-1].wait()

        for _ in range(12):  # a few of the sixteen may be the runtime's own, for its pulses
            keep_one_more()
        with pytest.raises(DeadlineError, match=r"at most 16 handles are kept, those of finished requests too"):
            list(iter(keep_one_more, 0))
        handles.pop().release()
        one.write(1, source, "data").wait()
