"""What `bench ep --loop` is asked to measure, checked without loading torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from expertwire.cli.bench.ep import Setup, parse
from expertwire.cli.bench.shaped import check_rate
from expertwire.errors import InvalidArgumentError

SECONDS_MAX = 24 * 3600
MICROBATCHES_MAX = 8


@dataclass(frozen=True)
class Loop:
    """What to measure; the same on every rank."""

    setup: Setup
    seconds: float
    microbatches: int
    shape: str  # rate of the loopback, or "bare"

    @property
    def dispatches(self) -> int:
        """Of one turn; each keeps what it received until it is checked."""
        return 4 if self.setup.ranks <= 2 else 2


def parse_loop(args: argparse.Namespace) -> Loop:
    """Check the numbers; an error names the option, its value and the limit."""
    if not 0 < args.loop <= SECONDS_MAX:
        raise InvalidArgumentError(f"--loop is {args.loop}; give seconds, more than 0 and at most {SECONDS_MAX}")
    if not 1 <= args.microbatches <= MICROBATCHES_MAX:
        raise InvalidArgumentError(f"--microbatches is {args.microbatches}; it must be 1 to {MICROBATCHES_MAX}")
    if args.shape is not None:
        check_rate(args.shape)
    setup = parse(args)
    if setup.against:
        raise InvalidArgumentError("--against compares single calls; it cannot be asked for together with --loop")
    if max(setup.node_of) == 0:
        raise InvalidArgumentError(f"--ranks-per-node puts all {setup.ranks} ranks on one node: nothing would cross the wire")
    if min(setup.tokens) < args.microbatches:
        raise InvalidArgumentError(f"--microbatches is {args.microbatches}; a rank has only {min(setup.tokens)} tokens")
    return Loop(setup, args.loop, args.microbatches, args.shape or "bare")
