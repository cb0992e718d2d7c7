"""`bench ep --device cuda`: ours, and any module shaped like DeepEP beside it, on the GPUs of this machine.

One rank a GPU where there are as many GPUs as ranks; else several share each under MPS, which is started and ended here. What each
figure is stands in `ep_device_rank`. Figures are noted as they are measured: of a run that fails, or is ended, those are still written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expertwire.cli.lists import whole_numbers
from expertwire.cli.report import Report, RowStatus, options, terminal
from expertwire.errors import InvalidArgumentError, UnavailableError

OURS = "expertwire"
MODES = {"ht": "high_throughput", "ll": "low_latency"}
DTYPES = {"bf16": ("bf16",), "fp8": ("fp8",), "both": ("bf16", "fp8")}
LAUNCH_S, START_S = 130, 150  # beside the budget: to start, to compile kernels, and to end; of the ranks, and of who starts them


@dataclass(frozen=True)
class DeviceSetup:
    """What to measure; the same on every rank."""

    ranks: int
    sizes: tuple[int, ...]  # tokens a rank
    hidden: int
    experts: int
    topk: int
    dtypes: tuple[str, ...]
    mode: str
    against: tuple[str, ...]
    iterations: int
    seed: int
    graph: bool
    sms: int | None
    also_sms: tuple[int, ...]
    budget_s: float
    gpus: int = 0  # of this machine that are used
    journal: str = ""  # file that rank 0 notes rows in
    device: str = "cuda"

    def labels(self) -> dict[str, Any]:
        """What every row says."""
        return {
            "device": self.device,
            "ranks": self.ranks,
            "ranks_per_node": self.ranks,
            "gpus": self.gpus,
            "sharing": "mps" if self.ranks > self.gpus else "none",
            "hidden": self.hidden,
            "experts": self.experts,
            "topk": self.topk,
            "mode": MODES[self.mode],
            "provider": "cuda-ipc" if self.device == "cuda" else "local",  # ours; within a node DeepEP's is the same
        }

    def ended(self, status: str, why: str) -> dict[str, Any]:
        """The row of a run that did not come to its end."""
        value = 0 if status == "failed" else None
        return {"name": "verified", "value": value, "status": status, **self.labels(), "engine": OURS, "why": why}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `bench ep` has for GPUs alone, and the one that asks for them."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where rows are; cuda: this machine's GPUs, one node")
    parser.add_argument("--sizes", metavar="A,B,C", help="with --device cuda: numbers of tokens a rank, one after the other in one run")
    parser.add_argument("--graph", action="store_true", help="with --device cuda: also captured in CUDA graphs and replayed")
    parser.add_argument("--also-sms", metavar="A,B,C", help="with --device cuda: ours once more by set_num_sms of each, back to back")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="with --device cuda: no figure is begun after so long (default 120)"
    )


def refuse(args: argparse.Namespace) -> None:
    """Raises where an option for GPUs is given without them."""
    given = {
        "--sizes": args.sizes,
        "--graph": args.graph,
        "--also-sms": args.also_sms,
        "--budget": args.budget,
        "--dtype both": args.dtype == "both",
    }
    for name, value in given.items():
        if value:
            raise InvalidArgumentError(f"{name} is given with --device cpu; it is of --device cuda alone")


def parse(args: argparse.Namespace, shape: dict[str, Any]) -> DeviceSetup:
    """Check the numbers. `shape`: what a preset or --smoke says in their place."""
    given = {**vars(args), **shape}
    unfit = {"--loop": args.loop, "--preset": args.preset, "--provider": args.provider, "--shape": args.shape}
    for name, value in unfit.items():
        if value is not None:
            raise InvalidArgumentError(f"{name} {value} with --device cuda; it is of --device cpu alone")
    lowest = {"ranks": 1, "hidden": 8, "experts": 1, "topk": 1, "iterations": 1, "seed": 0}
    for name, least in lowest.items():
        if given[name] < least:
            raise InvalidArgumentError(f"--{name} is {given[name]}; the least is {least}")
    if given["topk"] > given["experts"]:
        raise InvalidArgumentError(f"--topk is {given['topk']}; it must be at most --experts, {given['experts']}")
    if args.sms is not None and (args.sms < 0 or args.sms % 2):
        raise InvalidArgumentError(f"--sms is {args.sms}; it must be even, and at least 0")
    against = tuple(dict.fromkeys(given["against"]))
    for name in against:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
            raise InvalidArgumentError(f"--against is {name!r}; with --device cuda it is the name of a module that can be imported")
    return DeviceSetup(
        ranks=given["ranks"],
        sizes=whole_numbers("--sizes", str(given["tokens"] if args.sizes is None else args.sizes), 1),
        hidden=given["hidden"],
        experts=given["experts"],
        topk=given["topk"],
        dtypes=DTYPES[args.dtype],
        mode=args.mode,
        against=against,
        iterations=given["iterations"],
        seed=given["seed"],
        graph=args.graph,
        sms=args.sms,
        also_sms=() if args.also_sms is None else whole_numbers("--also-sms", args.also_sms, 1),
        budget_s=120.0 if args.budget is None else args.budget,
    )


def run(args: argparse.Namespace, shape: dict[str, Any]) -> int:
    """Measure, print the table, write the file."""
    setup = parse(args, shape)
    report = Report("bench ep", {**asdict(setup), "options": options(args)})
    with tempfile.TemporaryDirectory(prefix="expertwire-") as directory:
        try:
            setup = replace(setup, gpus=min(gpus(), setup.ranks), journal=str(Path(directory, "journal")))
            report.config["gpus"] = setup.gpus
            add(report, measure(setup, Path(directory)))
        except UnavailableError as error:
            print(f"expertwire: --device cuda is skipped: {error}", file=sys.stderr, flush=True)
            add(report, [setup.ended("skipped", str(error))])
        except BaseException:  # from outside: what has been measured is kept
            add(report, [*noted(setup), setup.ended("failed", "it was ended before it was done")])
            report.write(args.json)
            raise
    report.write(args.json, args.html)
    terminal().print(report.table(title(setup)))
    report.tell_what_is_not_ok()
    return report.exit_status()


def add(report: Report, rows: list[dict[str, Any]]) -> None:
    """Rows as ranks note them."""
    for row in rows:
        labels = {name: value for name, value in row.items() if name not in ("name", "value", "unit", "status")}
        report.add(row["name"], row["value"], row.get("unit", ""), RowStatus(row.get("status", "ok")), **labels)


def noted(setup: DeviceSetup) -> list[dict[str, Any]]:
    """What rank 0 has noted so far."""
    journal = Path(setup.journal)
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()] if journal.is_file() else []


def title(setup: DeviceSetup) -> str:
    """One line that says what was measured."""
    where = f"{setup.ranks} ranks on {setup.gpus} GPU{'s' * (setup.gpus != 1)}{' under MPS' if setup.ranks > setup.gpus > 0 else ''}"
    sizes = ", ".join(f"{size:,}" for size in setup.sizes)
    mode = MODES[setup.mode].replace("_", " ")
    return f"{where}; {sizes} tokens a rank, hidden {setup.hidden}, {setup.experts} experts, top-{setup.topk}, {mode}"


def gpus() -> int:
    """GPUs that torch sees. Raises `UnavailableError`: none, or no Triton."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise UnavailableError("torch sees no GPU here")
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError("the kernels need Triton: pip install 'expertwire[cuda]'")
    return count


def measure(setup: DeviceSetup, folder: Path) -> list[dict[str, Any]]:
    """Rows of all engines. The ranks are children of another process, whose environment has what they need to share GPUs."""
    from expertwire.cli import mps

    (folder / "setup").write_bytes(pickle.dumps((list(sys.path), setup)))
    command = [sys.executable, "-m", "expertwire.cli.bench.ep_device_start", str(folder)]
    failure = ""
    try:
        if setup.ranks > setup.gpus:
            with mps.daemon() as variables:
                subprocess.run(["env", *variables, *command], timeout=setup.budget_s + START_S, check=False)
        else:
            subprocess.run(command, timeout=setup.budget_s + START_S, check=False)
    except subprocess.TimeoutExpired:
        failure = f"ranks have not ended {START_S} s after the budget of {setup.budget_s:.0f} s"
    said = folder / "said"
    failure = failure or (said.read_text() if said.exists() else "the process that starts the ranks ended without a word")
    return [*noted(setup), *([setup.ended("failed", failure)] if failure else [])]
