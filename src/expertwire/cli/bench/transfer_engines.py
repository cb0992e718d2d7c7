"""The one interface that every engine of `bench transfer` is behind, and which engines there are and are installed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from expertwire.fabric.config import Settings

Bytes = npt.NDArray[np.uint8]
HASH_DIGITS = 16


@dataclass(frozen=True)
class Place:
    """What engines are told of themselves. `name`: unique among the agents that meet; `host`: the address to listen on."""

    name: str
    host: str
    provider: str
    lanes: int


class Agent(Protocol):
    """One agent of an engine: some memory of its own, and transfers between that and its peers', who are numbered as they were added."""

    polled: bool  # whether it makes progress for others only inside `progress`

    def region(self, memory: Bytes) -> None:
        """Register the memory that everything is moved from and to. Once."""
        ...

    def card(self) -> bytes:
        """What others need in order to add this agent, its region's address included."""
        ...

    def add(self, card: bytes) -> None:
        """Make the next peer reachable."""
        ...

    def prepare(self, operation: str, peer: int, offset: int, nbytes: int) -> Any:
        """A transfer ("read" or "write") between the same place of both regions, to be posted as often as one likes."""
        ...

    def post(self, handle: Any) -> None:
        """Begin it; it is not under way."""
        ...

    def poll(self, handle: Any) -> bool:
        """Whether it is done; raises where it failed."""
        ...

    def release(self, handle: Any) -> None:
        """It will not be posted again."""
        ...

    def progress(self) -> None:
        """Do what others' transfers need of this side."""
        ...

    def withdraw(self) -> None:
        """Take the region's registration back."""
        ...

    def close(self) -> None:
        """The end of the agent."""
        ...


@dataclass(frozen=True)
class Engine:
    """An engine by the name of its arm. `module` offers `open_agent(engine, place) -> Agent`."""

    name: str
    module: str
    packages: tuple[str, ...]  # the first that is installed is what runs
    install: str  # how to get it
    providers: tuple[str, ...] = ("tcp", "local")
    variables: tuple[tuple[str, str, str], ...] = ()  # (provider, name, value): of its processes' environment
    hard_exit: bool = False  # whether its processes crash when they end in the ordinary way
    binaries: tuple[str, ...] = ()  # of the package's directory and that of its libraries, as patterns: what is hashed

    def package(self) -> str:
        """The installed package that it is in; empty where there is none."""
        return next((name for name in self.packages if _found(name)), "")

    def missing(self, provider: str) -> str:
        """Why it cannot run here; empty where it can."""
        if not self.package():
            return f"it is not installed: {self.install}"
        if provider not in self.providers:
            return f"it has no path by which two processes of one host reach each other without {self.providers[0]}"
        return ""

    def environment(self, provider: str) -> list[str]:
        """NAME=value of the processes."""
        return [f"{name}={value}" for of, name, value in self.variables if of == provider]

    def open(self, place: Place) -> Agent:
        """An agent of it in this process."""
        agent: Agent = importlib.import_module(self.module).open_agent(self, place)
        return agent

    def identity(self, provider: str) -> dict[str, Any]:
        """What ran: its version, the hash of each binary, and the flags."""
        package = self.package()
        top = package.partition(".")[0]
        return {
            "package": package,
            "versions": {name: metadata.version(name) for name in sorted(set(metadata.packages_distributions().get(top, [])))},
            "settings": asdict(Settings.from_environment()) if self.module == _OURS else {},
            "binaries": {path.name: file_hash(path) for path in self._files()},
            "environment": self.environment(provider),
            "hard_exit": self.hard_exit,
        }

    def _files(self) -> list[Path]:
        spec = importlib.util.find_spec(self.package())
        if spec is None or spec.origin is None:
            return []
        home = Path(spec.origin).parent
        roots = (home, home.with_name(f"{home.name}.libs"))
        return sorted(path for root in roots for pattern in self.binaries for path in root.glob(pattern))


_NIXL = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_NIXL_INSTALL = "pip install --no-deps nixl-cu12 nixl"
_OURS = "expertwire.cli.bench.transfer_expertwire"
_THEIRS = "expertwire.cli.bench.transfer_nixl"
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("expertwire", _OURS, ("expertwire.transfer.agent",), "this build has no transfer engine", binaries=("../_native*.so",)),
        Engine(
            "expertwire-global-list",
            _OURS,
            ("expertwire.transfer.agent",),
            "this build has no transfer engine",
            binaries=("../_native*.so",),
        ),
        Engine(
            "nixl-ucx",
            _THEIRS,
            _NIXL,
            _NIXL_INSTALL,
            variables=(("tcp", "UCX_TLS", "tcp"),),
            hard_exit=True,
            binaries=("_bindings*.so", "nixl/libplugin_UCX.so", "libucp-*.so*", "libuct-*.so*"),
        ),
        Engine(
            "nixl-libfabric",
            _THEIRS,
            _NIXL,
            _NIXL_INSTALL,
            providers=("tcp",),
            variables=(("tcp", "FI_PROVIDER", "tcp"),),
            hard_exit=True,
            binaries=("_bindings*.so", "nixl/libplugin_LIBFABRIC.so", "libfabric*.so*"),
        ),
        Engine(
            "mooncake",
            "expertwire.cli.bench.transfer_mooncake",
            ("mooncake",),
            "pip install --no-deps mooncake-transfer-engine-non-cuda",
            providers=("tcp",),
            hard_exit=True,
            binaries=("engine*.so",),
        ),
    )
}


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def file_hash(path: Path) -> str:
    """The first digits of its SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:HASH_DIGITS]
