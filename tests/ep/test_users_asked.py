"""What users of the peers asked for: each is right here, and a test says so. Those that had none are in this file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ep import users
from ep.cases import Case
from ep.test_exchange_matrix import check
from expertwire import _simulation
from expertwire.ep import Buffer
from expertwire.ep.cpu.pool import Extent, Extents
from expertwire.fabric.native import Exchange
from harness import World, forget_buffers

MATRIX = "ep/test_exchange_matrix.py::test_every_shape_as_the_oracle_says"
HERE = "ep/test_users_asked.py::test_"
# What was asked, and the test of it.
ASKED = {
    "a rank with zero tokens, all ranks with zero": MATRIX,
    "rows that are all -1": MATRIX,
    "duplicated top-k ids": MATRIX,
    "top-k of 9, 16, 22": MATRIX,
    "hidden 2880": MATRIX,
    "hidden 3584, 4608": HERE + "hidden_sizes_and_nodes_of_six",
    "inputs that are not contiguous": MATRIX,
    "int32 ids": MATRIX,
    "experts not divisible by ranks": MATRIX,
    "1, 2, 3, 4 ranks a node, 12 ranks": MATRIX,
    "6 ranks a node": HERE + "hidden_sizes_and_nodes_of_six",
    "24 and 40 ranks": HERE + "numbers_of_ranks",
    "more than 4 GiB, more than 32 GiB": HERE + "offsets_beyond_32_bits",
    "more than 4 GiB, real": HERE + "rows_beyond_four_gib",
    "a clear error with both numbers": HERE + "what_memory_there_is_not",
    "two buffers in one process": "ep/test_sharing.py::test_teardown_in_another_order_on_each_rank",
    "two groups in one process": HERE + "two_groups",
    "two jobs of two users on one host": HERE + "two_users",
    "a timeout that says what is missing": "ep/test_failures.py::test_a_deadline_says_who_is_missing",
    "a peer that died keeps nobody": "ep/test_failures.py::test_a_killed_rank_is_named_by_all_others",
    "no GIL held while waiting": HERE + "the_gil",
    "idle progress threads": "fabric/test_runtime.py::test_an_idle_endpoint_costs_next_to_nothing",
    "the launcher's cpuset": HERE + "the_cpuset",
    "handles that live on beside other traffic": "ep/test_sharing.py::test_results_live_until_dropped",
    "two threads on one Buffer": "ep/test_sharing.py::test_two_batches_interleave",
    "teardown in any order, and twice": "ep/test_sharing.py::test_teardown_in_another_order_on_each_rank",
    "exit without destroy": "ep/test_sharing.py::test_the_interpreter_ends_in_silence",
}


@pytest.fixture(scope="module")
def ranks(ranks_of_session: World) -> Iterator[World]:
    """The session's ranks; what these tests leave on them is given back once."""
    yield ranks_of_session
    ranks_of_session.forget()


def test_each_has_a_test() -> None:
    tests = Path(__file__).parents[1]
    for what, test in ASKED.items():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (tests / path).read_text(), what


def test_hidden_sizes_and_nodes_of_six(ranks: World) -> None:
    case = Case((0,) * 6 + (1,) * 6, (3, 0, 5) * 4, hidden=3584, experts=24, topk=4, seed=31)
    check(ranks, case)
    check(ranks, replace(case, hidden=4608, topk=9, tokens=(2,) * 12, seed=32))


@pytest.mark.parametrize(("number", "a_node"), [(12, 6), (24, 8), (40, 8), (40, 4)])
def test_numbers_of_ranks(number: int, a_node: int) -> None:
    """In virtual time, every byte against the oracle there."""
    for combine in (False, True):
        options = {"ranks": number, "ranks_per_node": a_node, "experts": 4 * number, "topk": 8, "row_bytes": 64, "tokens": 24}
        assert _simulation.run_exchange_timed({**options, "combine": combine})["error"] == ""


def test_offsets_beyond_32_bits() -> None:
    """By arithmetic: nothing is allocated."""
    for rows in (300_000, 3_000_000):  # 4.3 GB and 43 GB of rows of 7168 bf16
        row_bytes = 2 * 7168
        needed = Exchange.extent_bytes("dispatch", rows, row_bytes, 8, 8, True)
        assert rows * row_bytes < needed < rows * (row_bytes + 8 * 12 + 4) + (1 << 20)
        plan = Buffer.memory_plan([0, 0, 1, 1], num_max_recv_tokens=rows, hidden=7168, num_topk=8)
        assert all(one.data_bytes > needed + rows * row_bytes for one in plan)
        extents = Extents(2 * needed)
        extents.take(Extent(needed, needed))
        extents.give(Extent(needed + (1 << 32), 4096))
        assert extents.free == (Extent(0, needed), Extent(needed + (1 << 32), 4096))


def test_rows_beyond_four_gib(ranks: World, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--large"):
        pytest.skip("takes 9 GiB of memory: give --large")
    beyond = (4 << 30) + (1 << 20)
    for offered in ranks.run(2, users.far_rows, (4 << 30) + (64 << 20), beyond, timeout_s=170):
        assert offered == [beyond, beyond]


def test_what_memory_there_is_not(ranks: World) -> None:
    for kind, _, message in ranks.run(2, users.too_much):
        assert kind == "CapacityError"
        numbers = re.search(r"need (\d+) bytes for their regions, .* and (\d+) are available", message)
        assert numbers is not None, message
        assert int(numbers[1]) > 2 << 46 > int(numbers[2])


def test_two_groups(ranks: World) -> None:
    assert len(ranks.run(2, forget_buffers)) == 2  # makes the group of two
    assert ranks.run(4, users.two_groups) == [[4, 2], [4, 2], [4], [4]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users() -> None:
    ranks = World(4)
    try:
        assert ranks.run(4, users.two_users) == [0, 0, users.NOBODY, users.NOBODY]
    finally:
        ranks.close()


def test_the_gil(ranks: World) -> None:
    assert ranks.run(2, users.nobody_holds_the_gil) == [20_000, 20_000]


def test_the_cpuset(ranks: World) -> None:
    for came in ranks.run(2, users.cpuset):
        assert min(came) >= 1, "a progress thread at least"
