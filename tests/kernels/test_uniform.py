"""What all warps of a program must see alike. The interpreter has no warps, so the compiled form of kernels is looked at."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra expertwire[cuda] is not installed")

COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from expertwire.ep.kernels import low_latency_words as low, notify, words

@triton.jit
def low_latency(state, call, epoch, waits, tokens_max, experts, handle):
    epoch, _ = low.next_call(state)
    if words.is_last(state):
        low.announce(state, call, epoch, 1, tl.zeros([8], tl.int64), tokens_max, experts, handle, 8, 8, 64, 2, 0)
        low.gate(state, epoch, 8, 8)
        low.say_status(state, call, epoch, waits, tokens_max, experts)
        low.consume(state, epoch, 8, 8)

@triton.jit
def high_throughput(state, call, epoch):
    notify.begin(state, 8, 8)
    notify.fail(state, epoch, epoch, epoch, epoch, epoch)
    words.finish(state, 8, 8)

for function in (low_latency, high_throughput):
    source = ASTSource(function, dict.fromkeys(function.arg_names, "i64"), constexprs={})
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ttir"])
"""
KERNELS = Path(__file__).parents[2] / "src" / "expertwire" / "ep" / "kernels"
OTHERS = {"EPOCH", "FINISHED", "ABORT", "TICKET", "RENEWED", "CLOCK", "note", "record_of"}  # words that others change beside a kernel
LOAD = re.compile(r"= tt\.load (%\S+) .*: !tt\.ptr<i64>")
STORE = re.compile(r"tt\.store (%[^\s,]+), .*: !tt\.ptr<i64>")


def unordered(code: str) -> list[str]:
    """Stores of a word that the program has loaded, with no barrier since. Each warp loads a number itself, and one of them stores: where
    that is not ordered a slow warp loads what a fast one has stored, takes another branch, and waits at other barriers than the rest."""
    loaded: list[set[str]] = [set()]  # of each region that the line is in: a barrier within a branch orders nothing behind it
    faults = []
    for line in code.splitlines():
        if line.lstrip().startswith("}"):
            loaded[-2:] = [loaded[-2] | loaded[-1]]
        if name := re.match(r"\s*(%\w+)", line):
            loaded[-1].discard(name[1])  # a name is another value's in another branch
        if re.search(r"\bbarrier\b|atomic", line):
            loaded[-1].clear()
        elif found := LOAD.search(line):
            loaded[-1].add(found[1])
        elif (found := STORE.search(line)) and found[1] in loaded[-1]:
            faults.append(line.strip())
        if re.search(r"\{(-#)?( loc\(\S+\))?$", line):
            loaded.append(set(loaded[-1]))
    return faults


def test_no_warp_loads_a_word_that_another_has_stored_since(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compiled.py"  # a kernel's source is read from its file
    script.write_text(COMPILE)
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert min(len(LOAD.findall(run.stdout)), len(STORE.findall(run.stdout))) >= 20, run.stdout
    assert unordered(run.stdout) == []


class Changing(ast.NodeVisitor):
    """Whether an expression has what one warp may see otherwise than another: the time, a load of a word that may change, or a variable or
    function that has. What an atomic gives is the same for all."""

    def __init__(self, names: set[str], functions: tuple[set[str], set[str]]) -> None:
        self.names, self.functions, self.found = names, functions, False

    def visit_Name(self, node: ast.Name) -> None:
        self.found |= node.id in self.names

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name.startswith("tl.atomic") or name in self.functions[1]:
            return
        words = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        self.found |= name == "now" or name in self.functions[0] or (name == "tl.load" and bool(words & OTHERS))
        self.generic_visit(node)


def changing(node: ast.AST, names: set[str], functions: tuple[set[str], set[str]]) -> bool:
    visitor = Changing(names, functions)
    visitor.visit(node)
    return visitor.found


def changing_names(function: ast.FunctionDef, functions: tuple[set[str], set[str]]) -> set[str]:
    names: set[str] = set()
    for _ in range(4):  # a variable of a loop may have it from a later line
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign) and changing(node.value, names, functions):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


def divided(sources: dict[str, str]) -> list[str]:
    """Branches of kernels that depend on such."""
    defined = [(path, node) for path, text in sources.items() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    atomic = {one.name for _, one in defined if ast.unparse(one.body[-1]).startswith("return tl.atomic")}
    functions: tuple[set[str], set[str]] = set(), atomic  # that return such, and that return what an atomic gives
    for _ in range(3):  # functions that return what others return
        for _, one in defined:
            names = changing_names(one, functions)
            returns = [node.value for node in ast.walk(one) if isinstance(node, ast.Return) and node.value is not None]
            if any(changing(value, names, functions) for value in returns):
                functions[0].add(one.name)
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.test)}"
        for path, one in defined
        for node in ast.walk(one)
        if isinstance(node, ast.If | ast.While) and changing(node.test, changing_names(one, functions), functions)
    ]


def test_no_branch_depends_on_what_each_warp_sees_for_itself() -> None:
    assert divided({path.name: path.read_text() for path in KERNELS.glob("*.py") if path.name != "clock.py"}) == []


def test_such_a_branch_would_be_found() -> None:
    """Of a deadline that each warp looks at by itself, and of a word by way of a function."""
    code = """
def gone(state):
    return tl.load(control_of(state) + ABORT) != 0

def wait(state, deadline_ns):
    begin = now()
    while tl.atomic_add(state, 0) == 0:
        spent = now() - begin
        if spent > deadline_ns:
            return
    if gone(state):
        return
    if tl.atomic_max(state, now()) > 0:
        return
"""
    assert {line.split(": ", 1)[1] for line in divided({"kernel": code})} == {"spent > deadline_ns", "gone(state)"}
