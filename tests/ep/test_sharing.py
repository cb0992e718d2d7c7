"""Results that live on, threads, forks, and teardown in every order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ep import odd, overlap, work
from harness import World


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_results_live_until_dropped(world: World, node_of: tuple[int, ...]) -> None:
    for views, copies, free in world.run(2, work.held_results, node_of):
        assert views >= 1
        assert copies >= 1
        assert views + copies == 12
        assert free == 256 << 10


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_two_batches_interleave(world: World, node_of: tuple[int, ...]) -> None:
    assert world.run(2, work.two_batches, node_of) == [24, 24]


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_two_buffers_of_two_threads(world: World, node_of: tuple[int, ...]) -> None:
    assert world.run(2, overlap.two_buffers, node_of) == [16, 16]


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_a_wait_holds_up_no_other_buffer(world: World, node_of: tuple[int, ...]) -> None:
    assert all(world.run(3, overlap.waits_beside, node_of))


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_handles_of_every_kind_live_beside_each_other(world: World, node_of: tuple[int, ...]) -> None:
    assert all(world.run(3, overlap.mixed_batches, node_of))


def test_threads_are_serialised(world: World) -> None:
    assert world.run(1, work.crowd) == [6]


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_a_forked_child_is_refused_and_harms_nothing(world: World, node_of: tuple[int, ...]) -> None:
    for status, said in world.run(2, work.forked, node_of):
        assert status == 0
        lines = said.splitlines()
        assert len(lines) == 2
        assert all("forked child" in line for line in lines)


@pytest.mark.parametrize("node_of", [(0, 0, 0), (0, 0, 1)], ids=str)
def test_teardown_in_another_order_on_each_rank(world: World, node_of: tuple[int, ...]) -> None:
    assert max(world.run(3, work.crossed_teardown, node_of)) < 6


@pytest.mark.parametrize("node_of", [(0, 0), (0, 1)], ids=str)
def test_a_signal_handler_within_a_call_can_destroy(world: World, node_of: tuple[int, ...]) -> None:
    out = world.run(2, odd.called_within, node_of, "destroy")[0]
    assert "error" not in out
    assert out["took_s"] < 10, "it waits for nothing, least of all for the call that it interrupts"
    assert out["closed"], "released as soon as that call ends"
    assert out["left_s"] < 10
    assert "destroyed" in out["later"][2]
    world.run(2, odd.end_of_called_within)


def test_a_signal_handler_within_a_call_can_do_nothing_else(world: World) -> None:
    out = world.run(2, odd.called_within, (0, 1), "statistics")[0]
    assert out["error"][0] == "StateError"
    assert "statistics was called within dispatch of the same thread" in out["error"][2]
    assert out["took_s"] < 10
    world.run(2, odd.end_of_called_within)


ENDINGS = {
    "never destroyed": "keep = (buffer, dispatch(buffer, rank))",
    "destroyed, results kept": "keep = dispatch(buffer, rank); buffer.destroy(); keep[0].add_(1)",
    "dropped, results kept": "keep = dispatch(buffer, rank); del buffer; keep[0].add_(1)",
    "one destroys, one does not": "keep = (buffer, dispatch(buffer, rank)); buffer.destroy() if rank else None",
    "failed": "keep = buffer; rank or print(caught(lambda: dispatch(buffer, rank))[0])",
}
# One interpreter, which has torch, forks two ranks for each ending; each runs to the end of the script, as one of its own would.
SCRIPT = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import expertwire.ep.cpu.backend
from expertwire.ep import Buffer
from ep.work import caught, dispatch, round_trip
directory, endings, rank, statuses = sys.argv[2], json.loads(sys.argv[3]), None, []
for number, (nodes, ending) in enumerate(endings):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    if child == 0:
        break
    statuses.append([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children])
if child == 0:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{directory}/{number}.{rank}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/{number}.store", 2), rank=rank, world_size=2)
    node_of = [int(node) for node in nodes]
    buffer = Buffer(dist.group.WORLD, 4 << 20, node_of=node_of, timeout_ms=20_000, explicitly_destroy=bool(rank))
    round_trip(buffer, rank)
    dist.barrier()
    dist.destroy_process_group()
    exec(ending)
else:
    print(json.dumps(statuses))
"""


def test_the_interpreter_ends_in_silence(tmp_path: Path) -> None:
    given = [("00" if name == "dropped, results kept" else "01", ending) for name, ending in ENDINGS.items()]
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent.parent), str(tmp_path), json.dumps(given)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, errors = running.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # ranks of one that has not ended
    assert (running.returncode, errors) == (0, "")
    for number, (name, statuses) in enumerate(zip(ENDINGS, json.loads(out), strict=True)):
        for rank, status in enumerate(statuses):
            said, error = ((tmp_path / f"{number}.{rank}.{stream}").read_text() for stream in ("out", "err"))
            assert (status, error) == (0, ""), f"rank {rank}, {name}"
            if name == "failed" and rank == 0:
                assert said.strip() in ("DeadlineError", "PeerError")
            else:
                assert said == "", f"rank {rank}, {name}"
