"""docs/faults.md: every cell names a test that exists, or says in words why there is none."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


def test_every_cell_is_a_test_that_exists_or_says_why_not() -> None:
    text = TABLE.read_text(encoding="utf-8")
    links = dict(re.findall(r'^\[(\w+)\]: (\S+ "\w+")$', text, re.MULTILINE))
    for link in links.values():
        path, _, name = link.replace('"', "").partition(" ")
        assert f"def {name}(" in (TABLE.parent / path).resolve().read_text(encoding="utf-8"), link
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    used = set()
    for row in rows:
        assert len(row) == 5, row
        for cell in row[2:]:
            named = re.findall(r"\[(\w+)\]", cell)
            used.update(named)
            assert named or cell.startswith(("not possible", "same as", "as the", "untested")), f"{row[0]}: {cell!r}"
    assert used == set(links)
