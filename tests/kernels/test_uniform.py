"""What all warps of a program must see alike. The interpreter has no warps, so the compiled form of kernels is looked at."""

from __future__ import annotations

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
    if low.is_last(state):
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
