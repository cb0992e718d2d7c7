"""The `expertwire` command line: parses, then hands over to the one module that does the work, imported only then."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import expertwire
from expertwire.cli.report import Exit
from expertwire.errors import ExpertwireError, InvalidArgumentError, UnavailableError

DESCRIPTION = """\
Moves tokens between experts, over any network.

Start with `expertwire doctor` (what this machine has) and `expertwire demo` (a mixture-of-experts layer on eight ranks)."""

EPILOG = """\
exit status: 0 everything asked for was done and verified; 1 a check or a rank failed; 2 the command line cannot be meant;
3 something asked for by name could not be run here; 130 interrupted.

Every command takes --json FILE: {command, version, commit, host, config, rows: [{name, value, unit, status, labels}]}."""


@dataclass(frozen=True)
class Command:
    """A word of the command line and the module that offers `add_arguments(parser)` and `run(args) -> int` for it."""

    words: tuple[str, ...]
    module: str
    summary: str


COMMANDS = (
    Command(
        ("demo",), "expertwire.cli.demo", "one mixture-of-experts layer on real text, eight ranks as two nodes, every payload verified"
    ),
    Command(
        ("doctor",),
        "expertwire.cli.doctor",
        "which libraries, providers and interfaces are here, which are chosen and why, and what is missing",
    ),
    Command(
        ("bench", "fabric"),
        "expertwire.cli.bench.fabric",
        "writes between two processes: async, its synchronous fallback and the raw ceiling, in one run",
    ),
    Command(("bench", "ep"), "expertwire.cli.bench.ep", "time dispatch and combine, beside gloo if asked, every payload verified"),
    Command(("soak", "fabric"), "expertwire.cli.soak.fabric", "random traffic with injected faults between processes, every byte checked"),
)


class _Parser(argparse.ArgumentParser):
    """argparse that keeps line breaks in help and speaks our exit status."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> Any:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n{self.prog}: --help explains each option\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `expertwire --help`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command = _chosen(words)
        if command is None:
            return _overview(words)
        module = importlib.import_module(command.module)
        parser = _Parser(prog=" ".join(("expertwire", *command.words)), description=module.__doc__, epilog=EPILOG)
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(words[len(command.words) :])))
    except KeyboardInterrupt:
        print("expertwire: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else Exit.FAILED
    except BrokenPipeError:
        return Exit.FAILED
    except InvalidArgumentError as error:
        return _complain(error, Exit.USAGE)
    except UnavailableError as error:
        return _complain(error, Exit.SKIPPED)
    except ExpertwireError as error:
        return _complain(error, Exit.FAILED)


def _complain(error: ExpertwireError, status: Exit) -> Exit:
    print(f"expertwire: {error}", file=sys.stderr)
    return status


def _chosen(words: list[str]) -> Command | None:
    for command in COMMANDS:
        if tuple(words[: len(command.words)]) == command.words:
            return command
    return None


def _overview(words: list[str]) -> int:
    """Anything that names no command: help, version, or a mistake."""
    width = max(len(" ".join(command.words)) for command in COMMANDS)
    listing = "\n".join(f"  {' '.join(command.words):{width}}  {command.summary}" for command in COMMANDS)
    parser = _Parser(
        prog="expertwire",
        usage="expertwire [--help] [--version] COMMAND …",
        description=f"{DESCRIPTION}\n\ncommands (each has its own --help):\n{listing}",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"expertwire {expertwire.__version__}")
    known, rest = parser.parse_known_args([word for word in words if word in ("-h", "--help", "--version")])
    del known, rest
    if not words:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    groups = {command.words[0] for command in COMMANDS if len(command.words) > 1}
    if words[0] in groups:
        offered = ", ".join(" ".join(command.words) for command in COMMANDS if command.words[0] == words[0])
        parser.error(f"`{words[0]}` needs a second word; there is {offered}")
    parser.error(f"no command {words[0]!r}; there is {', '.join(' '.join(command.words) for command in COMMANDS)}")
    return Exit.USAGE
