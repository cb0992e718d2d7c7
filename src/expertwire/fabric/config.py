"""Settings: the only place that reads the environment, and it never writes it.

Every variable is parsed and checked once, when a context is built; an error names the variable, its value and the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from expertwire.errors import InvalidArgumentError

__all__ = ["VARIABLES", "Settings"]

DEFAULT_TIMEOUT_MS = 100_000  # a peer may be compiling
TIMEOUT_MS_MAX = 24 * 3600 * 1000
OUTSTANDING_MAX = 65_536
NODES_RANKS_MAX = 65_536


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            value = int(text, 10)
        except ValueError:
            raise InvalidArgumentError(f"{name}={text!r} is not a whole number: give one from {low} to {high}") from None
        if not low <= value <= high:
            raise InvalidArgumentError(f"{name}={value} is outside {low}..{high}")
        return value

    return parse


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidArgumentError(f"{name}={text!r} is not a switch: give 0 or 1")
    return text == "1"


def _word(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in allowed:
            raise InvalidArgumentError(f"{name}={text!r} is not known: give one of {', '.join(allowed)}")
        return text

    return parse


def _text(name: str, text: str) -> str:
    if any(ord(character) < 32 for character in text):
        raise InvalidArgumentError(f"{name}={text!r} contains control characters")
    return text.strip()


def _nodes(name: str, text: str) -> tuple[int, ...]:
    try:
        nodes = tuple(int(part, 10) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(f"{name}={text!r} is not a list: give one node number per rank, as in 0,0,1,1") from None
    if len(nodes) > NODES_RANKS_MAX:
        raise InvalidArgumentError(f"{name} lists {len(nodes)} ranks, more than {NODES_RANKS_MAX}")
    if sorted(set(nodes)) != list(range(len(set(nodes)))):
        raise InvalidArgumentError(f"{name}={text!r} skips node numbers: nodes are 0..n-1, each with at least one rank")
    return nodes


def _variable(name: str, parse: Callable[[str, str], Any], default: Any, *, exchanged: bool, note: str) -> Any:
    """One field of `Settings`, read from the variable `name`. `exchanged`: a difference between ranks matters (T20)."""
    return field(default=default, metadata={"variable": name, "parse": parse, "exchanged": exchanged, "note": note})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, checked. Build it with `from_environment()`, or by hand in tests.

    `hard_timeout_ms` is 0 until given: `hard_timeout()` is what applies (2 × `timeout_ms` by default).
    """

    max_outstanding: int = _variable(
        "EXPERTWIRE_MAX_OUTSTANDING", _integer(1, OUTSTANDING_MAX), 512, exchanged=False, note="writes in flight per transport instance"
    )
    sync_writes: bool = _variable(
        "EXPERTWIRE_SYNC_WRITES", _flag, False, exchanged=False, note="1: post, wait for all, then signal (the slow baseline)"
    )
    delivery_complete: str = _variable(
        "EXPERTWIRE_DELIVERY_COMPLETE", _word("auto", "1", "0"), "auto", exchanged=True, note="auto follows the gate policy"
    )
    trust_order: bool = _variable(
        "EXPERTWIRE_TRUST_ORDER", _flag, False, exchanged=True, note="1: believe the order that shm and cxi advertise"
    )
    trust_immediates: bool = _variable(
        "EXPERTWIRE_TRUST_IMMEDIATES",
        _flag,
        False,
        exchanged=True,
        note="1: count immediates also where a writer's death may end its target",
    )
    timeout_ms: int = _variable(
        "EXPERTWIRE_TIMEOUT_MS", _integer(1, TIMEOUT_MS_MAX), DEFAULT_TIMEOUT_MS, exchanged=True, note="deadline of every wait, ms"
    )
    hard_timeout_ms: int = _variable(
        "EXPERTWIRE_HARD_TIMEOUT_MS",
        _integer(1, 2 * TIMEOUT_MS_MAX),
        0,
        exchanged=True,
        note="from post to quarantine, ms; 2 × timeout by default",
    )
    provider: str = _variable(
        "EXPERTWIRE_PROVIDER",
        _text,
        "",
        exchanged=True,
        note="cxi, efa, verbs, tcp, shm, local, or a libfabric name; a name turns the same-host path off",
    )
    interface: str = _variable(
        "EXPERTWIRE_INTERFACE", _text, "", exchanged=False, note="interface name or numeric address to bind; empty: by route"
    )
    node_of: tuple[int, ...] = _variable(
        "EXPERTWIRE_NODE_OF", _nodes, (), exchanged=True, note="node of each rank, as 0,0,1,1: overrides what mapping proves"
    )
    liveness: str = _variable(
        "EXPERTWIRE_LIVENESS",
        _word("auto", "heartbeat"),
        "auto",
        exchanged=True,
        note="heartbeat: see death without pidfd, as across hosts",
    )
    signal_path: str = _variable(
        "EXPERTWIRE_SIGNAL_PATH", _word("auto", "atomic", "message"), "auto", exchanged=True, note="how signals travel over libfabric"
    )
    share_device: bool = _variable("EXPERTWIRE_SHARE_DEVICE", _flag, False, exchanged=True, note="1: several ranks may share one GPU")
    vllm: str = _variable(
        "EXPERTWIRE_VLLM",
        _word("0", "1", "nixl", "deep_ep"),
        "0",
        exchanged=False,
        note="1: vLLM's processes find Expertwire as nixl and deep_ep; one name: as that alone (docs/vllm.md)",
    )
    telemetry_folder: str = _variable(
        "EXPERTWIRE_TELEMETRY_FOLDER",
        _text,
        "",
        exchanged=False,
        note="where compat.nixl's agents write their counters, each a .prom file",
    )
    libfabric_home: str = _variable("LIBFABRIC_HOME", _text, "", exchanged=False, note="where to look for libfabric first")
    cxi_rendezvous_threshold: str = _variable(
        "FI_CXI_RDZV_THRESHOLD", _text, "", exchanged=True, note="cxi's own setting; 0 forces rendezvous, which loses order"
    )
    cxi_rendezvous_get_min: str = _variable(
        "FI_CXI_RDZV_GET_MIN", _text, "", exchanged=True, note="cxi's own setting; decides what is pulled"
    )
    cxi_rendezvous_eager_size: str = _variable(
        "FI_CXI_RDZV_EAGER_SIZE", _text, "", exchanged=True, note="cxi's own setting; decides what is pulled"
    )
    cxi_rendezvous_protocol: str = _variable(
        "FI_CXI_RDZV_PROTO", _text, "", exchanged=True, note="cxi's own setting; decides how it is pulled"
    )
    ordering: str = "auto"  # of signals behind payloads, where there is a choice: "gated" or "counted" (docs/counted_immediates.md)
    unknown: tuple[str, ...] = ()  # EXPERTWIRE_* that nothing reads: most likely misspelt; doctor lists them

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read and check every variable of `env` (the process's environment by default). An empty value counts as unset.

        Raises `InvalidArgumentError` naming the variable, its value and the limit.
        """
        source: Mapping[str, str] = os.environ if env is None else env
        values: dict[str, Any] = {}
        known = set()
        for item in fields(cls):
            name = item.metadata.get("variable")
            if name is None:
                continue
            known.add(name)
            text = source.get(name, "")
            if text != "":
                values[item.name] = item.metadata["parse"](name, text)
        unknown = sorted(name for name in source if name.startswith("EXPERTWIRE_") and name not in known)
        settings = cls(**values, unknown=tuple(unknown))
        if settings.hard_timeout_ms and settings.hard_timeout_ms < settings.timeout_ms:
            raise InvalidArgumentError(
                f"EXPERTWIRE_HARD_TIMEOUT_MS={settings.hard_timeout_ms} is below EXPERTWIRE_TIMEOUT_MS={settings.timeout_ms}: "
                "give at least the same, so that a wait can report before its slots are taken away"
            )
        return settings

    @classmethod
    def read(cls, field_name: str, env: Mapping[str, str] | None = None) -> Any:
        """One setting alone, so that what is wrong with the others does not matter. Raises `InvalidArgumentError`."""
        source: Mapping[str, str] = os.environ if env is None else env
        item = next(item for item in fields(cls) if item.name == field_name)
        text = source.get(item.metadata["variable"], "")
        return item.metadata["parse"](item.metadata["variable"], text) if text != "" else item.default

    def given(self) -> dict[str, str]:
        """Variable → value of everything that differs from its default."""
        pairs = ((item, getattr(self, item.name)) for item in fields(self) if "variable" in item.metadata)
        return {item.metadata["variable"]: str(value) for item, value in pairs if value != item.default}

    def hard_timeout(self) -> int:
        """Milliseconds from a post to its slot's quarantine (SPEC T14)."""
        return self.hard_timeout_ms or 2 * self.timeout_ms

    def exchanged(self) -> dict[str, str]:
        """Variable → value of everything that must agree between ranks (SPEC T20), for the bootstrap."""
        return {
            item.metadata["variable"]: str(self.hard_timeout() if item.name == "hard_timeout_ms" else getattr(self, item.name))
            for item in fields(self)
            if item.metadata.get("exchanged")
        }

    def provider_settings(self) -> dict[str, object]:
        """The part that decides the ordering class, as the core takes it."""
        return {
            "delivery_complete": self.delivery_complete,
            "trust_order": self.trust_order,
            "trust_immediates": self.trust_immediates,
            "ordering": self.ordering,
            "rendezvous": " ".join(f"{name}={value}" for name, value in self.given().items() if name.startswith("FI_CXI_RDZV_")),
        }


VARIABLES: dict[str, str] = {item.metadata["variable"]: item.metadata["note"] for item in fields(Settings) if "variable" in item.metadata}
