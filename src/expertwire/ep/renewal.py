"""The life of a Buffer, and how it goes on after a failure of kernels on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from expertwire.ep.config import require_int
from expertwire.ep.variants import keywords
from expertwire.errors import UnavailableError
from expertwire.fabric.config import TIMEOUT_MS_MAX

if TYPE_CHECKING:
    from expertwire.ep.cpu.backend import CpuBackend
    from expertwire.ep.cuda.backend import CudaBackend
    from expertwire.ep.handle import Identity


class State(Enum):
    """live → failed | destroyed; failed → live, by shrink or reset, | destroyed."""

    live = "live"
    failed = "failed"
    destroyed = "destroyed"


class Renewal:
    """What a Buffer has for operations that fail after their calls have returned, as those on a GPU do."""

    runtime: CpuBackend | CudaBackend
    _identity: Identity
    _state: State
    _first_error: str

    if TYPE_CHECKING:

        def _calling(self, operation: str) -> AbstractContextManager[None]: ...

        def _holding(self, operation: str, states: tuple[State, ...] = ...) -> AbstractContextManager[None]: ...

    @keywords()
    def check(self) -> None:
        """Raise what kernels have reported since the last call; waits for none. [R] Every operation begins with the same, and `destroy`
        ends with it. Nothing on CPU tensors, where a call has told everything when it returns.

        Raises:
            DeadlineError, StateError: a wait of a kernel has passed its deadline, here or on another rank, or two operations ran at the
            same time; only `reset` and `destroy` work then. WorstTokensError, MismatchError, CapacityError, InvalidArgumentError: an
            earlier call left rows out; the Buffer works on.
        """
        with self._calling("check"):
            self.runtime.check()

    @keywords()
    def reset(self, timeout_ms: int | None = None) -> None:
        """Make a Buffer on CUDA tensors live again after a failure, with the same ranks. [R] Collective; of a live Buffer too.

        Waits for this GPU, then for the other ranks: every rank calls it, once it has stopped to call anything else. Handles and hooks of
        before are refused; graphs, and tensors, stay valid (what a failed call should have filled holds anything). Masks of the low-latency
        mode are clean again.

        Args:
            timeout_ms: how long each wait for the other ranks takes at most; by default the Buffer's.

        Raises:
            DeadlineError: a rank did not come: the Buffer is failed; call again, or destroy it.
            UnavailableError: on CPU tensors.
        """
        limit = self.runtime.timeout_ms if timeout_ms is None else require_int("timeout_ms", timeout_ms, 1, TIMEOUT_MS_MAX)
        with self._holding("reset", (State.live, State.failed)):
            before, self._state = self._state, State.failed
            try:
                self.runtime.reset(limit)
            except UnavailableError:
                self._state = before
                raise
            except BaseException as error:
                if before is State.live:
                    self._first_error = f"reset: {type(error).__name__}: {error}"
                raise
            self._identity = replace(self._identity, resets=self._identity.resets + 1)
            self._state, self._first_error = State.live, ""
