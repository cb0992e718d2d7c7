"""What a command found: rows of {name, value, unit, status, …labels}, their JSON file, their table, and the exit status they mean."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import expertwire
from expertwire.errors import ExpertwireError, InvalidArgumentError

if TYPE_CHECKING:
    import argparse

    from rich.console import Console
    from rich.table import Table

TABLE_WIDTH = 120
Label = str | int | float | bool
STDOUT_NAMES = frozenset({"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})


class Exit(IntEnum):
    """The exit status of every command."""

    OK = 0  # everything asked for was done and verified
    FAILED = 1  # a check failed, or a rank did
    USAGE = 2  # the command line cannot be meant
    SKIPPED = 3  # something asked for by name could not be run here
    INTERRUPTED = 130  # Ctrl-C, as a shell reports it
    TERMINATED = 143  # SIGTERM, as a shell reports it


class RowStatus(StrEnum):
    """How a row came to be."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Row:
    """One figure. A skipped row has no value and a label `why`."""

    name: str
    value: float | None
    unit: str = ""
    status: RowStatus = RowStatus.OK
    labels: dict[str, Label] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the file: labels beside the four fixed keys."""
        return {"name": self.name, "value": self.value, "unit": self.unit, "status": self.status.value, **self.labels}


@dataclass
class Report:
    """The rows of one run of a command, and what they were measured on."""

    command: str
    config: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, value: float | None, unit: str = "", status: RowStatus = RowStatus.OK, **labels: Label) -> None:
        """Append one row."""
        self.rows.append(Row(name, value, unit, status, labels))

    def tell_what_is_not_ok(self) -> None:
        """On stderr, a line for each row of an engine that failed or was skipped, and why."""
        for row in self.rows:
            if row.status is not RowStatus.OK:
                print(f"{row.labels.get('engine')}: {row.name} {row.status.value}: {row.labels.get('why', '')}", file=sys.stderr)

    def exit_status(self) -> Exit:
        """FAILED before SKIPPED before OK; a run without rows has verified nothing, so it is FAILED."""
        found = {row.status for row in self.rows}
        if RowStatus.FAILED in found or not found:
            return Exit.FAILED
        return Exit.SKIPPED if RowStatus.SKIPPED in found else Exit.OK

    def as_json(self) -> dict[str, Any]:
        """What `--json FILE` writes."""
        return {
            "command": self.command,
            "version": expertwire.__version__,
            "commit": commit(),
            "host": host(),
            "config": self.config,
            "rows": [row.as_json() for row in self.rows],
        }

    def write(self, path: Path | None, page_path: Path | None = None) -> None:
        """Write the files that were asked for: --json FILE, and --html FILE where a command has it.

        Comes before any table: a table that nobody takes does not lose the figures. Raises `ExpertwireError` where one cannot be written.
        """
        if path is not None:
            write_whole("--json", path, json.dumps(self.as_json(), indent=2) + "\n")
        if page_path is not None:
            from expertwire.cli.page import page

            write_whole("--html", page_path, page(self))

    def table(self, title: str, hide: Iterable[str] = ()) -> Table:
        """The rows as a table for a terminal: `low` and `high` as one column, labels that never change and those of `hide` left out."""
        from rich.table import Table

        left_out = {"low", "high", *hide}
        keys = [key for key in dict.fromkeys(key for row in self.rows for key in row.labels) if key not in left_out]
        varied = [key for key in keys if len({str(row.labels.get(key, "")) for row in self.rows}) > 1]
        table = Table(title=title, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        spread = any("low" in row.labels for row in self.rows)
        if spread:
            table.add_column("low to high", justify="right")
        for key in varied:
            table.add_column(key)
        for row in self.rows:
            style = {RowStatus.OK: "", RowStatus.FAILED: "bold red", RowStatus.SKIPPED: "yellow"}[row.status]
            value = row.status.value if row.value is None else format_value(row.value)
            between = [_spread(row)] if spread else []
            table.add_row(row.name, value, row.unit, *between, *(str(row.labels.get(key, "")) for key in varied), style=style)
        return table


def write_whole(option: str, path: Path, text: str) -> None:
    """Write a file whole or not at all; a device or a pipe, and `-` for stdout, as it comes. Raises `ExpertwireError`."""
    if is_stdout(path):
        print(text, end="", flush=True, file=sys.__stdout__)  # sys.stdout is where the tables go now
        return
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ExpertwireError(f"{option} {path} could not be written: {error.strerror}") from error


def is_stdout(path: Path | None) -> bool:
    """Whether this FILE is stdout, which a command's tables then leave to it."""
    return str(path) in STDOUT_NAMES


def check_path(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured. Raises `InvalidArgumentError`."""
    if path is None or is_stdout(path):
        return
    if path.is_dir():
        raise InvalidArgumentError(f"{option} is {path}; that is a directory")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"{option} is {path}; there is no directory {path.parent}")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise InvalidArgumentError(f"{option} is {path}; this user may not write there")


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Every option as it was given or by default, for `config`: what the rest of it was resolved from."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in sorted(vars(args).items())}


def _spread(row: Row) -> str:
    low, high = row.labels.get("low"), row.labels.get("high")
    return f"{format_value(float(low))} to {format_value(float(high))}" if low is not None and high is not None else ""


def terminal() -> Console:
    """Where tables go: stdout, as wide as COLUMNS says, else wide enough for them, where it is a file or a pipe."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error being handled: rich itself would end the process without a word

    console = Terminal()
    return console if console.is_terminal else Terminal(width=shutil.get_terminal_size((TABLE_WIDTH, 0)).columns)


def format_value(value: float) -> str:
    """Three figures after the point below 100, none above: what was measured is not known better."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"


def commit() -> str:
    """The commit that this package was built from: noted at the build, or asked of git in a source tree; else "unknown"."""
    noted = resources.files("expertwire").joinpath("_commit.txt")
    if noted.is_file():
        return noted.read_text(encoding="utf-8").strip() or "unknown"
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return "unknown"
    try:
        command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def host() -> dict[str, Label]:
    """What the figures were measured on."""
    facts: dict[str, Label] = {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            facts["cpu"] = line.partition(":")[2].strip()
            break
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            facts["memory_GiB"] = round(int(line.split()[1]) / 2**20, 1)
            break
    return facts


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
