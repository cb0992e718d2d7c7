"""What the options that all soaks have must be."""

from __future__ import annotations

import argparse

from expertwire.errors import InvalidArgumentError

__all__ = ["check_common"]


def check_common(args: argparse.Namespace, members: str, members_max: int) -> None:
    """`members`: the option that says how many there are, "ranks" or "agents". An error names the option, its value and the limit."""
    count = getattr(args, members)
    if not 2 <= count <= members_max:
        raise InvalidArgumentError(f"--{members} is {count}; it must be 2 to {members_max}")
    if args.iterations < 0:
        raise InvalidArgumentError(f"--iterations is {args.iterations}; the least is 0, which leaves the end to --seconds")
    if not args.seconds > 0:
        raise InvalidArgumentError(f"--seconds is {args.seconds}; it must be above 0")
    if args.seed < 0:
        raise InvalidArgumentError(f"--seed is {args.seed}; the least is 0")
