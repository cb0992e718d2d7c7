"""docs/deep_ep.md says of every name of DeepEP's Buffer, and of ours, what it is here; and what it says is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ep.test_arguments import DEEP_EP_NAMES
from expertwire.compat import deep_ep
from expertwire.ep import Buffer
from expertwire.ep.variants import LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH

TEXT = (Path(__file__).parents[2] / "docs" / "deep_ep.md").read_text(encoding="utf-8")
VERDICTS = {"same", "wider", "nothing to do", "not yet", "refused", "ours"}


def rows() -> list[tuple[list[str], str]]:
    """(names, verdict) of each row of the tables that give a verdict."""
    found = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found.append((re.findall(r"`([\w.]+)`", cells[0]), cells[1]))
    return found


def test_every_row_has_a_verdict() -> None:
    assert len(rows()) > 40
    assert {verdict for _, verdict in rows()} <= VERDICTS


def test_every_public_name_is_in_the_table() -> None:
    listed = {name for names, _ in rows() for name in names}
    public = {name for name in dir(Buffer) if not name.startswith("_")} | set(inspect.signature(Buffer.__init__).parameters)
    assert public - listed <= {"self", "variants"}
    assert set(DEEP_EP_NAMES) <= listed
    utils = {f"utils.{name}" for name in deep_ep.utils.__all__}
    assert (set(deep_ep.__all__) - {"utils"}) | utils <= listed


def test_only_arguments_are_not_there_yet() -> None:
    marked = {name for names, verdict in rows() if verdict == "not yet" for name in names}
    assert marked <= set(inspect.signature(Buffer.__init__).parameters)


def test_known_variants_are_named() -> None:
    for name in (*LOW_LATENCY_COMBINE, *LOW_LATENCY_DISPATCH):
        assert f"`{name}`" in TEXT
