"""Run parts of the check and report them; scripts/vllm_check sets up what this needs.

Exit status: 0 all asked for was done and holds, 1 something does not, 2 bad usage, 3 a part asked for by name could not be run.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from expertwire.cli.report import Report, RowStatus
from vllm_check import bench, checks, experts, model, scan
from vllm_check.checks import Finding, MissingError
from vllm_check.servers import Place, Server, Stage, running, stages

KINDS = ("nixl", "ours")
LOADS = ("crowd", "counted", "aiperf")
PARTS = (*checks.PLAIN, *LOADS, *checks.FAULTS, "two_and_two", "ranks", "experts", "beside")
USUAL = tuple(part for part in PARTS if part not in ("beside", "ranks", "aiperf"))


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="vllm_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", choices=KINDS, nargs="+", default=list(KINDS), help="what moves KV (default both, one after the other)")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(USUAL), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--requests", type=int, default=2048, help="of the crowd (default 2048)")
    parser.add_argument("--concurrency", type=int, default=256, help="of the crowd (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="of the set-ups beside each other")
    parser.add_argument("--beside-requests", type=int, default=256, help="of each set-up in each round")
    parser.add_argument("--beside-concurrency", type=int, default=32)
    parser.add_argument("--toy-proxy", type=Path, help="vLLM's tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm/run"), help="logs and results (default build/vllm/run)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser.parse_args()


class Run:
    """What has been found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        kept = ("parts", "kv", "requests", "concurrency", "rounds", "beside_requests", "beside_concurrency")
        config = {name: getattr(options, name) for name in kept}
        self.report = Report("vllm_check", config)
        self.place = Place(options.folder.absolute(), options.toy_proxy.absolute() if options.toy_proxy else None)

    def add(self, part: str, kv: str, findings: Sequence[Finding], seconds: float = 0.0) -> None:
        """Keep and print them."""
        for found in findings:
            status = RowStatus.OK if found.good else RowStatus.FAILED
            labels = {"part": part, "kv": kv, **({"why": found.why} if found.why and (not found.good or part == "beside") else {})}
            self.report.add(found.name, round(found.value, 3), found.unit, status, **labels)
            why = labels.get("why", "")
            print(f"{kv:5} {part:14} {found.name:42} {found.value:12.2f} {found.unit:10} {status.value} {why}", flush=True)
        if seconds:
            print(f"{kv:5} {part:14} took {seconds:.0f} s", flush=True)

    def part(self, part: str, kv: str, body: Callable[[], Sequence[Finding]], logs: Sequence[Path] | None = None) -> bool:
        """Run one; what it raises is its failure. Of `logs` what was written meanwhile may hold no sign of an error."""
        begun, before = time.monotonic(), scan.ends(logs or ())
        good = True
        try:
            self.add(part, kv, body(), time.monotonic() - begun)
        except MissingError as error:
            self.report.add(part, None, "", RowStatus.SKIPPED, part=part, kv=kv, why=str(error))
            print(f"{kv:5} {part:14} skipped: {error}", flush=True)
        except Exception as error:
            traceback.print_exc()
            good = False
            self.add(part, kv, [Finding("ran", 0, False, why=f"{type(error).__name__}: {error}")])
        if logs is not None:
            signs = scan.of_logs(logs, before)
            self.add(part, kv, [Finding("signs_of_errors_in_logs", len(signs), not signs, "lines", "; ".join(signs[:3])[:600])])
        return good


def on_a_pair(run: Run, found: Stage) -> None:
    """The parts that are asked for, until one cannot be run to its end."""
    bodies: dict[str, Callable[[Stage], list[Finding]]] = {
        **checks.PLAIN,
        "crowd": lambda found: bench.crowd(found, run.options.requests, run.options.concurrency),
        "counted": bench.counted,
        "aiperf": bench.aiperf,
        **checks.FAULTS,
    }
    logs = [process.log for process in (*found.servers, found.proxy)]
    for part, body in bodies.items():
        if part not in run.options.parts:
            continue
        clean = None if part in (*checks.FAULTS, "counted", "aiperf") else logs  # those that break something leave signs of it
        if not run.part(part, found.kv, lambda body=body: body(found), clean):  # type: ignore[misc]
            return


def everything(run: Run) -> None:
    """In order. One server that does all itself, whose answers are the truth, runs all the while."""
    options, place = run.options, run.place
    parts = set(options.parts)
    if "experts" in parts:
        run.part("experts", "", wrong_rows)
    if not parts - {"experts"}:
        return
    single = Server(place, "single", "", "none")
    with running([single]):
        for kv in options.kv:  # one after the other: threads of NIXL's that spin would starve the other's servers
            if parts & {*checks.PLAIN, *LOADS, *checks.FAULTS}:
                with stages(place, [kv], single) as found:
                    on_a_pair(run, found[kv])
        if "beside" in parts:
            with stages(place, options.kv, single) as found:
                beside(run, found)
        kv = options.kv[-1]
        for part, body, shape in (("two_and_two", checks.two_and_two, {"prefill": 2, "decode": 2}), ("ranks", checks.ranks, {"ranks": 2})):
            if part in parts:
                run.part(part, kv, lambda body=body, shape=shape: staged(place, kv, single, body, shape))  # type: ignore[misc]


def staged(place: Place, kv: str, single: Server, body: Callable[[Stage], list[Finding]], shape: dict[str, int]) -> list[Finding]:
    """One check on servers of its own."""
    with stages(place, [kv], single, **shape) as found:
        return body(found[kv])


def wrong_rows() -> list[Finding]:
    """Of vLLM's classes for experts, over all ranks."""
    found = experts.drive()
    totals = {name: sum(rank[name] for rank in found) for name in found[0]}
    return [Finding(f"wrong_rows_{name}", total, not total, "rows") for name, total in totals.items()]


def beside(run: Run, found: dict[str, Stage]) -> None:
    """The set-ups, in turn."""
    options = run.options
    if run.place.toy is None:
        run.report.add("beside_toy", None, "", RowStatus.SKIPPED, part="beside", why="vLLM's example proxy is not here: --toy-proxy FILE")
    try:
        medians = bench.side_by_side(run.place, found, options.rounds, options.beside_requests, options.beside_concurrency)
    except Exception as error:
        traceback.print_exc()
        run.add("beside", "", [Finding("ran", 0, False, why=f"{type(error).__name__}: {error}")])
        return
    for name, findings in medians:
        run.add("beside", name, findings)


def main() -> int:
    """All of it."""
    options = arguments()
    run = Run(options)
    model.make(run.place.model)
    try:
        everything(run)
    finally:
        run.report.write(options.json)
    status = run.report.exit_status()
    print(f"vllm_check: {sum(row.status is RowStatus.OK for row in run.report.rows)} of {len(run.report.rows)} figures are as they must be")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
