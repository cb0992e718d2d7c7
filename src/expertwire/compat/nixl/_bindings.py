"""What callers import from `nixl._bindings`: exceptions, lists of descriptors, numbers, and what a transfer took."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ParamSpec, TypeVar

from expertwire import errors
from expertwire.transfer import Descriptors

__all__ = [
    "BLK_SEG",
    "DEFAULT_COMM_PORT",
    "DRAM_SEG",
    "FILE_SEG",
    "NIXL_INIT_AGENT",
    "NIXL_READ",
    "NIXL_THREAD_SYNC_DEFAULT",
    "NIXL_THREAD_SYNC_NONE",
    "NIXL_THREAD_SYNC_STRICT",
    "NIXL_WRITE",
    "OBJ_SEG",
    "VRAM_SEG",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_mem_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]

NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888


class nixl_mem_t(IntEnum):
    """Kinds of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(IntEnum):
    """Directions."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_thread_sync_t(IntEnum):
    """How an agent is to be locked. Taken and not looked at: calls from any thread are safe here."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_DEFAULT = 0


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
KIND_OF = {DRAM_SEG: "DRAM", VRAM_SEG: "VRAM", BLK_SEG: "BLOCK", OBJ_SEG: "OBJ", FILE_SEG: "FILE"}
SEGMENT_OF = {kind: segment for segment, kind in KIND_OF.items()}


class nixlNotPostedError(Exception):
    """A transfer that was never posted has no state."""


class nixlInvalidParamError(Exception):
    """An argument cannot be used."""


class nixlBackendError(Exception):
    """What moves the bytes has failed, has no room, or has not answered in time."""


class nixlNotFoundError(Exception):
    """An agent, or memory, that is not known."""


class nixlMismatchError(Exception):
    """Metadata that is none, or of a side that is set up otherwise."""


class nixlNotAllowedError(Exception):
    """What is there forbids it."""


class nixlRepostActiveError(Exception):
    """A transfer is still on its way."""


class nixlUnknownError(Exception):
    """The agent cannot do this now; the message says why."""


class nixlNotSupportedError(Exception):
    """Not there, here or at all; the message says which."""


class nixlRemoteDisconnectError(Exception):
    """The peer, which is named, has died or cannot be reached."""


class nixlCancelledError(Exception):
    """The transfer was cancelled, or given up behind one that failed."""


class nixlNoTelemetryError(Exception):
    """Nothing was measured of that transfer."""


# The first that fits, so subclasses stand before their bases.
EXCEPTIONS: tuple[tuple[type[errors.ExpertwireError], type[Exception]], ...] = (
    (errors.NoTelemetryError, nixlNoTelemetryError),
    (errors.NotFoundError, nixlNotFoundError),
    (errors.InvalidArgumentError, nixlInvalidParamError),
    (errors.NotAllowedError, nixlNotAllowedError),
    (errors.ActiveError, nixlRepostActiveError),
    (errors.NotPostedError, nixlNotPostedError),
    (errors.MismatchError, nixlMismatchError),
    (errors.PeerError, nixlRemoteDisconnectError),
    (errors.CancelledRequestError, nixlCancelledError),
    (errors.TransferError, nixlBackendError),
    (errors.CapacityError, nixlBackendError),
    (errors.DeadlineError, nixlBackendError),
    (errors.UnavailableError, nixlNotSupportedError),
    (errors.ExpertwireError, nixlUnknownError),
)
P = ParamSpec("P")
R = TypeVar("R")


def as_nixl(error: errors.ExpertwireError) -> Exception:
    """The exception that callers of NIXL know, with the same words."""
    return next(theirs for ours, theirs in EXCEPTIONS if isinstance(error, ours))(str(error))


def translated(function: Callable[P, R]) -> Callable[P, R]:
    """The same, with NIXL's exceptions, each caused by the one that it stands for."""

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*arguments, **keywords)
        except errors.ExpertwireError as error:
            raise as_nixl(error) from error

    return call


@dataclass(frozen=True, slots=True)
class nixlXferTelemetry:
    """What one transfer took. Times in µs: when it was posted (since 1970), in the post, from the post to its end."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0


class _List:
    """Descriptors that may be added to and taken away. Arrays stay as they are until then."""

    _width = 3

    @translated
    def __init__(self, type: nixl_mem_t | int, descs: Any = ()) -> None:  # noqa: A002 - NIXL's name
        """`descs`: tuples, an integer array N × 3, or a number, which says how many are expected and asks for nothing."""
        self._kind = KIND_OF[nixl_mem_t(type)]
        self._given: Descriptors | None = None
        self._rows: list[tuple[Any, ...]] = []
        if not isinstance(descs, int):
            self._given = Descriptors.of(list(descs) if isinstance(descs, tuple) else descs, self._kind)

    @classmethod
    def of(cls, descriptors: Descriptors) -> Any:
        """The list that holds those."""
        made = cls.__new__(cls)
        made._kind, made._given, made._rows = descriptors.kind, descriptors, []
        return made

    def descriptors(self) -> Descriptors:
        """All, as arrays."""
        if self._given is None:
            self._given = Descriptors.of(self._rows, self._kind)
        return self._given

    def _open(self) -> list[tuple[Any, ...]]:
        """The rows, to be changed: what was made of them counts no more."""
        if self._given is not None:
            self._rows, self._given = [self._row(index) for index in range(len(self._given))], None
        return self._rows

    def _row(self, index: int) -> tuple[Any, ...]:
        return self.descriptors()[index]

    def _checked(self, desc: tuple[Any, ...]) -> tuple[Any, ...]:
        return type(self).of(Descriptors.of([tuple(desc)], self._kind))._row(0)  # type: ignore[no-any-return]

    def getType(self) -> nixl_mem_t:
        """The kind of memory."""
        return SEGMENT_OF[self._kind]

    def descCount(self) -> int:
        """How many."""
        return len(self._rows) if self._given is None else len(self._given)

    def isEmpty(self) -> bool:
        """Whether there are none."""
        return not self.descCount()

    @translated
    def addDesc(self, desc: tuple[Any, ...]) -> None:
        """One more."""
        self._open().append(self._checked(desc))

    append = addDesc

    @translated
    def index(self, desc: tuple[Any, ...]) -> int:
        """Where it is. Raises `nixlNotFoundError`."""
        wanted = self._checked(desc)
        for index in range(self.descCount()):
            if self[index] == wanted:
                return index
        raise errors.NotFoundError(f"descriptor {tuple(desc)} is not in this list of {self.descCount()}")

    @translated
    def remDesc(self, index: int) -> None:
        """Take one away."""
        self._there(index)
        del self._open()[index]

    def clear(self) -> None:
        """Take all away."""
        self._given, self._rows = None, []

    def print(self) -> None:
        """Show all."""
        print(self, *self, sep="\n")

    def _there(self, index: int) -> None:
        if not -self.descCount() <= index < self.descCount():
            raise IndexError(f"descriptor {index} of {self.descCount()}")

    def __len__(self) -> int:
        return self.descCount()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self._there(index)
        return self._rows[index] if self._given is None else self._row(index)

    @translated
    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._there(index)
        self._open()[index] = self._checked(desc)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[index] for index in range(self.descCount()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _List) or type(self) is not type(other):
            return NotImplemented
        return self.descriptors() == other.descriptors() and self._metas() == other._metas()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def _metas(self) -> tuple[bytes, ...]:
        found = self.descriptors().metas
        return () if found is None else found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._kind}, {self.descCount()} descriptors)"


class nixlXferDList(_List):
    """Pieces to move: tuples (address, bytes, device)."""


class nixlRegDList(_List):
    """Memory to register: tuples (address, bytes, device, bytes of the caller's own)."""

    def _row(self, index: int) -> tuple[Any, ...]:
        metas = self.descriptors().metas
        return (*self.descriptors()[index], b"" if metas is None else metas[index])

    def _checked(self, desc: tuple[Any, ...]) -> tuple[Any, ...]:
        return super()._checked(desc if len(desc) > 3 else (*desc, b""))

    def _metas(self) -> tuple[bytes, ...]:
        return super()._metas() or (b"",) * self.descCount()

    def trim(self) -> nixlXferDList:
        """The same pieces, to be moved."""
        given = self.descriptors()
        made: nixlXferDList = nixlXferDList.of(Descriptors(given.kind, given.addresses, given.lengths, given.devices, owners=given.owners))
        return made
