"""The arrows of ARCHITECTURE.md, and the house rules that a parser can see."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from layers.sources import (
    CPP_ROOT,
    PYTHON_ROOT,
    ROOT,
    cpp_files,
    cpp_functions,
    imports_of,
    includes_of,
    module_name,
    python_files,
    python_functions,
)

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# What a room of the Python package may import of the package. `errors` is everybody's; a room may always import itself.
PYTHON_ARROWS: dict[str, set[str]] = {
    "expertwire": set(),
    "__main__": {"cli"},
    "errors": set(),
    "fabric": {"_native"},
    "ep": {"fabric"},
    "transfer": {"fabric"},
    "proxy": set(),
    "compat": {"ep", "transfer", "fabric"},  # of fabric the settings alone
    "testing": {"fabric", "_simulation", "testing.transfers"},
    "testing.transfers": {"fabric", "testing", "transfer"},
    "testing.http": {"proxy"},
    "cli": {"fabric", "ep", "transfer", "proxy", "compat", "testing", "_native", "_simulation"},
}

CPP_ARROWS: dict[str, set[str]] = {
    "engine": set(),
    "rows": set(),
    "exchange": {"engine", "rows"},
    "provider": {"engine"},
    "runtime": {"engine", "exchange", "rows", "provider"},
    "bind": {"engine", "exchange", "rows", "provider", "runtime"},
    "fuzz": {"engine", "provider", "runtime"},
    "raw": set(),  # what the engine is compared with may share nothing with it
}
PURE_ROOMS = ("engine", "exchange", "rows")
# The standard library without threads, clocks, files and chance; immintrin for non-temporal stores.
PURE_HEADERS = re.compile(
    r"algorithm|array|atomic|bit|bitset|cassert|cinttypes|cmath|compare|concepts|cstddef|cstdint|cstring|deque|functional|initializer_list"
    r"|iterator|limits|map|memory|new|numeric|optional|ostream|queue|ranges|set|span|sstream|stdexcept|string|string_view|tuple|type_traits"
    r"|unordered_map|unordered_set|utility|variant|vector|immintrin\.h|emmintrin\.h|arm_neon\.h|xmmintrin\.h"
)
HEAVY = {"torch", "numpy", "rich"}


def room_of(module: str) -> str:
    """`expertwire.ep.buffer` → `ep`; the package itself → `expertwire`; `expertwire.errors` → `errors`."""
    parts = module.split(".")
    if len(parts) == 1:
        return "expertwire"
    if parts[1:3] in (["testing", "http"], ["testing", "transfers"]):
        return ".".join(parts[1:3])
    return parts[1]


def arrow_faults(module: str, source: str, is_package: bool) -> list[str]:
    room = room_of(module)
    faults = []
    if room not in PYTHON_ARROWS:
        return [f"{module}: no room of that name in ARCHITECTURE.md"]
    for line, name in imports_of(source, module, is_package):
        if name.split(".")[0] != "expertwire":
            continue
        target = room_of(name)
        if target.startswith("__") or target in {room, "errors", "expertwire"}:  # the last is the version, no code
            continue
        if target not in PYTHON_ARROWS[room]:
            faults.append(f"{module}:{line}: {room} may not import {name}")
    return faults


def include_faults(room: str, name: str, source: str) -> list[str]:
    faults = []
    for line, header, quoted in includes_of(source):
        target = header.split("/")[0]
        if target in CPP_ARROWS and (CPP_ROOT / header).parent != CPP_ROOT and quoted:
            if target != room and target not in CPP_ARROWS[room]:
                faults.append(f"{name}:{line}: {room} may not include {header}")
        elif room in PURE_ROOMS and not PURE_HEADERS.fullmatch(header):
            faults.append(f"{name}:{line}: {room} is pure and may not include {header}")
        elif room != "bind" and re.match(r"nanobind/|Python\.h|pybind11/", header):
            faults.append(f"{name}:{line}: only bind may know Python, not {room} ({header})")
        elif room not in ("provider", "raw") and header.startswith("rdma/"):
            faults.append(f"{name}:{line}: only provider and raw may know libfabric, not {room} ({header})")
    return faults


def test_python_arrows() -> None:
    faults = [fault for path in python_files() for fault in arrow_faults(module_name(path), path.read_text(), path.name == "__init__.py")]
    assert not faults, "\n".join(faults)


def test_cpp_arrows() -> None:
    files = cpp_files()
    assert {path.relative_to(CPP_ROOT).parts[0] for path in files} <= set(CPP_ARROWS)
    faults = [
        fault
        for path in files
        for fault in include_faults(path.relative_to(CPP_ROOT).parts[0], str(path.relative_to(ROOT)), path.read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("expertwire.ep.buffer", "from expertwire.transfer import agent"),
        ("expertwire.ep.buffer", "from ..proxy import flow"),
        ("expertwire.ep.buffer", "def f():\n    import expertwire._native"),
        ("expertwire.fabric.endpoint", "from expertwire.ep import buffer"),
        ("expertwire.fabric.endpoint", "from expertwire import cli"),
        ("expertwire.proxy.flow", "from expertwire.fabric import config"),
        ("expertwire.testing.http.fake_vllm", "import expertwire.fabric"),
        ("expertwire.errors", "import expertwire.fabric.config"),
        ("expertwire.fabric.endpoint", "import importlib\nimportlib.import_module('expertwire.ep')"),
        ("expertwire.attic.old", "import os"),
    ],
)
def test_a_wrong_python_arrow_is_seen(module: str, source: str) -> None:
    assert len(arrow_faults(module, source, is_package=False)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("engine", '#include "provider/provider.hpp"'),
        ("engine", "#include <thread>"),
        ("exchange", '#include "runtime/context.hpp"'),
        ("exchange", "  #  include <sys/mman.h>"),
        ("rows", '#include "engine/types.hpp"'),
        ("provider", '#include "exchange/port.hpp"'),
        ("runtime", "#include <nanobind/nanobind.h>"),
        ("runtime", "#include <rdma/fabric.h>"),
        ("raw", '#include "engine/types.hpp"'),
    ],
)
def test_a_wrong_include_is_seen(room: str, source: str) -> None:
    assert len(include_faults(room, "file", source)) == 1


def test_file_lengths() -> None:
    own = [path for folder in ("tests", "benchmarks", "examples", "shims") for path in sorted((ROOT / folder).rglob("*.py"))]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in [*python_files(), *cpp_files(), *own]
        if (lines := path.read_text().count("\n")) > FILE_LINES_MAX
    }
    assert not long, f"files of more than {FILE_LINES_MAX} lines: {long}"


def test_function_lengths() -> None:
    sources = [(path, python_functions(path.read_text())) for path in python_files()]
    sources += [(path, cpp_functions(path.read_text())) for path in cpp_files()]
    long = [
        f"{path.relative_to(ROOT)}:{function.line}: {function.name} has {function.lines} lines"
        for path, functions in sources
        for function in functions
        if function.lines > FUNCTION_LINES_MAX
    ]
    assert not long, f"functions of more than {FUNCTION_LINES_MAX} lines:\n" + "\n".join(long)


def test_the_cpp_scan_sees_functions() -> None:
    body = "\n".join(["    step();  // }"] * 71)
    source = (
        "namespace a {\nstruct S {\n  int x = 0;\n  int get() const { return x; }\n};\n"
        'const char* text = "{";\nint table[] = {1, 2};\n'
        f"template <class T>\nauto Long::run(int a, std::span<T> b) -> int {{\n  auto inner = [&](int) {{ return 1; }};\n{body}\n}}\n"
        "S::S() : x{1}, y(2) {\n}\n}\n"
    )
    found = {function.name: function.lines for function in cpp_functions(source)}
    assert found["get"] == 1
    assert found["Long::run"] > FUNCTION_LINES_MAX
    assert "inner" not in found


def environment_reads(source: str) -> list[int]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv", "environ", "getenv"}
    lines = [
        node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names
    ]
    return sorted(set(lines))


def test_the_environment_has_one_reader() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if path != PYTHON_ROOT / "fabric" / "config.py"
        for line in environment_reads(path.read_text())
    ]
    assert not faults, f"the environment is read outside fabric/config.py: {faults}"
    # One exception in C++: loading libfabric must set one variable around dlopen and restores it.
    pattern = re.compile(r"\b(?:secure_)?(?:getenv|setenv|putenv|unsetenv)\s*\(")
    native = [str(path.relative_to(ROOT)) for path in cpp_files() if path.stem != "loader" and pattern.search(path.read_text())]
    assert not native, f"the environment is touched in {native}"
    assert environment_reads("import os\nx = os.environ['A']\ny = os.getenv('B')") == [2, 3]


def made_anywhere(source: str) -> list[int]:
    """Lines that make a tensor on torch's default device, which is the caller's: it is another while a model is loaded. Ours are written
    to by address, so that one elsewhere ends the process."""
    factories = {
        f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "asarray", "rand", "randn")
    }
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in factories and not any(one.arg == "device" for one in node.keywords)
    ]


def test_every_tensor_has_a_device() -> None:
    rooms = [PYTHON_ROOT / room for room in ("ep", "fabric", "transfer", "compat")]
    oracles = {PYTHON_ROOT / "ep" / name for name in ("reference.py", "low_latency_reference.py")}
    faults = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if path not in oracles and any(room in path.parents for room in rooms)
        for line in made_anywhere(path.read_text())
    ]
    assert not faults, f"tensors on the caller's default device: {faults}"
    assert made_anywhere("x = torch.empty(3)\ny = torch.zeros((2, 1), device=z)") == [1]


def work_at_import(source: str) -> list[int]:
    """Lines of module-level statements that do something: calls as statements, loops, and blocks other than an import's guard."""
    lines = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                lines.append(node.lineno)
        elif isinstance(node, ast.For | ast.While | ast.With | ast.AugAssign | ast.Delete | ast.Assert | ast.Raise):
            lines.append(node.lineno)
        elif isinstance(node, ast.If) and ast.unparse(node.test) not in {"TYPE_CHECKING", "__name__ == '__main__'"}:
            lines.append(node.lineno)
    return lines


def test_importing_does_no_work() -> None:
    faults = [f"{path.relative_to(ROOT)}:{line}" for path in python_files() for line in work_at_import(path.read_text())]
    assert not faults, f"module-level work in {faults}"
    assert work_at_import("import os\nprint(1)\nfor i in x:\n    pass\nX = 3\n'''doc'''") == [2, 3]


def run_python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_the_core() -> None:
    loaded = run_python("import sys, expertwire; print(sorted(m for m in sys.modules))")
    modules = set(ast.literal_eval(loaded))
    assert "expertwire" in modules
    assert not modules & {"torch", "numpy", "rich", "expertwire._native", "expertwire._simulation"}


def test_the_proxy_needs_neither_torch_nor_the_core() -> None:
    modules = [name for path in python_files() if (name := module_name(path)).startswith("expertwire.proxy")]
    script = f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; print(sorted(m for m in sys.modules))"
    loaded = set(ast.literal_eval(run_python(script)))
    assert "expertwire.proxy.flow" in loaded
    assert not loaded & {"torch", "numpy", "rich", "expertwire._native", "expertwire._simulation", "expertwire.fabric"}


# In expertwire.proxy everything is pure but what stands in `http` and these: no socket, no loop, no clock.
PROXY_EDGES = {"server", "admin", "log", "workers", "worker", "channel"}
PROXY_IMPURE = {"asyncio", "socket", "ssl", "select", "signal", "threading", "os", "time", "datetime", "random", "secrets"}
PROXY_IMPURE |= {"uvloop", "httptools"}


def impure_imports(module: str, source: str) -> list[str]:
    return [f"{module}:{line}: {name}" for line, name in imports_of(source, module, False) if name.split(".")[0] in PROXY_IMPURE]


def test_the_proxys_decisions_are_pure() -> None:
    faults = []
    for path in python_files():
        parts = path.relative_to(PYTHON_ROOT).with_suffix("").parts
        if parts[0] == "proxy" and parts[1] != "http" and parts[1] not in PROXY_EDGES:
            faults += impure_imports(module_name(path), path.read_text())
    assert not faults, "\n".join(faults)
    assert impure_imports("expertwire.proxy.flow", "from time import monotonic") == ["expertwire.proxy.flow:1: time.monotonic"]


def test_the_command_line_loads_lazily() -> None:
    loaded = run_python("import sys, expertwire.cli.main; print(sorted(m for m in sys.modules))")
    assert not set(ast.literal_eval(loaded)) & {"torch", "numpy", "expertwire._native", "expertwire._simulation", "expertwire.ep"}


def test_importing_everything_leaves_no_trace() -> None:
    modules = [module_name(path) for path in python_files() if path.name != "__main__.py"]
    script = f"""
import importlib, os, signal, sys, threading
import torch, torch.distributed
environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
descriptors = set(os.listdir("/proc/self/fd"))
for name in {modules!r}:
    importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert dict(os.environ) == environment
assert signal.getsignal(signal.SIGINT) is handler
assert not torch.distributed.is_initialized()
left = set(os.listdir("/proc/self/fd")) - descriptors
assert len(left) <= 1, left  # the listing's own
with open("/proc/self/task/" + str(os.getpid()) + "/children") as children:
    assert children.read() == ""
print("done")
"""
    assert run_python(script) == "done"


def test_every_module_has_a_docstring() -> None:
    sources = [(path, path.read_text()) for path in python_files()]
    bare = [str(path.relative_to(ROOT)) for path, source in sources if source.strip() and ast.get_docstring(ast.parse(source)) is None]
    assert not bare, bare


def test_rooms_are_where_the_house_says() -> None:
    rooms = {path.relative_to(PYTHON_ROOT).parts[0] for path in python_files() if len(path.relative_to(PYTHON_ROOT).parts) > 1}
    assert rooms <= {room for room in PYTHON_ARROWS if "." not in room}
    assert Path(ROOT / "ARCHITECTURE.md").exists()
