"""Which libraries, providers and interfaces this machine has, which are chosen and why, and what is missing.

Rows of --json: value 1 (there, enough), 0 (missing) or a size, with `found` and `advice` beside it. A row is `failed` only where nothing
can work without it; what is merely absent is `skipped`.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertwire.cli.lists import whole_numbers
from expertwire.cli.report import Exit, Report, RowStatus, options, terminal
from expertwire.errors import ExpertwireError, InvalidArgumentError

if TYPE_CHECKING:
    from expertwire.ep.buffer import MemoryPlan
    from expertwire.fabric.config import Settings

EXPECTED = ("cxi", "efa", "verbs")  # looked for by name, so that their absence is told
# The ordering classes of ARCHITECTURE.md, in plain words.
ORDERINGS = {
    "ordered": "a signal follows its data at once, the network keeps them in order",
    "delivery_gated": "a signal waits until its data has been delivered",
    "counted_immediates": "the receiver counts what has arrived",
}
MEMLOCK_WANTED = 64 << 20
FILES_WANTED = 1024
SHAPE = ("TOKENS", "HIDDEN", "EXPERTS", "TOPK", "RANKS", "RANKS_PER_NODE")  # of --shape; tokens of each rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `expertwire doctor`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--settings", action="store_true", help="list every environment variable, its value and what it does, and nothing else"
    )
    parser.add_argument(
        "--shape", metavar=",".join(SHAPE), help="also: what a Buffer takes with which a rank may receive every token, beside what is free"
    )
    parser.add_argument(
        "--mode",
        choices=("ht", "ll"),
        default="ht",
        help="of --shape: high throughput (default), or low latency, whose tokens are num_max_dispatch_tokens_per_rank",
    )
    parser.add_argument("--all", action="store_true", help="list every domain of every provider, not one line for each provider")


def run(args: argparse.Namespace) -> int:
    """Look, print, write; returns the exit status: FAILED only where nothing can run."""
    shape = parse_shape(args.shape) if args.shape is not None else None
    report = Report("doctor", {"options": options(args)})
    if args.settings:
        return _list_settings(report, args.json)
    settings = _settings(report)
    if settings is not None and _core(report):
        _library(report, settings)
        _providers(report, settings, args.all)
        _interface(report, settings)
        if shape is not None:
            (_fits if args.mode == "ht" else _fits_low_latency)(report, *shape)
    _machine(report)
    _memory(report)
    report.write(args.json)
    _show(report)
    return Exit.FAILED if any(row.status is RowStatus.FAILED for row in report.rows) else Exit.OK


def _note(
    report: Report, name: str, value: float | None, found: str, advice: str = "", unit: str = "", bad: RowStatus | None = None
) -> None:
    report.add(name, value, unit, bad or RowStatus.OK, found=found, advice=advice)


def _settings(report: Report) -> Settings | None:
    from expertwire.fabric.config import VARIABLES, Settings

    try:
        settings = Settings.from_environment()
    except ExpertwireError as error:
        _note(report, "settings", 0, str(error), "correct or unset the variable", bad=RowStatus.FAILED)
        return None
    given = [f"{name}={value}" for name, value in settings.given().items()]
    found = " ".join(given) or "all at their defaults"
    _note(report, "settings", len(given), found, f"{len(VARIABLES)} variables: `expertwire doctor --settings` lists them", unit="variables")
    if settings.unknown:
        advice = f"nothing reads them; known are {', '.join(sorted(VARIABLES))}"
        _note(report, "settings_unknown", len(settings.unknown), " ".join(settings.unknown), advice, "variables", RowStatus.SKIPPED)
    return settings


def _list_settings(report: Report, path: Path | None) -> int:
    """One row for each variable that is read: given or by default, and what it does."""
    from expertwire.fabric.config import VARIABLES

    settings = _settings(report)
    if settings is not None:
        given = settings.given()
        for name, note in VARIABLES.items():
            _note(report, name, int(name in given), given.get(name, "default"), note)
    report.write(path)
    _show(report)
    return report.exit_status() if settings is None else Exit.OK


def _core(report: Report) -> bool:
    from expertwire.fabric import discover

    path = discover.core_path()
    if not path:
        advice = "pip install . (needs a C++20 compiler and libfabric-dev)"
        _note(report, "core", 0, "the native core is not built", advice, bad=RowStatus.FAILED)
        return False
    _note(report, "core", 1, path)
    return True


def _library(report: Report, settings: Settings) -> None:
    from expertwire.fabric import discover

    advice = "apt install libfabric1, or pip install mpich (carries 2.5), or set LIBFABRIC_HOME; without it one host works, hosts do not"
    try:
        facts = discover.library_facts(settings)
    except ExpertwireError as error:
        _note(report, "libfabric", 0, str(error), advice, bad=RowStatus.FAILED)
        return
    if not facts["found"]:
        _note(report, "libfabric", 0, facts["message"], advice, bad=RowStatus.SKIPPED)
        return
    version = ".".join(map(str, facts["version"]))
    others = [
        f"{row['path']} ({row['error'] or '.'.join(map(str, row['version']))})" for row in facts["tried"] if row["path"] != facts["path"]
    ]
    _note(report, "libfabric", 1, f"{version} at {facts['path']}", f"also looked at {', '.join(others)}" if others else "")


def _providers(report: Report, settings: Settings, every: bool) -> None:
    from expertwire.fabric import discover

    rows = discover.provider_facts(settings) if report.rows[-1].value else []
    devices = discover.fabric_devices()
    rules = discover.provider_rules()
    shown: set[str] = set()
    for row in rows:
        if row["provider"] in shown and not every:
            continue
        shown.add(row["provider"])
        avoided = rules.get(discover.core_name(row["provider"]), {}).get("avoided")
        where = f" {row['domain']} {row['source_address']}".rstrip() if every else ""
        _note(
            report, f"provider {row['provider']}{where}", int(row["usable"]), _traits(row),
            f"{'' if row['tested'] or avoided else 'untested: nobody has run it; '}{row['why']}. Source: {row['source']}",
            bad=None if row["usable"] else RowStatus.SKIPPED,
        )  # fmt: skip
    for kind in EXPECTED:
        if kind not in {discover.core_name(name) for name in shown}:
            names = [device.name for device in devices if device.kind == kind]
            advice = f"the library offers no {kind}; use the vendor's (LIBFABRIC_HOME)" if names else "no such device here"
            advice += f"; untested: nobody has run it. Source: {rules[kind]['source']}"
            _note(report, f"provider {kind}", 0, " ".join(names) or "none", advice, bad=RowStatus.SKIPPED)
    _note(report, "provider local", 1, "memory of the same host, mapped", "needs no libfabric; serves one host")
    offered = sorted({discover.core_name(row["provider"]) for row in rows if row["usable"]})
    choice = discover.explain_provider(settings, devices, offered)
    device = discover.nearest_device(devices, choice.name, discover.process_numa())
    _note(report, "provider chosen", 1, choice.name + (f" on {device.name} (NUMA node {device.numa})" if device else ""), choice.why)


def _traits(row: dict[str, Any]) -> str:
    signals = "signals are atomic adds" if row["remote_atomics"] else "signals are messages"
    delivery = "reports delivery" if row["delivery_complete"] else "reports only what has left here"
    return f"{ORDERINGS.get(row['ordering'], row['ordering'])}; {delivery}; {signals}; queue of {row['transmit_queue']} operations"


def _interface(report: Report, settings: Settings) -> None:
    from expertwire.fabric import discover

    for name, hosts in (("interface one host", 1), ("interface several hosts", 2)):
        try:
            chosen = discover.choose_interface(settings, hosts)
        except ExpertwireError as error:
            _note(report, name, 0, "none", str(error), bad=RowStatus.FAILED if settings.interface else RowStatus.SKIPPED)
            continue
        _note(report, name, 1, f"{chosen.name or '-'} {chosen.address}", chosen.why)


def _machine(report: Report) -> None:
    cores = sorted(os.sched_getaffinity(0))
    online = os.cpu_count() or 0
    _note(
        report,
        "cores",
        len(cores),
        f"{platform.machine()}, {online} online, cpuset {_ranges(cores)}",
        "waits spin only with a core for each rank",
        "cores",
    )
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    _note(report, "numa_nodes", max(nodes, 1), "from sysfs" if nodes else "sysfs says nothing: one assumed", unit="nodes")


def _memory(report: Report) -> None:
    from expertwire.fabric import discover

    try:
        os.close(os.memfd_create("expertwire-doctor", os.MFD_CLOEXEC))
        _note(report, "memfd", 1, "works", "regions are memfd: no names, no /dev/shm")
    except OSError as error:
        _note(report, "memfd", 0, str(error), "a seccomp filter forbids memfd_create: allow it", bad=RowStatus.FAILED)
    try:
        status = os.statvfs("/dev/shm")
        _note(report, "dev_shm", status.f_bavail * status.f_frsize, "free", "not used for regions; libfabric's own shm needs it", "bytes")
    except OSError as error:
        _note(report, "dev_shm", 0, str(error), "not used for regions", "bytes", RowStatus.SKIPPED)
    files, nbytes = discover.shared_leftovers()
    if files:
        advice = "libfabric's shm left them for processes that are gone: rm /dev/shm/PID:UID:* of those that you know to have ended"
        _note(report, "dev_shm_leftovers", files, f"{_size(nbytes)} in /dev/shm", advice, "files", RowStatus.SKIPPED)
    _limits(report)
    available = next(
        (int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")), 0
    )
    _note(report, "memory_available", available, "MemAvailable", unit="bytes")


def parse_shape(text: str) -> tuple[int, ...]:
    """The six numbers of --shape. Raises `InvalidArgumentError` that says which cannot be used."""
    numbers = whole_numbers("--shape", text, form=f"{','.join(SHAPE)}, whole numbers")
    if len(numbers) != len(SHAPE):
        raise InvalidArgumentError(f"--shape is {text}; that is {len(numbers)} numbers, it must be {len(SHAPE)}: {','.join(SHAPE)}")
    for name, number in zip(SHAPE, numbers, strict=True):
        if number < 1:
            raise InvalidArgumentError(f"--shape is {text}; {name} is {number}, the least is 1")
    return numbers


def _fits(report: Report, tokens: int, hidden: int, experts: int, topk: int, ranks: int, ranks_per_node: int) -> None:
    """What the ranks of the fullest node take of this machine's memory, where any rank may receive all tokens, beside what is free."""
    from expertwire.ep import Buffer

    node_of = [rank // ranks_per_node for rank in range(ranks)]
    plan = Buffer.memory_plan(
        node_of, num_max_recv_tokens=tokens * ranks, hidden=hidden, num_topk=topk, max_local_experts=-(-experts // ranks)
    )
    _compare(report, "shape", node_of, plan, "num_nvl_bytes may be smaller: what does not fit then goes in rounds")


def _fits_low_latency(report: Report, tokens: int, hidden: int, experts: int, topk: int, ranks: int, ranks_per_node: int) -> None:
    """The same of a low-latency Buffer with the memory that callers allocate, and with the least that is enough."""
    from expertwire.ep import Buffer

    node_of = [rank // ranks_per_node for rank in range(ranks)]
    hint = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)

    def planned(**sizes: int) -> list[MemoryPlan]:
        return Buffer.memory_plan(node_of, low_latency_mode=True, max_local_experts=-(-experts // ranks), **sizes)

    least = planned(num_max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_experts=experts, num_topk=topk)
    enough = f"num_rdma_bytes={max(one.low_latency_data_bytes for one in least)} is enough where no combine is zero-copy"
    _compare(report, "shape_low_latency", node_of, planned(num_rdma_bytes=hint), enough)
    _compare(report, "shape_low_latency_least", node_of, least, "fewer tokens a rank, or more ranks")


def _compare(report: Report, name: str, node_of: list[int], plan: list[MemoryPlan], advice: str) -> None:
    from expertwire.fabric.native import memory_available

    bytes_max = max(one.total_bytes for one in plan)
    needed = max(sum(one.total_bytes for one, its in zip(plan, node_of, strict=True) if its == node) for node in set(node_of))
    available, source = memory_available()
    fits = needed <= available
    found = f"a rank; {node_of.count(0)} ranks of a host need {_size(needed)} ({needed} bytes) of {_size(available)} ({available} bytes)"
    status = RowStatus.OK if fits else RowStatus.FAILED
    numbers = {"needed_bytes": needed, "available_bytes": available}
    report.add(name, bytes_max, "bytes", status, found=found, advice=f"free by {source}" if fits else advice, **numbers)


def _limits(report: Report) -> None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or soft >= MEMLOCK_WANTED
    pins = pinning_device()
    advice = "" if enough else "RDMA devices pin memory: raise it (ulimit -l unlimited)"
    if not enough and not pins:
        advice = "enough: tcp and local pin no memory (an RDMA device would need more)"
    found = "unlimited" if unlimited else "soft limit"
    _note(report, "memlock", None if unlimited else soft, found, advice, "bytes", None if enough or not pins else RowStatus.SKIPPED)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files >= FILES_WANTED
    advice = "" if enough else "a rank keeps some descriptors for each peer: raise it (ulimit -n 65536)"
    _note(report, "open_files", files, "soft limit", advice, "files", None if enough else RowStatus.SKIPPED)


def pinning_device() -> bool:
    """Whether a device is here that registers memory by pinning it."""
    from expertwire.fabric import discover

    return bool(discover.fabric_devices())


def _ranges(cores: list[int]) -> str:
    """[0, 1, 2, 5] → `0-2,5`."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _show(report: Report) -> None:
    from rich.table import Table

    table = Table(title="expertwire doctor", title_justify="left", show_lines=False)
    for title in ("what", "", "found", "why, or what to do"):
        table.add_column(title, overflow="fold")
    marks = {RowStatus.OK: "[green]ok[/]", RowStatus.SKIPPED: "[yellow]no[/]", RowStatus.FAILED: "[bold red]failed[/]"}
    for row in report.rows:
        found = str(row.labels["found"])
        if row.unit and row.value is not None:
            found = f"{_size(row.value) if row.unit == 'bytes' else int(row.value)}{'' if row.unit == 'bytes' else ' ' + row.unit}: {found}"
        table.add_row(row.name, marks[row.status], _plain(found), _plain(str(row.labels["advice"])))
    terminal().print(table)


def _plain(text: str) -> str:
    """Brackets of paths and options are not markup."""
    return text.replace("[", "\\[")


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
