"""The launcher: results by rank, failures with a name, and no process left behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli import hanging, targets
from expertwire.cli.launch import RankError, launch
from expertwire.errors import DeadlineError, InvalidArgumentError

TESTS = Path(__file__).resolve().parents[1]
GONE_S = 60.0


class Watch:
    """Holds pidfds of ranks that reported their pid as a progress stage."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def __call__(self, rank: int, what: str, done: int, total: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has died since
            self.descriptors.append(os.pidfd_open(int(what)))

    def assert_gone(self) -> None:
        deadline = time.monotonic() + GONE_S
        for descriptor in self.descriptors:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            assert ready, "a rank outlived its launch"


def test_results_come_by_rank() -> None:
    seen: list[tuple[int, str, int, int]] = []
    results = launch(targets.add_up, (10,), 3, on_progress=lambda *what: seen.append(what), timeout_s=60)
    assert results == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]
    assert sorted(seen) == [(rank, "adding", 1, 1) for rank in range(3)]


def test_a_rank_that_raises_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed: ArithmeticError: rank 1 cannot go on") as caught:
        launch(targets.fail_on, (1,), 3, timeout_s=60)
    assert caught.value.rank == 1
    assert "in fail_on" in str(caught.value)


def test_a_refused_argument_keeps_its_class() -> None:
    with pytest.raises(InvalidArgumentError, match="topk is 9; the limit is 8"):
        launch(targets.refuse, (), 2, timeout_s=60)


def test_the_rank_with_a_reason_of_its_own_is_blamed() -> None:
    with pytest.raises(RankError, match="rank 2 failed: ArithmeticError: the real reason") as caught:
        launch(targets.blame, (2,), 3, timeout_s=60)
    assert caught.value.rank == 2


def test_a_killed_rank_is_named_and_the_others_are_ended() -> None:
    watch = Watch()
    with pytest.raises(RankError, match="rank 1 failed: the process ended with exit code -9") as caught:
        launch(targets.die_on, (1,), 3, on_progress=watch, timeout_s=60)
    assert caught.value.rank == 1
    watch.assert_gone()


def test_a_hanging_rank_is_ended_at_the_deadline() -> None:
    watch = Watch()
    with pytest.raises(DeadlineError, match=r"ranks \[0, 1\] have not returned within 8 s"):
        launch(hanging.hang, (), 2, on_progress=watch, timeout_s=8)  # beside other tests, a rank may take seconds to begin
    assert len(watch.descriptors) == 2
    watch.assert_gone()


SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from cli import hanging
from expertwire.cli import main as cli
from expertwire.cli.launch import launch
if __name__ == "__main__":
    cli._chosen = lambda words: launch(hanging.hang, (), 2, on_progress=lambda rank, what, done, total: print(what, flush=True))
    sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGKILL])
def test_no_rank_outlives_its_launcher(how: signal.Signals, tmp_path: Path, scratch: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": str(scratch)}
    launcher = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    watch = Watch()
    try:
        assert launcher.stdout is not None
        for _ in range(2):
            watch(0, launcher.stdout.readline(), 1, 1)
        launcher.send_signal(how)
        _, errors = launcher.communicate(timeout=GONE_S)
    finally:
        launcher.kill()
    watch.assert_gone()
    if how == signal.SIGINT:
        assert launcher.returncode == 130
        assert errors.strip() == "expertwire: interrupted"
    if how in (signal.SIGTERM, signal.SIGHUP):
        assert launcher.returncode == 128 + how
        assert errors.strip() == f"expertwire: {'terminated' if how == signal.SIGTERM else 'hung up'}"
        assert list(scratch.glob("expertwire-*")) == [], "nor a file"
