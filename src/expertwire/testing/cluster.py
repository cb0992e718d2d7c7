"""A simulated cluster: the engine of every rank over one network in virtual time. The same seed gives the same run.

`python -m expertwire.testing.sweep --replay engine:SEED` replays one run and says what went wrong in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from expertwire.errors import InvalidArgumentError, UnavailableError
from expertwire.testing.faults import NetworkFaults

if TYPE_CHECKING:
    from types import ModuleType


def simulation() -> ModuleType:
    """The native simulation. Raises `UnavailableError` where the package was built without it."""
    try:
        from expertwire import _simulation
    except ImportError as error:
        raise UnavailableError(
            f"expertwire._simulation cannot be loaded ({error}); install the package again with a C++20 compiler present"
        ) from error
    return _simulation


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport:
    """One run. `failure` is empty where every invariant and every check of the oracle held."""

    seed: int
    failure: str
    trace_hash: int  # of every post, delivery and completion, in order
    steps: int
    virtual_ns: int
    ranks: int
    queue_pairs_per_peer: int
    ordered: bool  # class A: the network keeps order, and signals rely on it
    requests: int
    landings: int
    controls: int
    posts: int  # operations that the network took, or failed
    longest_wait: int  # squeeze: posts of a rank that a lane which could go on had to let pass
    swarm: tuple[str, ...]  # the kinds of faults that the seed had switched on
    trace: tuple[str, ...]  # the last events in words, where they were asked for
    scopes: tuple[int, int, int]  # controls of scope request, queue_pair, peer
    faults: dict[str, int]  # how often the network did what
    events: dict[str, int]  # what else happened: cancels, verdicts, replaced endpoints, …
    transitions: dict[str, int]  # of requests, "FROM->TO"
    counting: tuple[int, int, int, int, int, int]  # class C: immediates, signals added, waited, aborted; strays, dropped messages

    @property
    def passed(self) -> bool:
        """Every invariant held and the oracle saw nothing wrong."""
        return not self.failure

    def replay_command(self) -> str:
        """The one command that runs this seed again."""
        return f"python -m expertwire.testing.sweep --replay engine:{self.seed}"


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """Sums over many runs."""

    runs: int
    ranks: dict[int, int]  # number of ranks → runs
    queue_pairs_per_peer: dict[int, int]
    ordered_runs: int
    requests: int
    scopes: tuple[int, int, int]
    faults: dict[str, int]
    events: dict[str, int]
    transitions: dict[str, int]
    swarm: dict[str, int]  # kind of fault → runs that had it switched on

    def text(self) -> str:
        """A few lines for people."""
        rows = [
            f"runs {self.runs}, requests {self.requests}, class A in {self.ordered_runs} runs",
            "ranks: " + ", ".join(f"{ranks} in {count}" for ranks, count in sorted(self.ranks.items())),
            "queue pairs per peer: " + ", ".join(f"{n} in {count}" for n, count in sorted(self.queue_pairs_per_peer.items())),
            "scopes: request {}, queue_pair {}, peer {}".format(*self.scopes),
        ]
        for name, table in (
            ("switched on", self.swarm),
            ("faults", self.faults),
            ("events", self.events),
            ("transitions", self.transitions),
        ):
            rows.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in table.items()))
        return "\n".join(rows)


def coverage(reports: Iterable[RunReport]) -> Coverage:
    """Sum up what the runs went through."""
    ranks: dict[int, int] = {}
    pairs: dict[int, int] = {}
    tables: tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {}, {})
    scopes = [0, 0, 0]
    runs = ordered = requests = 0
    for report in reports:
        runs += 1
        ordered += report.ordered
        requests += report.requests
        ranks[report.ranks] = ranks.get(report.ranks, 0) + 1
        pairs[report.queue_pairs_per_peer] = pairs.get(report.queue_pairs_per_peer, 0) + 1
        for i, count in enumerate(report.scopes):
            scopes[i] += count
        switched = dict.fromkeys(report.swarm, 1)
        for table, part in zip(tables, (report.faults, report.events, report.transitions, switched), strict=True):
            for key, value in part.items():
                table[key] = table.get(key, 0) + value
    return Coverage(runs, ranks, pairs, ordered, requests, (scopes[0], scopes[1], scopes[2]), *tables)


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Runs of the engine's simulation.

    `ranks` and `requests_per_rank`: 0 lets the seed decide. `faults`: None lets the seed decide, deaths and silence included; a
    value is used as it is, and nobody dies. `check_engine=False`: only the oracle judges, which looks at the engine from outside.
    Raises `InvalidArgumentError` for a negative number, or more than 64 ranks.
    """

    ranks: int = 0
    requests_per_rank: int = 0
    faults: NetworkFaults | None = None
    check_engine: bool = True
    squeeze: bool = False  # 4 slots for all lanes, both queues at their minimum, and no other fault
    counted: bool = False  # ordering class C: targets count immediates

    def __post_init__(self) -> None:
        if not 0 <= self.ranks <= 64:
            raise InvalidArgumentError(f"SimulatedCluster(ranks={self.ranks}): between 1 and 64, or 0 for the seed's choice")
        if self.requests_per_rank < 0:
            raise InvalidArgumentError(f"SimulatedCluster(requests_per_rank={self.requests_per_rank}): must not be negative")

    def run(self, seed: int) -> RunReport:
        """One run; raises `InvalidArgumentError` for a seed that is not a 64-bit number."""
        return self.run_many([seed])[0]

    def run_many(self, seeds: Iterable[int], stop_at_failure: bool = False) -> list[RunReport]:
        """One report per seed, in order; the GIL is released meanwhile. Ends after the first failure if asked to."""
        numbers = list(seeds)
        for seed in numbers:
            if not 0 <= seed < 1 << 64:
                raise InvalidArgumentError(f"seed {seed} is not a 64-bit number")
        options = None if self.faults is None else self.faults.as_options()
        rows: list[dict[str, Any]] = simulation().run_engine(
            numbers, self.ranks, self.requests_per_rank, self.check_engine, options, stop_at_failure, 0, self.squeeze, self.counted
        )
        return [RunReport(**{**row, "swarm": tuple(row["swarm"]), "trace": tuple(row["trace"])}) for row in rows]


@contextmanager
def kept_mutant(name: str) -> Iterator[None]:
    """Switches one kept fault of the core on, in the simulation, for this process; off again afterwards.

    Raises `InvalidArgumentError` for a name that `_simulation.mutants()` does not have.
    """
    core = simulation()
    if name not in core.mutants():
        raise InvalidArgumentError(f"kept_mutant({name!r}): one of {', '.join(core.mutants())}")
    core.set_mutant(name)
    try:
        yield
    finally:
        core.set_mutant("none")
