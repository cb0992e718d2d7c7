"""The KV blocks of fake servers: held for whom, until when, pulled by whom. Pure; time is an argument.

What became of real vLLM's blocks is in the contract: a pull of what is no longer held, or of another prompt's, gives wrong tokens, and one
without the request's name, or for a prompt that is a block longer, ends the puller's engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from expertwire.errors import StateError

BLOCK_TOKENS = 16


class State(StrEnum):
    """Where the blocks of one request are."""

    HELD = "held"
    PULLED = "pulled"
    RELEASED = "released"  # early: by a refused or aborted decode
    EXPIRED = "expired"


# The one table: nothing that was given back is held again.
TRANSITIONS = {State.HELD: {State.PULLED, State.RELEASED, State.EXPIRED}}


class Pull(StrEnum):
    """What comes of asking for blocks."""

    RIGHT = "right"
    WRONG = "wrong"  # 200, and other tokens
    ENGINE_DIES = "engine dies"
    UNREACHABLE = "unreachable"  # the side channel is silent
    GONE = "gone"  # the server that held them has died


@dataclass
class Blocks:
    """Those of one request on one prefill server."""

    engine: str
    request: str
    tokens: tuple[int, ...]
    numbers: list[int]
    until: float
    state: State = State.HELD

    def become(self, state: State) -> None:
        """Raises `StateError` where the table has no such step."""
        if state not in TRANSITIONS.get(self.state, set()):
            raise StateError(f"blocks of {self.request} are {self.state}, and cannot become {state}")
        self.state = state


class World:
    """All blocks of the servers that know each other, by engine and request."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, str], Blocks] = {}
        self._next = 1
        self.unreachable: set[str] = set()  # engines whose side channel is silent
        self.dead: set[str] = set()
        self.pulls: Counter[Pull] = Counter()
        self.reasons: Counter[str] = Counter()  # why pulls were not right

    def hold(self, engine: str, request: str, tokens: Sequence[int], now: float, lease_s: float) -> Blocks:
        """Blocks for a prompt, for as long as the lease."""
        count = max(1, -(-len(tokens) // BLOCK_TOKENS))
        blocks = Blocks(engine, request, tuple(tokens), list(range(self._next, self._next + count)), now + lease_s)
        self._next += count
        self._blocks[engine, request] = blocks
        return blocks

    def pull(self, params: dict[str, Any], tokens: Sequence[int], now: float) -> Pull:
        """A decode server asks for what `params` name, for its own `tokens`."""
        outcome, why = self._judge(params, tokens, now)
        self.pulls[outcome] += 1
        if why:
            self.reasons[why] += 1
        blocks = self._of(params, now)
        if outcome in (Pull.RIGHT, Pull.WRONG) and blocks is not None and blocks.state is State.HELD:
            blocks.become(State.PULLED)
        return outcome

    def _judge(self, params: dict[str, Any], tokens: Sequence[int], now: float) -> tuple[Pull, str]:
        if not params.get("remote_request_id"):
            return Pull.ENGINE_DIES, "no remote_request_id"
        engine = str(params.get("remote_engine_id"))
        if engine in self.dead:
            return Pull.GONE, "the server has died"
        if engine in self.unreachable:
            return Pull.UNREACHABLE, "the side channel is silent"
        if not any(params.get("remote_block_ids") or ()):
            return Pull.ENGINE_DIES, "no blocks to fetch for a prompt"
        blocks = self._of(params, now)
        if blocks is None:
            return Pull.WRONG, "never held"
        if len(tokens) > BLOCK_TOKENS * len(blocks.numbers):
            return Pull.ENGINE_DIES, "a prompt that is a block longer"
        if blocks.state is not State.HELD:
            return Pull.WRONG, f"already {blocks.state}"
        if params.get("remote_block_ids") != [blocks.numbers]:
            return Pull.WRONG, "other block numbers"
        return (Pull.RIGHT, "") if tuple(tokens) == blocks.tokens else (Pull.WRONG, "another prompt")

    def release(self, params: dict[str, Any], now: float) -> bool:
        """A decode server has refused or dropped a request before it pulled: its notice frees the blocks. Whether any were held."""
        blocks = self._of(params, now)
        if blocks is None or blocks.state is not State.HELD:
            return False
        blocks.become(State.RELEASED)
        return True

    def count(self, now: float) -> Counter[State]:
        """How many requests' blocks are where."""
        for blocks in self._blocks.values():
            _lapse(blocks, now)
        return Counter(blocks.state for blocks in self._blocks.values())

    def _of(self, params: dict[str, Any], now: float) -> Blocks | None:
        blocks = self._blocks.get((str(params.get("remote_engine_id")), str(params.get("remote_request_id"))))
        if blocks is not None:
            _lapse(blocks, now)
        return blocks


def _lapse(blocks: Blocks, now: float) -> None:
    if blocks.state is State.HELD and now > blocks.until:
        blocks.become(State.EXPIRED)
