"""Every exception that Expertwire raises, as one tree.

A message says what failed, which rank or peer, the value, the limit, and what to do. Classes that stand for a bad value or a passed
deadline are also the builtin that a caller would expect (`ValueError`, `TimeoutError`, `ConnectionError`).
"""

from __future__ import annotations


class ExpertwireError(Exception):
    """Root of the tree."""


class InvalidArgumentError(ExpertwireError, ValueError):
    """An argument cannot be used; nothing was started. The message names the argument, its value and the limit."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has the wrong Python type or dtype."""


class CapacityError(ExpertwireError):
    """A buffer, table or region is too small. The message has both numbers."""


class WorstTokensError(CapacityError):
    """A dispatch sent a rank more rows than `num_worst_tokens`: on every rank, after the operation has ended; the Buffer works on.

    `rank` was sent `total` rows, `num_worst_tokens` were kept, in call `epoch`; of several ranks the first. `result` is what the dispatch
    would have returned: the rows that were kept, and a handle whose counts are theirs.
    """

    def __init__(
        self, message: str, rank: int = -1, total: int = 0, num_worst_tokens: int = 0, epoch: int = 0, result: object = None
    ) -> None:
        super().__init__(message)
        self.rank, self.total, self.num_worst_tokens, self.epoch, self.result = rank, total, num_worst_tokens, epoch, result


class StateError(ExpertwireError, RuntimeError):
    """The object cannot do this now: destroyed, failed, in use, or used from a forked child."""


class NotFoundError(InvalidArgumentError, LookupError):
    """What is named is not known here: an agent that was not added, memory that is not registered. Nothing was started."""


class NotAllowedError(StateError):
    """What is there forbids it: another process under the name of an agent that is known already."""


class ActiveError(StateError):
    """A transfer is still on its way and owns its memory: it cannot be posted again, or let go, before it has ended."""


class NotPostedError(StateError):
    """A transfer that was never posted has no outcome yet."""


class NoTelemetryError(StateError):
    """Nothing was measured of this transfer: it has not ended well, or measuring is off."""


class MismatchError(ExpertwireError):
    """Ranks disagree: another operation, handle, shape or setting. The message names the ranks and both values."""


class PeerError(ExpertwireError, ConnectionError):
    """A peer has died or fell silent. `rank` is the peer at fault."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ExcludedError(ExpertwireError, ConnectionError):
    """Other ranks go on without this one, which had not answered them: by `Buffer.shrink`, whose `members` went on, or by leaving it out of
    low-latency calls, where it may come back."""

    def __init__(self, message: str, members: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class TransferError(ExpertwireError):
    """One request failed: stale key, out of range, provider error. Other requests go on."""


class DeadlineError(ExpertwireError, TimeoutError):
    """A wait passed its deadline. Ownership stays with the request: memory may not be reused yet."""


class CancelledRequestError(ExpertwireError):
    """The request was cancelled before anything was posted, or aborted behind a failed one."""


class UnavailableError(ExpertwireError):
    """Something this machine lacks (a library, a provider, an extra). The message says how to get it."""
