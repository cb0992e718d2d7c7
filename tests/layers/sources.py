"""Reads the sources as text: Python imports by ast, C++ includes and functions by a scan that skips comments and strings."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_ROOT = ROOT / "src" / "expertwire"
CPP_ROOT = ROOT / "csrc"


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    lines: int


def python_files() -> list[Path]:
    return sorted(path for path in PYTHON_ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def cpp_files() -> list[Path]:
    return sorted(path for path in CPP_ROOT.rglob("*") if path.suffix in {".hpp", ".cpp", ".h", ".cc"})


def module_name(path: Path, root: Path = PYTHON_ROOT) -> str:
    """`ep/buffer.py` → `expertwire.ep.buffer`, `ep/__init__.py` → `expertwire.ep`."""
    parts = ["expertwire", *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that the source imports, `TYPE_CHECKING` blocks and functions included.

    `from a import b` counts as `a.b`: b may be a module.
    """
    found: list[tuple[int, str]] = []
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            found.extend((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node.lineno, first.value))
    return found


def python_functions(source: str) -> list[Function]:
    """Every function with its length; a docstring is not code and does not count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            found.append(Function(node.name, node.lineno, lines))
    return found


def includes_of(source: str) -> list[tuple[int, str, bool]]:
    """(line, path, quoted) of every #include."""
    pattern = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
    return [(source.count("\n", 0, m.start()) + 1, m.group(1) or m.group(2), m.group(1) is not None) for m in pattern.finditer(source)]


def blank_cpp(source: str) -> str:
    """The source with comments, literals and preprocessor lines blanked; newlines stay, so lines keep their numbers."""
    pattern = re.compile(
        r'R"(?P<tag>[^()\\ ]{0,16})\(.*?\)(?P=tag)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
        r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        re.DOTALL | re.MULTILINE,
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), source)


_NOT_FUNCTIONS = re.compile(r"^\s*(?:if|for|while|switch|catch|do|else|try|return|namespace|extern|enum|class|struct|union|constexpr if)\b")
_OUTER = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")


def cpp_functions(source: str) -> list[Function]:
    """Outermost brace blocks that follow a parameter list, outside of any other function: their head and their extent in lines."""
    text = blank_cpp(source)
    found: list[Function] = []
    stack: list[str] = []  # "outer" for namespaces and classes, "function", "inner" for whatever is inside one, "data"
    opened: list[tuple[str, int]] = []
    head_start = 0
    for position, character in enumerate(text):
        if character == "{":
            head = text[head_start:position]
            inside = "function" in stack or "data" in stack
            if inside:
                kind = "inner"
            elif "(" in head and not _NOT_FUNCTIONS.match(head) and not re.search(r"=\s*$", head):
                kind = "function"
            elif _OUTER.search(head):
                kind = "outer"
            else:
                kind = "data"
            stack.append(kind)
            opened.append((head, head_start + len(head) - len(head.lstrip())))
            head_start = position + 1
        elif character == "}":
            if stack:
                kind = stack.pop()
                head, start = opened.pop()
                if kind == "function":
                    name = re.search(r"([\w:~]+(?:\s*operator\s*\S+)?)\s*\(", head)
                    first, last = text.count("\n", 0, start) + 1, text.count("\n", 0, position) + 1
                    found.append(Function(name.group(1) if name else head.strip()[:40], first, last - first + 1))
            head_start = position + 1
        elif character == ";" and "function" not in stack:
            head_start = position + 1
    return found
