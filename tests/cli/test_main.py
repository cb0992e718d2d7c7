"""The command line: help that names what exists, and an exit status for each kind of mistake."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import expertwire
from cli.test_commands import environment
from expertwire.cli.main import COMMANDS, main
from expertwire.cli.report import Exit
from expertwire.errors import CapacityError, InvalidArgumentError, UnavailableError


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words))
def test_every_command_exists_and_has_help(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.words, "--help"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "--json FILE" in shown
    assert "exit status" in shown
    assert f"expertwire {' '.join(command.words)}" in shown


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == Exit.OK
    shown = capsys.readouterr().out
    assert all(" ".join(command.words) in shown for command in COMMANDS)
    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"expertwire {expertwire.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["bench"], "needs a second word"),
        (["frobnicate"], "no command 'frobnicate'"),
        (["bench", "ep", "--tokens"], "expected one argument"),
        (["bench", "ep", "--ranks", "x"], "expertwire: --ranks is 'x'; give a whole number"),
        (["bench", "ep", "--loop", "x"], "expertwire: --loop is 'x'; give a number"),
        (["bench", "ep", "--routing", "x"], "expertwire: --routing is 'x'; give one of 'uniform', 'skewed'"),
        (["bench", "ep", "--no-such"], "unrecognized arguments"),
        (["bench", "ep", "--iter", "3"], "unrecognized arguments"),
        (["bench", "ep", "--tokens", "-1"], "--tokens is -1; the least is 0"),
        (["bench", "ep", "--tokens=1,x"], "--tokens is '1,x'"),
        (["bench", "ep", "--tokens=1,2,3", "--ranks=2"], "--tokens names 3 counts; there are 2 ranks"),
        (["bench", "ep", "--ranks", "0"], "--ranks is 0; the least is 1"),
        (["bench", "ep", "--topk", "300"], "--topk is 300"),
        (["bench", "ep", "--iterations", "0"], "--iterations is 0; the least is 1"),
        (["demo", "--tokens", "0"], "--tokens is 0; the least is 1"),
        (["demo", "--text", "/nowhere/at/all"], "--text /nowhere/at/all cannot be read"),
        (["demo", "--routing", "/nowhere/at/all.npz", "--tokens", "1"], "cannot be read as an .npz file"),
    ],
)
def test_mistakes_are_named_and_are_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == Exit.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--ranks", "0"],
        ["demo", "--text", "/nowhere"],
        ["demo", "--routing", "/nowhere"],
        ["bench", "ep", "--hidden", "0"],
        ["bench", "ep", "--loop", "0"],
        ["bench", "ep", "--loop", "1", "--shape", "quick"],
        ["bench", "fabric", "--window", "0"],
        ["soak", "fabric", "--ranks", "1"],
        ["bench", "--help"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_found_without_loading_torch(words: list[str]) -> None:
    script = "import sys; from expertwire.cli.main import main; code = main(sys.argv[1:]); sys.exit(99 if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, timeout=100, check=False, env=environment())
    assert done.returncode == (Exit.OK if "--help" in words else Exit.USAGE), done.stderr


def test_a_group_of_commands_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "bench ep" in shown
    assert "bench fabric" in shown
    assert "soak fabric" not in shown


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (None, Exit.OK),
        (InvalidArgumentError("no"), Exit.USAGE),
        (UnavailableError("no"), Exit.SKIPPED),
        (CapacityError("no"), Exit.FAILED),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
    ],
)
def test_exceptions_become_exit_statuses(raised: BaseException | None, status: Exit, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("stub", "A command.")

    def run(args: argparse.Namespace) -> int:
        if raised is not None:
            raise raised
        return Exit.OK

    stub.run = run
    stub.add_arguments = lambda parser: None
    monkeypatch.setattr(importlib, "import_module", lambda name: stub)
    assert main(["demo"]) == status
