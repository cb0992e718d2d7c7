"""Random transfers between agents in processes of their own, with faults injected on purpose; every byte is checked.

In every iteration each agent reads from and writes to every other: lists of up to 520 descriptors of random sizes and places, prepared or
not, posted once or twice, with and without notifications, and notifications that stand alone. Payloads follow from (seed, iteration,
source, target, byte offset), are checked once all agents are done, and so is every byte beside them.
Injected: memory that was never registered, registrations that are taken back while others hold them, and agents that are killed while
others write to them, and started again under their names. Nobody but who is killed may notice.
Equal --seed and --iterations give an equal hash of all payloads and notifications.

  expertwire soak transfer --seconds 600 --seed 7
  expertwire soak transfer --iterations 20 --agents 4 --provider local
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.meeting import Meeting, meet
from expertwire.cli.report import Report, RowStatus, options, terminal
from expertwire.cli.soak import transfer_plan as plan
from expertwire.cli.soak.limits import check_common
from expertwire.errors import ExpertwireError, InvalidArgumentError

if TYPE_CHECKING:
    from expertwire.cli.soak.transfer_worker import Setup

AGENTS_MAX = 16
STEP_S = 120.0  # the longest that one step of one agent may take
STOP_S = 10.0
START_S = 60.0  # until a process has come
SAY_EVERY_S = 10.0
HASH_VALUE_DIGITS = 13  # of the hash as a number: what a double holds exactly
FAULTS_SHOWN = 20


@dataclass
class Outcome:
    """What the whole soak has to tell."""

    iterations: int = 0
    digest: str = ""
    faults: list[str] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertwire soak transfer`."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--iterations", type=int, default=0, help="so many iterations, whatever --seconds says")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random (default 1)")
    parser.add_argument("--agents", type=int, default=3, help=f"processes, 2 to {AGENTS_MAX} (default 3)")
    parser.add_argument("--provider", choices=("tcp", "local"), default="tcp", help="what carries the bytes (default tcp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--number", type=int, help="be the agent of that number, and start none")
    parser.add_argument("--meet", metavar="DIRECTORY", help="with --number: where its coordinator waits for it")


def run(args: argparse.Namespace) -> int:
    """Soak, print the table, write the file; or be one of the agents."""
    check(args)
    from expertwire.cli.soak.transfer_worker import Setup, serve

    setup = Setup(args.agents, args.provider, args.seed)
    if args.number is not None:
        serve(setup, args.number, args.meet)
        return 0
    report = Report("soak transfer", {"options": options(args)})
    outcome = Outcome()
    try:
        with Coordinator(setup, outcome) as coordinator:
            coordinator.soak(args.seconds, args.iterations)
    except ExpertwireError as error:
        outcome.faults.append(str(error))
    add_rows(report, setup, outcome)
    report.write(args.json)
    terminal().print(report.table(f"{setup.agents} agents over {setup.provider}, seed {setup.seed}"))
    for fault in outcome.faults[:FAULTS_SHOWN]:
        print(fault, file=sys.stderr)
    return report.exit_status()


def check(args: argparse.Namespace) -> None:
    """An error names the option, its value and the limit."""
    check_common(args, "agents", AGENTS_MAX)
    if (args.number is None) != (args.meet is None):
        raise InvalidArgumentError("--number and --meet belong together: which agent this is, and where its coordinator waits")


def add_rows(report: Report, setup: Setup, outcome: Outcome) -> None:
    """Sums over the agents."""
    common: dict[str, Any] = {"device": "cpu", "agents": setup.agents, "provider": setup.provider, "seed": setup.seed}
    report.add("iterations", outcome.iterations, "", **common)
    if outcome.digest:
        report.add("payload_hash", int(outcome.digest[:HASH_VALUE_DIGITS], 16), "", **common, blake2b=outcome.digest)
    report.add("payload_bytes", outcome.counted.pop("bytes", 0), "B", **common)
    report.add("faults_injected", outcome.injected.total(), "", **common)
    for what, count in sorted(outcome.injected.items()):
        report.add("faults_injected_by_kind", count, "", **common, kind=what)
    for what, count in sorted(outcome.counted.items()):
        report.add(what, count, "", **common)
    status = RowStatus.FAILED if outcome.faults else RowStatus.OK
    why: dict[str, Any] = {"why": outcome.faults[0].partition("\n")[0]} if outcome.faults else {}
    report.add("failures", len(outcome.faults), "", status, **common, **why)


@dataclass
class Process:
    """An agent's process, and the stream on which it is told what to do."""

    process: subprocess.Popen[bytes]
    meeting: Meeting
    log: Path


class Coordinator:
    """Starts the agents, leads them through the iterations step by step, kills some, and ends them all. A context manager."""

    def __init__(self, setup: Setup, outcome: Outcome) -> None:
        self.setup, self.outcome = setup, outcome
        self._agents: dict[int, Process] = {}
        self._started = 0
        self._hash = hashlib.blake2b()

    def __enter__(self) -> Coordinator:
        self._place = tempfile.TemporaryDirectory(prefix="expertwire-")
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._agents.values():
            _end(one.process)
            one.meeting.close()
        self._place.cleanup()

    def soak(self, seconds: float, iterations: int) -> None:
        """Iterate until the time is up, or so many times; then let all agents close."""
        self._start(list(range(self.setup.agents)))
        self._share(self._all("card"))
        begin = said = time.monotonic()
        while self.outcome.iterations < iterations if iterations else time.monotonic() - begin < seconds:
            self._iterate(self.outcome.iterations)
            self.outcome.iterations += 1
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                print(f"iteration {self.outcome.iterations}", file=sys.stderr, flush=True)
        self.outcome.digest = self._hash.hexdigest()[:64]
        for number, one in self._agents.items():
            one.meeting.send("step", name="end")
            self._answer(number)
            try:
                status: int | str = one.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                status = f"nothing: it still runs {STOP_S:.0f} s later"
            if status:
                self.outcome.faults.append(f"agent {number} ended with {status}: {self._tail(number)}")

    def _iterate(self, number: int) -> None:
        faults = plan.faults(self.setup.seed, number, self.setup.agents)
        self._all("fill", iteration=number)
        self._all("go")
        for one in self._all("check"):
            self._hash.update(one["digest"].encode())
        self._gather()  # an agent that is killed can tell nothing after
        if faults.stale is not None:
            self._take_back(faults.stale)
        if faults.killed is not None:
            self._kill(faults.killed)
        self._gather()

    def _gather(self) -> None:
        for one in self._all("tell"):
            self.outcome.faults += one["faults"]
            self.outcome.counted.update(one["counted"])
            self.outcome.injected.update(one["injected"])

    def _take_back(self, owner: int) -> None:
        """A registration goes, others use it, another comes."""
        self._one(owner, "withdraw")
        self._all("use_stale", but=owner, owner=owner)
        self._share([self._one(owner, "restore")])

    def _kill(self, victim: int) -> None:
        """One dies under the writes of the others and comes back; what it had to tell is lost with it."""
        self._all("begin_burst", but=victim, victim=victim)
        self._agents[victim].process.kill()
        self._agents[victim].process.wait()
        self._all("end_burst", but=victim, victim=victim)
        self._agents[victim].meeting.close()
        self._start([victim])
        self.outcome.injected["killed, and started again under its name"] += 1
        self._share([self._one(victim, "card")], but=victim)
        self._one(victim, "meet", cards=[self._one(other, "card") for other in self._agents if other != victim])

    def _share(self, cards: list[dict[str, Any]], but: int | None = None) -> None:
        self._all("meet", but=but, cards=cards)

    # ---- steps

    def _all(self, name: str, but: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """One step of every agent at once; their answers by number."""
        numbers = [number for number in self._agents if number != but]
        for number in numbers:
            self._ask(number, name, arguments)
        return [self._answer(number) for number in numbers]

    def _one(self, number: int, name: str, **arguments: Any) -> dict[str, Any]:
        self._ask(number, name, arguments)
        return self._answer(number)

    def _ask(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            self._agents[number].meeting.send("step", name=name, arguments=arguments)
        except OSError as error:
            raise ExpertwireError(f"agent {number} has gone before {name}: {error.strerror}; {self._tail(number)}") from None

    def _answer(self, number: int) -> dict[str, Any]:
        try:
            return self._agents[number].meeting.receive("done", STEP_S)
        except ExpertwireError as error:
            raise ExpertwireError(f"agent {number}, iteration {self.outcome.iterations}, --seed {self.setup.seed}: {error}") from None

    # ---- processes

    def _start(self, numbers: list[int]) -> None:
        """Their processes, and the stream of each: it comes to a directory of its own."""
        started = {number: self._spawn(number) for number in numbers}
        try:
            for number, (process, where) in started.items():
                self._agents[number] = Process(process, meet(str(where), False, START_S), where / "log")
        except BaseException:
            for process, _ in started.values():
                _end(process)
            raise

    def _spawn(self, number: int) -> tuple[subprocess.Popen[bytes], Path]:
        self._started += 1
        where = Path(self._place.name) / f"{number}.{self._started}"
        where.mkdir()
        given = {"--agents": self.setup.agents, "--provider": self.setup.provider, "--seed": self.setup.seed, "--number": number}
        words = [word for option, value in given.items() for word in (option, str(value))]
        command = [sys.executable, "-m", "expertwire.cli", "soak", "transfer", *words, "--meet", str(where)]
        with (where / "log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True), where

    def _tail(self, number: int) -> str:
        return " | ".join(self._agents[number].log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
