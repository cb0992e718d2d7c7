"""The `expertwire` command line: parses, then hands over to the one module that does the work, imported only then."""

from __future__ import annotations

import argparse
import errno
import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import expertwire
from expertwire.cli import streams
from expertwire.cli.report import Exit, check_path, is_stdout
from expertwire.cli.signals import Ended, ends_by_exception
from expertwire.errors import ExpertwireError, InvalidArgumentError, UnavailableError

DESCRIPTION = """\
Moves tokens between experts, over any network.

Start with `expertwire doctor` (what this machine has) and `expertwire demo` (a mixture-of-experts layer on eight ranks)."""

EPILOG = """\
exit status: 0 everything asked for was done and verified; 1 a check or a rank failed, or the output could not be written; 2 the command
line cannot be meant; 3 something asked for by name could not be run here; 130 interrupted (Ctrl-C), 143 terminated.

Every command takes --json FILE: {command, version, commit, host, config, rows: [{name, value, unit, status, …}]}. What tells rows apart
(engine, phase, bytes and so on) stands in the row beside those four; docs/use.md of the sources says what each figure is. With --json - the
file is stdout, and the tables go to stderr."""

# What argparse says, and how everything here says it: the option, its value, what it may be.
_WORDINGS = (
    (r"argument (\S+): invalid int value: (.*)", r"\1 is \2; give a whole number"),
    (r"argument (\S+): invalid float value: (.*)", r"\1 is \2; give a number"),
    (r"argument (\S+): invalid choice: (.*?) \(choose from (.*)\)", r"\1 is \2; give one of \3"),
    (r"argument (\S+): expected one argument", r"\1 needs a value: expected one argument"),
)
# What a stream says that takes no more: its reader has gone, the disk is full, and so on.
_OUTPUT_ERRORS = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})


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
    Command(
        ("simulate",),
        "expertwire.cli.simulate",
        "dispatch and combine in virtual time, on a network that is not here, beside what was published",
    ),
    Command(("bench", "ep"), "expertwire.cli.bench.ep", "time dispatch and combine, beside gloo if asked, every payload verified"),
    Command(
        ("bench", "transfer"),
        "expertwire.cli.bench.transfer",
        "transfers of ours and of other engines, alike, between fresh pairs of processes, small ones beside bulk",
    ),
    Command(
        ("bench", "proxy"),
        "expertwire.cli.bench.proxy",
        "the serving proxy before mock servers, beside nginx and aiohttp: tokens and requests for a core's second",
    ),
    Command(
        ("proxy",),
        "expertwire.cli.proxy",
        "OpenAI's HTTP API in front of prefill and decode servers of vLLM, by its kv_transfer_params",
    ),
    Command(("soak", "fabric"), "expertwire.cli.soak.fabric", "random traffic with injected faults between processes, every byte checked"),
    Command(
        ("soak", "transfer"),
        "expertwire.cli.soak.transfer",
        "random transfers between agents, some killed and started again, every byte checked",
    ),
    Command(("soak", "ep"), "expertwire.cli.soak.ep", "random dispatches and combines of both modes, every payload checked"),
)


class _Parser(argparse.ArgumentParser):
    """argparse that keeps line breaks in help and speaks our exit status."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> Any:
        for pattern, wording in _WORDINGS:
            message = re.sub(pattern, wording, message)
        self.exit(Exit.USAGE, f"expertwire: {message}\nexpertwire: `{self.prog} --help` explains each option\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (see `expertwire --help`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    status, lost = _status_of(words)
    unwritten = streams.flush()
    if (error := lost or unwritten) is None:
        return status
    _say(f"expertwire: the output could not be written: {error.strerror}")
    return status or Exit.FAILED


def _status_of(words: list[str]) -> tuple[int, OSError | None]:
    """Everything that may end a command, as an exit status and a sentence; or the error of a stream that takes no more."""
    try:
        with ends_by_exception():
            return _run(words), None
    except Ended as ended:
        return _complain(ended.word, ended.status), None
    except KeyboardInterrupt:
        return _complain("interrupted", Exit.INTERRUPTED), None
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else Exit.FAILED, None
    except InvalidArgumentError as error:
        return _complain(error, Exit.USAGE), None
    except UnavailableError as error:
        return _complain(error, Exit.SKIPPED), None
    except ExpertwireError as error:
        return _complain(error, Exit.FAILED), None
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        return Exit.FAILED, error


def _run(words: list[str]) -> int:
    command = _chosen(words)
    if command is None:
        return _overview(words)
    module = importlib.import_module(command.module)
    parser = _Parser(prog=" ".join(("expertwire", *command.words)), description=module.__doc__, epilog=EPILOG)
    module.add_arguments(parser)
    args = parser.parse_args(words[len(command.words) :])
    written = {option: getattr(args, option, None) for option in ("json", "html")}
    for option, path in written.items():
        check_path(f"--{option}", path)
    if written["html"] is not None:
        importlib.import_module("expertwire.cli.page").require_drawing()
    if len(asked := [option for option, path in written.items() if is_stdout(path)]) > 1:
        raise InvalidArgumentError(f"--{' and --'.join(asked)} are both stdout; name a file for one of them")
    with redirect_stdout(sys.stderr) if asked else nullcontext():
        return int(module.run(args))


def _say(sentence: str) -> None:
    with suppress(OSError):  # nobody can be told; the status says it
        print(sentence, file=sys.stderr, flush=True)


def _complain(what: object, status: int) -> int:
    _say(f"expertwire: {what}")
    return status


def _chosen(words: list[str]) -> Command | None:
    for command in COMMANDS:
        if tuple(words[: len(command.words)]) == command.words:
            return command
    return None


def _overview(words: list[str]) -> int:
    """Anything that names no command: help, version, or a mistake."""
    group = words[0] if words and words[0] in {command.words[0] for command in COMMANDS if len(command.words) > 1} else ""
    offered = [command for command in COMMANDS if not group or command.words[0] == group]
    width = max(len(" ".join(command.words)) for command in offered)
    listing = "\n".join(f"  {' '.join(command.words):{width}}  {command.summary}" for command in offered)
    prog = f"expertwire {group}".rstrip()
    parser = _Parser(
        prog=prog,
        usage=f"{prog} COMMAND …" if group else "expertwire [--help] [--version] COMMAND …",
        description=f"{'' if group else DESCRIPTION + chr(10) * 2}commands (each has its own --help):\n{listing}",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"expertwire {expertwire.__version__}")
    parser.parse_known_args([word for word in words if word in ("-h", "--help", "--version")])
    if not words:
        parser.print_help(sys.stderr)
        return Exit.USAGE
    names = ", ".join(" ".join(command.words) for command in offered)
    if group:
        parser.error(f"`{group}` needs a second word; there is {names}")
    parser.error(f"no command {words[0]!r}; there is {names}")
    return Exit.USAGE
