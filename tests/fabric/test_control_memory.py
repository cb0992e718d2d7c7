"""Control memory (SPEC T9): sized by arithmetic, checked when it is made, and the barrier words where no counter reaches."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from expertwire import _native
from expertwire.errors import InvalidArgumentError
from expertwire.fabric import Endpoint, Scope
from expertwire.fabric.config import Settings
from fabric import bodies
from fabric.ranks import LOCAL, TCP, ranks

BOTH = pytest.mark.parametrize("settings", [LOCAL, TCP], ids=["local", "tcp"])
COUNTERS = 96
RANKS = 3
WORD = 64  # some offset in the runtime's region


def words(endpoint: Endpoint, name: str) -> list[int]:
    """What each rank says here, by source."""
    base = endpoint.native.region_address(endpoint.native.region("runtime"))
    offsets = [_native.runtime_words(endpoint.size, source)[name] for source in range(endpoint.size)]
    return [ctypes.c_uint64.from_address(base + offset).value for offset in offsets]


def barrier_words(endpoint: Endpoint) -> list[int]:
    return words(endpoint, "barrier")


def words_that_stand(endpoint: Endpoint) -> list[list[int]]:
    """Those that change with calls alone, not with time."""
    return [words(endpoint, name) for name in ("barrier", "low_latency_call", "low_latency_told")]


def extents(endpoint: Endpoint) -> list[tuple[int, int]]:
    """(address, bytes) of the counters and of the runtime's words."""
    native = endpoint.native
    return [(native.region_address(number), native.region_bytes(number)) for number in map(native.region, ("counters", "runtime"))]


def count_everywhere(endpoint: Endpoint, peer: int, count: int) -> None:
    """All bits, at every index there is."""
    requests = [endpoint.signal(peer, 2**64 - 1, 8 * index, scope=Scope(index % 3)) for index in range(count)]
    for request in requests:
        request.wait()


def reach_beyond(endpoint: Endpoint, peer: int, count: int) -> list[str]:
    """What is said to signals and writes behind the last counter and at the runtime's own words."""
    region, said = bodies.data(endpoint), []
    for call in (
        lambda: endpoint.signal(peer, 1, 8 * count),
        lambda: endpoint.signal(peer, 1, 2**40),
        lambda: endpoint.signal(peer, 1, 2**64 - 8),
        lambda: endpoint.write(peer, region, "counters", 16, remote_offset=8 * count - 8),
        lambda: endpoint.signal(peer, 1, WORD, remote="runtime"),
        lambda: endpoint.write(peer, region, "runtime", 8, remote_offset=WORD),
        lambda: endpoint.read(peer, region, "runtime", 8),
    ):
        try:
            call()
            said.append("taken")
        except InvalidArgumentError as error:
            said.append(str(error))
    return said


@BOTH
def test_no_counter_reaches_a_barrier_word(settings: Settings) -> None:
    with ranks(RANKS, settings, counters=COUNTERS) as group:
        group.all(bodies.barrier_briefly, 10_000)
        group.all(bodies.barrier_briefly, 10_000)
        before = group.all(words_that_stand)
        assert [[sorted(said) for said in rank] for rank in before] == [[[0, 2, 2], [0, 0, 0], [0, 0, 0]]] * RANKS
        for member in group.members:
            member.ask(count_everywhere, (member.rank + 1) % RANKS, COUNTERS)
        for member in group.members:
            member.answer()
        assert group[1].call(bodies.counters, 0, COUNTERS) == [2**64 - 1] * COUNTERS
        assert group.all(words_that_stand) == before
        (counters, counters_bytes), (runtime, runtime_bytes) = group[0].call(extents)
        assert counters_bytes == 8 * COUNTERS
        assert runtime_bytes == _native.runtime_words(RANKS, 0)["bytes"]
        assert counters + counters_bytes <= runtime or runtime + runtime_bytes <= counters
        said = group[0].call(reach_beyond, 1, COUNTERS)
        assert f"counter {COUNTERS} does not exist: rank 1 was built with counters={COUNTERS}" in said[0]
        assert "does not exist" in said[1]
        assert "does not exist" in said[2]
        assert f"'counters' has {8 * COUNTERS} bytes; 16 bytes at offset {8 * COUNTERS - 8}" in said[3]
        assert all("belongs to the endpoint" in one for one in said[4:])
        group.all(bodies.barrier_briefly, 10_000)
        assert [sorted(said) for said in group.all(barrier_words)] == [[0, 3, 3]] * RANKS


@BOTH
def test_counters_cross_every_power_of_two(settings: Settings) -> None:
    """Sums pass 2^31, 2^32, 2^63 and wrap at 2^64; a wait sees each."""
    edges = [2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    with ranks(2, settings, counters=2) as pair:
        reached = 0
        for edge in edges:
            pair[0].call(add, 1, edge - reached)
            reached = edge
            assert pair[1].call(bodies.wait_counter, 1, edge)
            assert pair[1].call(bodies.counter, 1) == edge
        pair[0].call(add, 1, 2)
        assert pair[1].call(bodies.counter, 1) == 1


def add(endpoint: Endpoint, peer: int, value: int) -> None:
    endpoint.signal(peer, value, 8).wait()


def test_more_counters_than_can_be_name_both_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"counters is 16777217; it must be 0 to 16777216"):
        Endpoint(0, 1, LOCAL, counters=2**24 + 1)


LIMITED = """
import resource
from expertwire.errors import CapacityError
from expertwire.fabric import Endpoint
from expertwire.fabric.config import Settings
local = Settings(provider="local")
with Endpoint(0, 1, local) as endpoint:
    resource.setrlimit(resource.RLIMIT_{limit}, ({value}, {value}))
    try:
        {attempt}
    except CapacityError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("limit", "value", "attempt", "said"),
    [
        ("FSIZE", "1 << 20", "Endpoint(0, 1, local, counters=1 << 20)", ("fallocate", "'counters'", "8388608 bytes", "EFBIG (27")),
        ("FSIZE", "1 << 20", "endpoint.region('data', 8 << 20)", ("fallocate", "'data'", "8388608 bytes", "EFBIG (27")),
        ("NOFILE", "3", "endpoint.region('data', 8 << 20)", ("memfd_create", "'data'", "8388608 bytes", "EMFILE (24")),
    ],
    ids=["counters", "a region", "a descriptor"],
)
def test_a_failed_allocation_names_call_bytes_and_code(limit: str, value: str, attempt: str, said: tuple[str, ...]) -> None:
    program = LIMITED.format(limit=limit, value=value, attempt=attempt)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    for part in said:
        assert part in ended.stdout, ended.stdout
