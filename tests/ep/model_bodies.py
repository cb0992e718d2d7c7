"""The example's model on ranks of the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from harness import Rank

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_model.py"


def example() -> Any:
    """The example as a module, which is no package's."""
    if "moe_model" not in sys.modules:
        spec = importlib.util.spec_from_file_location("moe_model", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["moe_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["moe_model"])
    return sys.modules["moe_model"]


def spread(rank: Rank, node_of: tuple[int, ...], sizes: dict[str, int], train: bool) -> dict[str, Any]:
    """What the ranks' model did, as plain values: the class is the example's, which another process knows under no name."""
    model = example()
    return dict(vars(model.spread(rank.buffer(node_of), rank.group, model.Shape(**sizes), train)))
