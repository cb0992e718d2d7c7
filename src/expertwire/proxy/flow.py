"""What may happen to one pair of legs: one state, one table of transitions. Events in, actions out, time as an argument; no I/O.

A request of several prompts or `n > 1` has one `Flow` for each choice; `exchange` composes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Final, NamedTuple

from expertwire.errors import StateError


class State(IntEnum):
    """Where a pair of legs stands."""

    RECEIVED = 0  # the body is known, no leg is open
    PREFILLING = 1  # P's leg is open
    HANDOFF = 2  # P's parameters are here (or none are needed); D has been sent nothing yet
    DECODING = 3  # D has the request; nothing of its answer has left
    STREAMING = 4  # D's content leaves
    DONE = 5
    FAILED = 6
    CLIENT_GONE = 7


_RECEIVED, _DONE = State.RECEIVED, State.DONE  # CPython 3.11 takes a member from its enum by a hook, for 90 ns
TERMINAL: Final = frozenset({State.DONE, State.FAILED, State.CLIENT_GONE})


class Event(IntEnum):
    """What can happen to it."""

    START = 0
    START_ALONE = auto()  # D computes everything
    NO_SERVER = auto()  # no server could be chosen for the leg that was asked for
    UNREACHED = auto()  # no connection: nothing was sent
    EXHAUSTED = auto()  # this process has no more of what the leg needs; another server would not help
    STALE = auto()  # a connection that had been kept was closed before a byte of answer came
    PREFILLED = auto()  # P's answer, with all that D needs (call `grant` before)
    OVERLOADED = auto()  # P said 502, 503 or 504
    UNFIT = auto()  # an answer of 2xx that is none: a field is missing, no content, an error event, an end without its mark
    REFUSED = auto()  # any other answer that is not 2xx
    READY = auto()  # D's connection is in hand, nothing was written
    CONTENT = auto()  # D's first content
    ANSWERED = auto()  # D's whole answer, 2xx
    ENDED = auto()  # D's stream has come to its proper end
    LOST = auto()  # closed, reset, cut short or not HTTP, after the request was sent
    TIMED_OUT = auto()  # too long without a byte, after the request was sent
    GONE = auto()  # who asked has left, or the reply has failed for another reason


class Action(IntEnum):
    """What is to be done, in the order given."""

    CLOSE = 0  # the open leg; what was not written to may go back to its pool
    RELEASE = auto()  # free P's blocks: D was never sent their parameters
    ALONE = auto()  # from here on D computes everything
    PREFILL = auto()  # choose a P and call it
    DECODE = auto()  # choose a D and get a connection
    SEND = auto()  # write D's request, with the parameters, which are used up by this
    COMMIT = auto()  # status line, and what was held back
    FINISH = auto()  # the proper end of the reply
    FAIL = auto()  # the failure's own status and body
    ABORT = auto()  # the status has left: an error event, then close without an end


@dataclass(frozen=True, slots=True)
class Limits:
    """How often is tried. `prefill_attempts` are of one prefill; `decode_attempts` and `reprefills` of the whole flow."""

    prefill_attempts: int = 3
    decode_attempts: int = 2
    reprefills: int = 2
    alone_allowed: bool = False


class Flow:
    """One pair of legs. `step` is the only thing that changes its state."""

    __slots__ = ("deadline", "decodes", "limits", "prefills", "reprefills", "state")

    def __init__(self, limits: Limits) -> None:
        self.state = _RECEIVED
        self.limits = limits
        self.prefills = 0  # attempts of the present prefill
        self.decodes = 0
        self.reprefills = 0
        self.deadline: float | None = None  # of the parameters that are held and unused; None: none are

    def grant(self, deadline: float) -> None:
        """P's parameters have come; they may be used before `deadline` (s). To be followed by PREFILLED."""
        self.deadline = deadline

    def step(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take one event at time `now` (s, monotonic). Raises StateError where it cannot happen; after the end everything is ignored."""
        for target, actions, guard, effect in _ROWS[self.state][event]:
            if guard is None or guard(self, now):
                self.state = target
                if effect is not None:
                    effect(self)
                return actions
        raise StateError(f"{event.name} cannot happen to a request that is {self.state.name}; a fault of the proxy, please report it")

    @property
    def over(self) -> bool:
        """Nothing will change any more."""
        return self.state >= _DONE


class Move(NamedTuple):
    """One way out of a state: taken if `guard` holds."""

    target: State
    actions: tuple[Action, ...] = ()
    guard: Callable[[Flow, float], bool] | None = None
    effect: Callable[[Flow], None] | None = None


def _count_prefill(flow: Flow) -> None:
    flow.prefills += 1


def _count_decode(flow: Flow) -> None:
    flow.decodes += 1


def _count_reprefill(flow: Flow) -> None:
    flow.reprefills += 1
    flow.prefills = 1
    flow.deadline = None


def _use_up(flow: Flow) -> None:
    flow.deadline = None


def _again_prefill(flow: Flow, now: float) -> bool:
    return flow.prefills < flow.limits.prefill_attempts


def _alone_allowed(flow: Flow, now: float) -> bool:
    return flow.limits.alone_allowed


def _alone(flow: Flow, now: float) -> bool:
    return flow.prefills == 0


def _again_alone(flow: Flow, now: float) -> bool:
    return flow.prefills == 0 and flow.decodes < flow.limits.decode_attempts


def _again_both(flow: Flow, now: float) -> bool:
    return flow.prefills > 0 and flow.decodes < flow.limits.decode_attempts and flow.reprefills < flow.limits.reprefills


def _fresh(flow: Flow, now: float) -> bool:
    return flow.prefills == 0 or (flow.deadline is not None and now < flow.deadline)


def _again_expired(flow: Flow, now: float) -> bool:
    return flow.reprefills < flow.limits.reprefills


def _go_alone(flow: Flow) -> None:
    flow.prefills = 0
    flow.decodes += 1


_S, _E, _A = State, Event, Action
_FAIL = (Move(_S.FAILED, (_A.FAIL,)),)
_ABORT = (Move(_S.FAILED, (_A.ABORT,)),)
_PREFILL_AGAIN = Move(_S.PREFILLING, (_A.PREFILL,), _again_prefill, _count_prefill)
_TO_ALONE = Move(_S.HANDOFF, (_A.ALONE, _A.DECODE), _alone_allowed, _go_alone)
_UNHELD_FAIL = Move(_S.FAILED, (_A.FAIL,), _alone)
_HELD_FAIL = Move(_S.FAILED, (_A.RELEASE, _A.FAIL), None, _use_up)

# A state's row says what it knows; every other event is an error, but after the end, where all are ignored: what was already on its way
# when a leg was closed may still be told.
TABLE: Final[dict[State, dict[Event, tuple[Move, ...]]]] = {
    _S.RECEIVED: {
        _E.START: (Move(_S.PREFILLING, (_A.PREFILL,), None, _count_prefill),),
        _E.START_ALONE: (Move(_S.HANDOFF, (_A.DECODE,), None, _count_decode),),
        _E.GONE: (Move(_S.CLIENT_GONE),),
    },
    _S.PREFILLING: {
        _E.PREFILLED: (Move(_S.HANDOFF, (_A.DECODE,), None, _count_decode),),
        _E.UNREACHED: (_PREFILL_AGAIN, _TO_ALONE, *_FAIL),
        _E.STALE: (_PREFILL_AGAIN, *_FAIL),
        _E.OVERLOADED: (_PREFILL_AGAIN, *_FAIL),
        _E.NO_SERVER: (_TO_ALONE, *_FAIL),
        _E.EXHAUSTED: _FAIL,
        _E.REFUSED: _FAIL,
        _E.UNFIT: _FAIL,
        _E.LOST: _FAIL,
        _E.TIMED_OUT: _FAIL,
        _E.GONE: (Move(_S.CLIENT_GONE, (_A.CLOSE,)),),
    },
    _S.HANDOFF: {
        _E.READY: (
            Move(_S.DECODING, (_A.SEND,), _fresh, _use_up),
            Move(_S.PREFILLING, (_A.CLOSE, _A.RELEASE, _A.PREFILL), _again_expired, _count_reprefill),
            Move(_S.FAILED, (_A.CLOSE, _A.RELEASE, _A.FAIL), None, _use_up),
        ),
        _E.UNREACHED: (
            Move(_S.HANDOFF, (_A.DECODE,), _again_alone, _count_decode),
            Move(_S.PREFILLING, (_A.RELEASE, _A.PREFILL), _again_both, _count_reprefill),
            _UNHELD_FAIL,
            _HELD_FAIL,
        ),
        _E.NO_SERVER: (_UNHELD_FAIL, _HELD_FAIL),
        _E.EXHAUSTED: (_UNHELD_FAIL, _HELD_FAIL),
        _E.GONE: (
            Move(_S.CLIENT_GONE, (_A.CLOSE,), _alone),
            Move(_S.CLIENT_GONE, (_A.CLOSE, _A.RELEASE), None, _use_up),
        ),
    },
    _S.DECODING: {
        _E.CONTENT: (Move(_S.STREAMING, (_A.COMMIT,)),),
        _E.ANSWERED: (Move(_S.DONE, (_A.COMMIT, _A.FINISH)),),
        _E.STALE: (
            Move(_S.HANDOFF, (_A.DECODE,), _again_alone, _count_decode),
            Move(_S.PREFILLING, (_A.PREFILL,), _again_both, _count_reprefill),
            *_FAIL,
        ),
        _E.EXHAUSTED: _FAIL,
        _E.REFUSED: _FAIL,
        _E.UNFIT: _FAIL,
        _E.LOST: _FAIL,
        _E.TIMED_OUT: _FAIL,
        _E.GONE: (Move(_S.CLIENT_GONE, (_A.CLOSE,)),),
    },
    _S.STREAMING: {
        _E.ENDED: (Move(_S.DONE, (_A.FINISH,)),),
        _E.UNFIT: _ABORT,
        _E.LOST: _ABORT,
        _E.TIMED_OUT: _ABORT,
        _E.GONE: (Move(_S.CLIENT_GONE, (_A.CLOSE,)),),
    },
    **{state: {event: (Move(state),) for event in Event} for state in (_S.DONE, _S.FAILED, _S.CLIENT_GONE)},
}
# The same, by index: hashing an enum's member costs more than all the rest of a step.
_ROWS: Final = tuple(tuple(TABLE[state].get(event, ()) for event in Event) for state in State)
