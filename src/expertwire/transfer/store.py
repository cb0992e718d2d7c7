"""Metadata by a store that all agents reach, such as torch's TCPStore: who publishes and who asks need not meet."""

from __future__ import annotations

import time
from datetime import timedelta
from importlib import import_module
from typing import Protocol, cast

from expertwire.errors import CapacityError, InvalidArgumentError, MismatchError, NotFoundError, PeerError, UnavailableError
from expertwire.transfer.metadata import CARD_BYTES_MAX

__all__ = ["KeyValueStore", "MetadataStore", "tcp_store"]

PREFIX = "expertwire/transfer"
PAUSE_S, PAUSE_S_MAX = 0.001, 0.02
_THERE, _WITHDRAWN = b"+", b"-"


class KeyValueStore(Protocol):
    """What is asked of a store; every `torch.distributed.Store` has it."""

    def set(self, key: str, value: bytes, /) -> None:
        """Put it there, over what was there."""

    def get(self, key: str, /) -> bytes:
        """What is there; only asked for a key that is."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there, at once."""


class MetadataStore:
    """Cards' records under the agent's name and a label. A label is one more record of the same agent; "" is the usual one.

    A withdrawn record is overwritten by a mark and not removed, so that who asks learns that it was withdrawn, and not that it never was.
    """

    def __init__(self, store: KeyValueStore, prefix: str = PREFIX) -> None:
        for needed in ("set", "get", "check"):
            if not callable(getattr(store, needed, None)):
                raise InvalidArgumentError(
                    f"a {type(store).__name__} is no store: it has no method {needed}(), as torch.distributed.TCPStore has"
                )
        self._store, self._prefix = store, prefix
        self._published: dict[str, set[str]] = {}

    def publish(self, name: str, data: bytes, label: str = "") -> None:
        """Put a record there. Raises `CapacityError` where it is too large, `PeerError` where the store does not answer."""
        if len(data) > CARD_BYTES_MAX:
            raise CapacityError(f"a record of {len(data)} bytes of agent {name!r} is not published, the limit is {CARD_BYTES_MAX}")
        self._put(name, label, _THERE + data)
        self._published.setdefault(name, set()).add(label)

    def fetch(self, name: str, label: str = "", *, timeout_ms: int = 5000) -> bytes:
        """The record, once it is there. Raises `NotFoundError` (not there by the deadline, or withdrawn), `PeerError`, `MismatchError`."""
        key, ends, pause = self._key(name, label), time.monotonic() + timeout_ms / 1000, PAUSE_S
        while not self._has(key):
            if time.monotonic() + pause > ends:
                raise NotFoundError(f"agent {name!r} has published nothing{_labelled(label)} within {timeout_ms} ms")
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S_MAX)
        value = self._get(key)
        if value[:1] == _WITHDRAWN:
            raise NotFoundError(f"agent {name!r} has withdrawn what it had published{_labelled(label)}")
        if value[:1] != _THERE or len(value) > CARD_BYTES_MAX + 1:
            raise MismatchError(f"under {key!r} there are {len(value)} bytes that no agent has published")
        return value[1:]

    def withdraw(self, name: str) -> None:
        """Mark everything as withdrawn that was published here under that name. Nothing was: nothing. Raises `PeerError`."""
        for label in sorted(self._published.pop(name, ())):
            self._put(name, label, _WITHDRAWN)

    def withdrawn(self, name: str, label: str = "") -> bool:
        """Whether it was there and is no more. Raises `PeerError`."""
        key = self._key(name, label)
        return self._has(key) and self._get(key)[:1] == _WITHDRAWN

    def _key(self, name: str, label: str) -> str:
        return f"{self._prefix}/{len(name)}/{name}/{label}"  # the length keeps a name with a slash in it from being another's label

    def _put(self, name: str, label: str, value: bytes) -> None:
        try:
            self._store.set(self._key(name, label), value)
        except RuntimeError as error:
            raise PeerError(f"the store did not take the metadata of agent {name!r}: {_first_line(error)}") from error

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise PeerError(f"the store was asked for {key!r} and does not answer: {_first_line(error)}") from error

    def _get(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise PeerError(f"the store was asked for {key!r} and does not answer: {_first_line(error)}") from error


def tcp_store(host: str, port: int, *, serve: bool = False, timeout_ms: int = 5000) -> KeyValueStore:
    """torch's TCPStore at that address; `serve` in one process, the others reach it there. torch is loaded here, and only here.

    Raises `UnavailableError` without torch, `PeerError` where nobody serves by the deadline.
    """
    try:
        distributed = import_module("torch.distributed")
    except ImportError as error:
        raise UnavailableError("a TCPStore is torch's: install torch, or pass a store of your own") from error
    try:
        made = distributed.TCPStore(host, port, None, serve, timedelta(milliseconds=timeout_ms), wait_for_workers=False)
    except RuntimeError as error:
        raise PeerError(f"the store at {host}:{port} cannot be {'served' if serve else 'reached'}: {_first_line(error)}") from error
    return cast(KeyValueStore, made)


def _labelled(label: str) -> str:
    return f" under label {label!r}" if label else ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
