"""How ranks find each other, without a network: threads stand for ranks, each with its own door."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from expertwire.ep import bootstrap
from expertwire.ep.bootstrap import Launch, agree, launch_of, settings_for
from expertwire.ep.neighbours import Door, Neighbour
from expertwire.ep.processes import own_process
from expertwire.errors import (
    CapacityError,
    DeadlineError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    StateError,
    UnavailableError,
)
from expertwire.fabric.config import Settings
from expertwire.fabric.discover import boot_id


class Ranks:
    """`size` threads with an all_gather between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._slots: list[Any] = [None] * size

    def _all_gather(self, rank: int, mine: Any) -> list[Any]:
        self._slots[rank] = mine
        self._barrier.wait()
        answers = list(self._slots)
        self._barrier.wait()
        return answers

    def run(self, work: Callable[[Launch], Any]) -> list[Any]:
        """Each rank's result or the exception that it raised."""

        def one(rank: int) -> Any:
            try:
                return work(Launch(rank, self.size, lambda mine: self._all_gather(rank, mine)))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


def neighbour(rank: int, door: Door) -> Neighbour:
    return Neighbour(rank, own_process(boot_id()), door.name, door.secret)


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    def work(launch: Launch) -> list[int]:
        def mine() -> int:
            if launch.rank == 2:
                raise UnavailableError("no such provider here")
            return launch.rank

        return bootstrap.together(launch, mine)

    results = Ranks(4).run(work)
    assert isinstance(results[2], UnavailableError)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], StateError)
        assert f"rank {rank}: no Buffer, because rank 2" in str(results[rank])
        assert "UnavailableError: no such provider here" in str(results[rank])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"version": "0.2", "EXPERTWIRE_PROVIDER": "tcp"}, "disagree on version: rank 0 has '0.1', rank 1 has '0.2'"),
        ({"version": "0.1", "EXPERTWIRE_PROVIDER": "shm"}, "disagree on EXPERTWIRE_PROVIDER: rank 0 has 'tcp', rank 1 has 'shm'"),
        ({"version": "0.1"}, "disagree on EXPERTWIRE_PROVIDER: rank 0 has 'tcp', rank 1 has 'absent'"),
        ({"version": "0.1", "EXPERTWIRE_PROVIDER": "tcp", "new": "1"}, "disagree on new: rank 0 has 'absent', rank 1 has '1'"),
    ],
)
def test_a_difference_names_ranks_key_and_values(other: dict[str, str], message: str) -> None:
    facts = {"version": "0.1", "EXPERTWIRE_PROVIDER": "tcp"}
    agree(0, [facts, dict(facts)])
    with pytest.raises(MismatchError, match=message):
        agree(5, [facts, other])


def test_settings_and_tables_are_compared_before_anything_is_made() -> None:
    settings = Settings()

    def unused(*_: object) -> Any:
        raise AssertionError("built though the ranks disagree")

    def with_settings(launch: Launch) -> Any:
        mine = replace(settings, liveness="heartbeat") if launch.rank == 1 else settings
        return bootstrap.connect(launch, mine, None, {}, unused, unused)

    for result in Ranks(3).run(with_settings):
        assert isinstance(result, MismatchError)
        assert "EXPERTWIRE_LIVENESS: rank 0 has 'auto', rank 1 has 'heartbeat'" in str(result)

    def with_tables(launch: Launch) -> Any:
        return bootstrap.connect(launch, settings, [0, 0, launch.rank // 2], {}, unused, unused)

    for result in Ranks(3).run(with_tables):
        assert isinstance(result, MismatchError)
        assert "node table: rank 0 has '(0, 0, 0)', rank 2 has '(0, 0, 1)'" in str(result)


def test_a_table_of_the_wrong_length_is_refused_everywhere() -> None:
    def work(launch: Launch) -> Any:
        return bootstrap.connect(launch, Settings(), [0, 1], {}, lambda *_: pytest.fail("built"), lambda _: 0)

    for result in Ranks(3).run(work):
        assert isinstance(result, InvalidArgumentError)
        assert "node_of has 2 entries ([0, 1]); the group has 3 ranks" in str(result)


def test_ranks_that_share_memory_are_counted_together_before_any_allocates() -> None:
    each = int(0.6 * bootstrap.memory_of(0).available_bytes)  # one could have it, two would get somebody killed

    def work(launch: Launch) -> Any:
        return bootstrap.connect(launch, Settings(provider="local"), [0, 1], {}, lambda *_: pytest.fail("built"), lambda _: each)

    for rank, result in enumerate(Ranks(2).run(work)):
        assert isinstance(result, CapacityError)
        assert f"rank {rank}: no Buffer, because the 2 ranks that share one memory (ranks [0, 1]) need {2 * each} bytes" in str(result)
        assert "are available (" in str(result)


def test_only_ranks_of_one_memory_are_counted_together() -> None:
    here, there = bootstrap.Memory(6, 10, ("a",), "A"), bootstrap.Memory(7, 10, ("b",), "B")
    bootstrap.check_memory(0, [here, there])
    with pytest.raises(CapacityError, match=r"ranks \[1, 2\]\) need 14 bytes .* rank 1 the most with 7, and 10 are available \(B\)"):
        bootstrap.check_memory(0, [here, there, there])


def test_a_provider_by_name_turns_the_same_host_path_off() -> None:
    launch = Launch(0, 3, lambda mine: [mine] * 3)
    assert bootstrap._given_table(launch, Settings(provider="tcp"), None) == (0, 1, 2)
    assert bootstrap._given_table(launch, Settings(provider="tcp"), ["a", "a", "b"]) == (0, 0, 1)
    assert bootstrap._given_table(launch, Settings(provider="tcp", node_of=(0, 1, 1)), None) == (0, 1, 1)
    assert bootstrap._given_table(launch, Settings(), None) is None


def test_local_alone_does_not_serve_several_hosts() -> None:
    with pytest.raises(UnavailableError, match="on 2 hosts and the provider is 'local'"):
        bootstrap._choose_provider(Settings(provider="local"), (0, 1), 2)
    assert bootstrap._choose_provider(Settings(provider="local"), (0, 1), 1) == "local"
    assert bootstrap._choose_provider(Settings(), (0, 0), 1) == "local"


def test_doors_prove_shared_memory_and_pass_descriptors() -> None:
    read, write = os.pipe()
    with Door() as one, Door() as other:
        assert other.prove(neighbour(0, one))
        one.open_regions({"control": read, "data": write})
        with other.regions_of(neighbour(0, one)) as descriptors:
            assert list(descriptors) == ["control", "data"]
            assert os.fstat(descriptors["control"]).st_ino == os.fstat(read).st_ino
            os.write(descriptors["data"], b"x")
        assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)


def test_a_door_answers_only_those_who_know_its_secret() -> None:
    with Door() as one, Door() as other:
        stranger = replace(neighbour(0, one), secret=bytes(32))
        with pytest.raises(UnavailableError, match="rank 0 shut its door without an answer"):
            other.prove(stranger)
        with pytest.raises(UnavailableError, match="rank 0 did not pass its memory's descriptors"), other.regions_of(stranger):
            pass
        absent = replace(neighbour(0, one), door="expertwire-nobody")
        assert not other.prove(absent)


def test_a_closed_door_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Door() as door:
        gone = neighbour(0, door)
    with Door() as other:
        assert not other.prove(gone)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert "expertwire door" not in {thread.name for thread in threading.enumerate()}


def test_what_can_be_a_group() -> None:
    communicator = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 3, allgather=lambda mine: [mine] * 3)  # mpi4py's names
    launch = launch_of(None, communicator)
    assert (launch.rank, launch.size, launch.all_gather("a")) == (1, 3, ["a", "a", "a"])
    with pytest.raises(InvalidTypeError, match=r"comm is a object without Get_rank\(\)"):
        launch_of(None, object())
    with pytest.raises(InvalidTypeError, match=r"group is a str; it must be a torch\.distributed ProcessGroup"):
        launch_of("world")
    with pytest.raises(InvalidArgumentError, match="group has rank 3 of 3"):
        launch_of(Launch(3, 3, lambda mine: [mine]))


def test_settings_take_what_the_caller_gave() -> None:
    settings = settings_for("tcp", 1234)
    assert (settings.provider, settings.timeout_ms, settings.hard_timeout()) == ("tcp", 1234, 2468)
    with pytest.raises(InvalidTypeError, match="provider must be a str, got 3"):
        settings_for(3, None)  # type: ignore[arg-type]


class Deaf:
    """A neighbour that has a door and never answers, as one that was stopped: the kernel takes the knock."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"\0expertwire-deaf-%d" % os.getpid())
        self._socket.listen(8)
        self.neighbour = Neighbour(3, own_process(boot_id()), f"expertwire-deaf-{os.getpid()}", bytes(32))

    def __enter__(self) -> Neighbour:
        return self.neighbour

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_neighbours_that_have_stopped_share_one_deadline_and_split_no_node() -> None:
    with Door() as mine, Deaf() as deaf:
        begin = time.monotonic()
        for knock in (lambda: mine.prove(deaf, begin + 0.3), lambda: mine.prove(deaf, begin + 0.3)):
            with pytest.raises(DeadlineError, match="rank 3 did not answer at its door in time"):
                knock()
        with (
            pytest.raises(UnavailableError, match=r"rank 3 did not pass its memory's descriptors.*timed out"),
            mine.regions_of(deaf, begin),
        ):
            pass
        assert time.monotonic() - begin < 5


def test_a_door_closes_with_a_visitor_that_has_stopped() -> None:
    with Door() as door:
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        visitor.connect("\0" + door.name)
        visitor.sendall(door.secret[:5])
        while door._visitor is None:
            time.sleep(0.001)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5, "its patience is 30 s"
    visitor.close()


def test_a_neighbours_patience_is_what_is_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stops once its door is known keeps the others for the deadline of a Buffer, and no step beyond that of a shrink."""
    asked: list[float] = []

    class Noted(Door):
        def prove(self, neighbour: Neighbour, until_s: float | None = None) -> bool:
            assert until_s is not None
            asked.append(until_s - time.monotonic())
            return super().prove(neighbour, until_s)

    def far_enough(*_: object) -> Any:
        raise UnavailableError("far enough")

    def work(launch: Launch) -> Any:
        launch = replace(launch, until_s=time.monotonic() + (1 if launch.rank == 1 else 50))
        return bootstrap.connect(launch, Settings(provider="local", timeout_ms=9000), [0, 0, 0], {}, far_enough, lambda _: 0)

    monkeypatch.setattr(bootstrap, "Door", Noted)
    assert all("far enough" in str(error) for error in Ranks(3).run(work))
    short, *longer = sorted(asked)
    assert short <= 1
    assert len(longer) == 2
    assert all(1 < one <= 9 for one in longer)
