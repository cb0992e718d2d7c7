"""What the proxy is told: a TOML file, flags over it, and errors that name the key, its value and what it may be."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

from expertwire.errors import InvalidArgumentError
from expertwire.proxy.flow import Limits
from expertwire.proxy.legs import Rules
from expertwire.proxy.policy import Fleet, Policy, ServerConfig, Side

BATCHES: Final = ("split", "decode")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class KvConfig:
    """P's lease of its blocks (`kv_lease_duration` of its `kv_connector_extra_config`), and how much of it is left to D."""

    lease_s: float = 30.0
    margin_s: float = 5.0
    release: bool = True  # free P's blocks early if D will not come for them


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    """In seconds."""

    connect_s: float = 5.0
    prefill_first_byte_s: float = 300.0
    decode_first_byte_s: float = 300.0
    idle_s: float = 120.0  # between two pieces of an answer
    client_head_s: float = 30.0  # for a client's head, and as long again for each piece of its body
    client_idle_s: float = 75.0  # a client's connection between two requests
    pool_idle_s: float = 4.0  # vLLM's server closes at 5
    release_s: float = 5.0
    shutdown_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Of everything that a client or a server could make grow."""

    head_bytes: int = 65_536
    headers: int = 128
    body_bytes: int = 67_108_864
    reply_bytes: int = 268_435_456
    held_bytes: int = 1_073_741_824  # of all bodies above `held.FREE_BYTES` together
    event_bytes: int = 8_388_608
    pipelined: int = 16
    connections: int = 16_384
    pool_per_server: int = 8_192
    backlog: int = 4_096


@dataclass(frozen=True, slots=True)
class RetriesConfig:
    """See `flow.Limits`."""

    prefill_attempts: int = 3
    decode_attempts: int = 2
    reprefills: int = 2


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """A server is passed over for `open_s` after `failures` failures of its transport in a row."""

    failures: int = 3
    open_s: float = 5.0


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """Where servers are added and removed. Port 0: nowhere."""

    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """For https servers. `ca_file` "": the system's."""

    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """See `log`."""

    level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything. Made by `load` or `from_servers`, changed by `override`; each checks all of it."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    policy: str = "least_loaded"
    session_header: str = "x-session-id"
    batch: str = "split"
    decode_alone_below_tokens: int = 0
    allow_decode_alone: bool = False
    reuse_tokens: bool = True
    max_branches: int = 128
    in_flight_limit: int = 4096
    retry_after_s: int = 1
    show_servers: bool = False
    prefill: tuple[ServerConfig, ...] = ()
    decode: tuple[ServerConfig, ...] = ()
    kv: KvConfig = field(default_factory=KvConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    retries: RetriesConfig = field(default_factory=RetriesConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def flow_limits(self) -> Limits:
        """As the flow takes them."""
        retries = self.retries
        return Limits(retries.prefill_attempts, retries.decode_attempts, retries.reprefills, self.allow_decode_alone)

    def rules(self) -> Rules:
        """As the splitting of bodies takes them."""
        return Rules(self.batch == "split", self.decode_alone_below_tokens, self.reuse_tokens, self.max_branches)

    def fleet(self) -> Fleet:
        """The servers, as they are at start."""
        fleet = Fleet(Policy(self.policy), self.breaker.failures, self.breaker.open_s)
        for side, servers in ((Side.PREFILL, self.prefill), (Side.DECODE, self.decode)):
            for index, server in enumerate(servers):
                fleet.add(side, server, f"{side}[{index}].url")
        return fleet


_KEY: Final = re.compile(r"\s*([\w.-]+)\s*=")
_TABLE: Final = re.compile(r"\s*\[{1,2}\s*([\w.-]+)\s*\]")
_ALL: Final = frozenset({"0.0.0.0", "::"})
_CHOICES: Final = {"policy": tuple(Policy), "batch": BATCHES, "log.level": LOG_LEVELS}
# (least, most) of numbers; any other is at least 1 or above 0.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "port": (0, 65535),
    "admin.port": (0, 65535),
    "workers": (1, 1024),
    "decode_alone_below_tokens": (0, 2**31),
    "kv.margin_s": (0.0, math.inf),
    "retries.reprefills": (0, 100),
    "retries.prefill_attempts": (1, 100),
    "retries.decode_attempts": (1, 100),
    "limits.head_bytes": (1024, 2**24),
    "limits.backlog": (1, 2**31 - 1),
}


def load(path: Path, *, servers: bool = True) -> Config:
    """Read a TOML file. InvalidArgumentError names the file, the key, the value and what it may be.

    `servers` False: they need not be there; who calls has them from elsewhere, and `override` looks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{path}: {_where(text, error)}{error}") from error
    try:
        return _checked(_read(Config, table, ""), servers)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error}") from error


def _where(text: str, error: tomllib.TOMLDecodeError) -> str:
    """`timeouts.connect_s: ` where the line that cannot be read begins as a key."""
    lines = text.splitlines()
    if (found := re.search(r"at line (\d+)", str(error))) is None or not 0 < int(found[1]) <= len(lines):
        return ""
    line = int(found[1])
    if (key := _KEY.match(lines[line - 1])) is None:
        return ""
    tables = [match[1] for above in lines[: line - 1] if (match := _TABLE.match(above)) is not None]
    return f"{tables[-1]}.{key[1]}: " if tables else f"{key[1]}: "


def from_table(table: dict[str, Any]) -> Config:
    """A configuration from what TOML gives."""
    return _checked(_read(Config, table, ""))


def override(config: Config, **changes: Any) -> Config:
    """Flags over a configuration: keys as in the file, a table's with `__` (`admin__port=0`); None is not given."""
    tables: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in changes.items():
        if value is not None:
            table, _, key = name.rpartition("__")
            (tables.setdefault(table, {}) if table else plain)[key] = value
    for table, values in tables.items():
        plain[table] = dataclasses.replace(getattr(config, table), **values)
    return _checked(dataclasses.replace(config, **plain))


def servers_of(words: list[str]) -> tuple[ServerConfig, ...]:
    """`URL` or `NAME=URL`, as the command line gives them."""
    servers = []
    for word in words:
        name, sign, url = word.partition("=")
        servers.append(ServerConfig(url, name) if sign and "/" not in name else ServerConfig(word))
    return tuple(servers)


def _read(kind: type[Any], table: dict[str, Any], prefix: str) -> Any:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            meant = f"did you mean {prefix}{near[0]}?" if near else f"there is {', '.join(hints)}"
            raise InvalidArgumentError(f"there is no key {name}; {meant}")
        values[key] = _value(hints[key], name, value)
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidArgumentError(f"{prefix.rstrip('.')}: url is missing") from error


def _value(hint: Any, name: str, value: Any) -> Any:
    if hint == tuple[ServerConfig, ...]:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise InvalidArgumentError(f"{name} is {value!r}; give tables: [[{name}]] with url")
        return tuple(_read(ServerConfig, item, f"{name}[{index}].") for index, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise InvalidArgumentError(f"{name} is {value!r}; give a table: [{name}]")
        assert isinstance(hint, type)
        return _read(hint, value, f"{name}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise InvalidArgumentError(f"{name} is {value!r}; give {words[hint]}")
    return value


def _checked(config: Config, servers: bool = True) -> Config:
    _check_numbers(config, "")
    for name, choices in _CHOICES.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value not in choices:
            raise InvalidArgumentError(f"{name} is {value!r}; give one of {', '.join(choices)}")
    for side in Side:
        if servers and not getattr(config, side):
            raise InvalidArgumentError(f"{side} has no server; give one at least: [[{side}]] with url, or --{side} URL")
    if config.kv.margin_s >= config.kv.lease_s:
        raise InvalidArgumentError(f"kv.margin_s is {config.kv.margin_s:g}; it must be below kv.lease_s, which is {config.kv.lease_s:g}")
    for key in ("body_bytes", "reply_bytes"):
        if (value := getattr(config.limits, key)) > config.limits.held_bytes:
            raise InvalidArgumentError(
                f"limits.{key} is {value}; it must not be above limits.held_bytes, which is {config.limits.held_bytes}"
            )
    if config.port and config.admin.port == config.port and (config.admin.host == config.host or {config.host, config.admin.host} & _ALL):
        raise InvalidArgumentError(f"admin.port is {config.admin.port}, which is port too; give another --admin-port")
    if not config.host:
        raise InvalidArgumentError("host is ''; give an address to listen on, 0.0.0.0 for all")
    if config.tls.ca_file and not Path(config.tls.ca_file).is_file():
        raise InvalidArgumentError(f"tls.ca_file is {config.tls.ca_file!r}, which is no file")
    config.fleet()  # raises for a URL that cannot be one, and a name that is there twice
    return config


def _check_numbers(table: Any, prefix: str) -> None:
    for item in dataclasses.fields(table):
        value, name = getattr(table, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            _check_numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least, most = _RANGES.get(name, (1, math.inf) if isinstance(value, int) else (0.001, 1e9))
            if not least <= value <= most:
                limit = f"{least} or more" if most in (math.inf, 1e9) else f"{least} to {most}"
                raise InvalidArgumentError(f"{name} is {value}; give {limit}")
