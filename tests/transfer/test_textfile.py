"""An agent's counters as a file."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from expertwire.compat.nixl import nixl_agent, nixlInvalidParamError
from expertwire.errors import InvalidArgumentError
from expertwire.transfer import TextFile

SOON_S = 20


class Counted:
    """Gives a text, and says when it was asked for one."""

    def __init__(self, text: str = "one 1\n") -> None:
        self.text, self.asked = text, threading.Semaphore(0)

    def __call__(self) -> str:
        self.asked.release()
        return self.text

    def wait(self, times: int) -> None:
        """Until it was asked so often from now on."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self.asked.acquire(timeout=SOON_S)


def test_it_is_written_at_once_while_it_changes_and_at_the_end(tmp_path: Path) -> None:
    counted = Counted()
    file = TextFile(str(tmp_path), "a/b é", counted, period_s=0.001)
    assert file.path == tmp_path / f"expertwire_a%2Fb%20%C3%A9_{os.getpid()}.prom"
    assert file.path.read_text() == "one 1\n"
    first = file.path.stat().st_ino
    counted.wait(3)
    assert file.path.stat().st_ino == first, "the same text is not written again"
    counted.text = "one 2\n"
    counted.wait(3)
    assert file.path.read_text() == "one 2\n"
    file.close()
    slow = TextFile(str(tmp_path), "slow", counted, period_s=3600)
    counted.text = "one 3\n"
    slow.close()
    slow.close()
    assert slow.path.read_text() == "one 3\n"
    assert {path.suffix for path in tmp_path.iterdir()} == {".prom"}


def test_a_folder_that_takes_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"EXPERTWIRE_TELEMETRY_FOLDER='.*none' takes no file \(No such file or directory\): give"
    ):
        TextFile(str(tmp_path / "none"), "a", Counted())


def test_what_cannot_be_written_any_more_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    counted = Counted()
    with caplog.at_level(logging.WARNING):
        file = TextFile(str(folder), "a", counted, period_s=0.001)
        file.path.unlink()
        folder.rmdir()
        counted.text = "one 2\n"
        counted.wait(5)
        folder.mkdir()
        file.close()
    assert [record.getMessage().partition(" cannot")[0] for record in caplog.records] == [str(file.path)]
    assert file.path.read_text() == "one 2\n"


def test_agents_write_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTWIRE_PROVIDER", "local")
    monkeypatch.setenv("EXPERTWIRE_TELEMETRY_FOLDER", str(tmp_path))
    with nixl_agent("counted") as agent:
        text = agent.prometheus()
    assert (tmp_path / f"expertwire_counted_{os.getpid()}.prom").read_text() == text
    monkeypatch.setenv("EXPERTWIRE_TELEMETRY_FOLDER", str(tmp_path / "none"))
    with pytest.raises(nixlInvalidParamError, match="takes no file"):
        nixl_agent("uncounted")
    assert not [thread for thread in threading.enumerate() if thread.name == "expertwire-telemetry"]
