"""What benches of several engines have in common: who can run, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from expertwire.cli.report import Report, RowStatus


def present(
    report: Report, asked: Mapping[str, Mapping[str, Any]], missing: Callable[[str], str], by_default: Collection[str] = ()
) -> list[str]:
    """The engines that can run. Of the others a row that says why not, but of those that nobody asked for by name (`by_default`).

    `asked`: what a row says of each engine beside its name; `missing`: why one cannot run, or "".
    """
    found = []
    for name, labels in asked.items():
        why = missing(name)
        if not why:
            found.append(name)
        elif name not in by_default:
            report.add("verified", None, "", RowStatus.SKIPPED, engine=name, **labels, why=why)
    return found


def rotation(engines: Sequence[str], runs: int) -> list[tuple[int, str]]:
    """(run from 1, engine) of every pair of processes: each run has all engines, and begins with another."""
    return [(run + 1, engines[(run + at) % len(engines)]) for run in range(runs) for at in range(len(engines))]


def take(what: str, engines: Sequence[str], runs: int, one: Callable[[int, str], object]) -> None:
    """Call `one` with (run from 1, engine) for every turn, and show how far it is; `what` a turn is called there: "pair", "round"."""
    if not engines:
        return
    from expertwire.cli.progress import RankProgress

    turns = rotation(engines, runs)
    with RankProgress(1) as progress:
        for done, (number, engine) in enumerate(turns):
            one(number, engine)
            progress.update(0, f"{what} {number} of {engine}", 1, 1)
            progress.update(0, f"{what}s", done + 1, len(turns))
