"""Which rank owns which expert, and which node a rank belongs to. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from expertwire.errors import InvalidArgumentError, InvalidTypeError


def expert_bounds(num_experts: int, ranks: int) -> list[int]:
    """Experts in [bounds[r], bounds[r + 1]) live on rank r: consecutive, and the first E % R ranks own one more. [R + 1]."""
    share, extra = divmod(num_experts, ranks)
    return [rank * share + min(rank, extra) for rank in range(ranks + 1)]


def number_nodes(node_of: Sequence[object]) -> tuple[int, ...]:
    """Node names by rank as numbers. Numbers 0 … n−1 without a gap stay as they are (their order is the order of sums); other names are
    numbered in the order in which they first appear by rank."""
    names = set(node_of)
    if names == set(range(len(names))):
        return tuple(int(str(name)) for name in node_of)
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in node_of)


def check_node_table(name: str, node_of: Sequence[object], ranks: int | None = None) -> tuple[int, ...]:
    """A node table as numbers. Raises `InvalidArgumentError` when it does not have one entry per rank.

    Of an array or a tensor the numbers count: its elements may be hashed by identity.
    """
    try:
        names = list(getattr(node_of, "tolist", lambda: node_of)())
        if ranks is not None and len(names) != ranks:
            raise InvalidArgumentError(f"{name} has {len(names)} entries ({names}); the group has {ranks} ranks")
        if not names:
            raise InvalidArgumentError(f"{name} has no entries; it needs one for each rank")
        return number_nodes(names)
    except TypeError as error:
        raise InvalidTypeError(f"{name} is {node_of!r}; it must list hashable names of nodes, as numbers are: {error}") from error
