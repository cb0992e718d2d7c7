"""Prints the requirements of one of pyproject.toml's extras, one a line: `python tools/extra.py dev`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
print("\n".join(project["optional-dependencies"][sys.argv[1]]))
