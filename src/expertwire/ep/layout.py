"""Which rank owns which expert, and which node a rank belongs to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

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

    Of an array or a tensor the numbers count: its elements may be hashed by identity. A text would be a list of its letters, and a negative
    number is how others say "none": both are refused.
    """
    if isinstance(node_of, str | bytes | bytearray | Mapping | Set):
        raise InvalidTypeError(f"{name} is {node_of!r}; it must be a list with one node for each rank, in the order of the ranks")
    try:
        names = list(getattr(node_of, "tolist", lambda: node_of)())
        if ranks is not None and len(names) != ranks:
            raise InvalidArgumentError(f"{name} has {len(names)} entries ({names}); the group has {ranks} ranks")
        if not names:
            raise InvalidArgumentError(f"{name} has no entries; it needs one for each rank")
        for rank, node in enumerate(names):
            if isinstance(node, int) and node < 0:
                raise InvalidArgumentError(f"{name}[{rank}] is {node}; a node's number is at least 0")
        return number_nodes(names)
    except TypeError as error:
        raise InvalidTypeError(f"{name} is {node_of!r}; it must list hashable names of nodes, as numbers are: {error}") from error
