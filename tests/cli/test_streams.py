"""Where the output goes: terminals that lack characters, full disks, readers that leave, narrow pipes, and a file that is stdout."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_commands import environment
from expertwire.cli import streams
from expertwire.cli.main import main
from expertwire.cli.progress import RankProgress
from expertwire.cli.report import Exit, Report, check_path, options, terminal
from expertwire.errors import ExpertwireError, InvalidArgumentError

ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
# A command that has measured: a table with a file, as every command ends.
SCRIPT = """
import argparse, sys
from types import ModuleType
from expertwire.cli import main as cli
from expertwire.cli.report import Report, terminal
def run(args):
    report = Report("stub", {})
    report.add("dispatch_us", 12.5, "µs", engine="×")
    report.write(args.json)
    terminal().print(report.table("≥ 8 ranks → two nodes…"))
    return report.exit_status()
stub = ModuleType("stub", "A command…")
stub.run = run
from pathlib import Path
stub.add_arguments = lambda parser: parser.add_argument("--json", type=Path)
sys.modules["stub"] = stub
cli.COMMANDS = (cli.Command(("demo",), "stub", "a stub…"),)
sys.exit(cli.main())
"""


class Stub:
    """Runs the script as a process."""

    def __init__(self, script: Path) -> None:
        self.script = script

    def __call__(self, *words: str, env: dict[str, str] | None = None, out: int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, str(self.script), "demo", *words]
        whole = {**environment(), **(env or {})}
        return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=100, check=False, env=whole)


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    script = tmp_path / "stub.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return Stub(script)


@pytest.mark.parametrize("env", [ASCII, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}], ids=["C", "ascii", "latin-1"])
def test_an_encoding_that_lacks_our_characters_stops_nothing(env: dict[str, str], tmp_path: Path, stub: Stub) -> None:
    out = tmp_path / "out.json"
    done = stub("--json", str(out), env=env)
    assert (done.returncode, done.stderr) == (Exit.OK, b"")
    assert b">= 8 ranks -> two nodes..." in done.stdout
    assert b"dispatch_us" in done.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["unit"] == "µs"
    assert stub("--help", env=env).returncode == Exit.OK


def test_every_character_has_a_spelling_or_a_question_mark() -> None:
    streams.prepare()
    assert "3 × 2 µs − 雪".encode("ascii", errors="expertwire.spell") == b"3 x 2 us - ?"


def test_a_full_disk_is_one_sentence_and_a_failure(tmp_path: Path, stub: Stub) -> None:
    out = tmp_path / "out.json"
    with open("/dev/full", "wb") as full:
        done = stub("--json", str(out), out=full.fileno())
    assert done.returncode == Exit.FAILED
    assert done.stderr == b"expertwire: the output could not be written: No space left on device\n"
    assert json.loads(out.read_text())["rows"]


def test_a_reader_that_has_gone_is_one_sentence_and_a_failure(tmp_path: Path, stub: Stub) -> None:
    out = tmp_path / "out.json"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = stub("--json", str(out), out=writer)
    finally:
        os.close(writer)
    assert done.returncode == Exit.FAILED
    assert done.stderr == b"expertwire: the output could not be written: Broken pipe\n"
    assert json.loads(out.read_text())["rows"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_a_file_that_is_stdout_has_stdout_for_itself(name: str, stub: Stub) -> None:
    device = Path("/dev/stdout").lstat()
    done = stub("--json", name)
    assert done.returncode == Exit.OK
    assert json.loads(done.stdout)["rows"][0]["value"] == 12.5
    assert b"dispatch_us" in done.stderr
    assert Path("/dev/stdout").lstat().st_ino == device.st_ino, "not replaced by a file"


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = terminal().width
    monkeypatch.setenv("COLUMNS", "61")
    assert (wide >= 80, terminal().width) == (True, 61)


def test_progress_is_plain_lines_where_nobody_can_see_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with RankProgress(2) as progress:
        progress.update(0, "dispatch", 1, 1)
        progress.update(1, "dispatch", 1, 1)
    assert capsys.readouterr().err.splitlines()[0].endswith("s] dispatch")


@pytest.mark.parametrize("name", [".", "no such directory/out.json", "/proc/out.json/out.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match="--json is"):
        check_path("--json", Path(name))
    assert main(["doctor", "--json", name]) == Exit.USAGE
    assert "--json is" in capsys.readouterr().err


def test_a_file_that_fails_all_the_same_is_named(tmp_path: Path) -> None:
    report = Report("stub", {})
    with pytest.raises(ExpertwireError, match="--json /dev/full could not be written: No space left"):
        report.write(Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


def test_the_options_are_recorded_as_given() -> None:
    args = argparse.Namespace(smoke=True, json=Path("f"), ranks=8, provider=None)
    assert options(args) == {"json": "f", "provider": None, "ranks": 8, "smoke": True}
