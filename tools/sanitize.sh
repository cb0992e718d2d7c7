#!/bin/sh
# The core under AddressSanitizer and UndefinedBehaviorSanitizer with the Python suites, and under ThreadSanitizer with tests/native/race.
#
#   tools/sanitize.sh [address|thread] [pytest arguments]     by default both, with the suites below
#
# A finding ends the process that has it, so that the run fails; what it says is in build/sanitize/findings. PYTHON names the interpreter;
# JOBS how many compilers run at once, WORKERS how many processes run tests. With ccache what has not changed is not compiled again.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
JOBS=${JOBS:-2}
WORKERS=${WORKERS:-3}
WHAT=all
case "${1:-}" in address | thread) WHAT=$1; shift ;; esac
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
export PATH="$(dirname "$PYTHON"):$PATH"
TOP=$PWD/build/sanitize
FINDINGS=$TOP/findings
rm -rf "$FINDINGS"
mkdir -p "$FINDINGS"

configure() { # configure FOLDER FLAGS [OPTION...]: a build of its own
    folder=$1 flags=$2
    shift 2
    # -O1 with lines and no more: half the compiler's time of -O2 -g, which is most of the run on two cores.
    cmake -S . -B "$TOP/$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" \
        -DCMAKE_CXX_FLAGS="$flags -fno-omit-frame-pointer" -DPython_EXECUTABLE="$PYTHON" \
        -DCMAKE_CXX_COMPILER_LAUNCHER="$(command -v ccache || true)" "$@" >"$TOP/$folder.log"
}

library() { # the compiler's own copy of a run-time library, which must be loaded before Python
    path=$("${CXX:-c++}" -print-file-name="$1")
    [ -e "$path" ] || { echo "sanitize: ${CXX:-c++} has no $1; with Debian's gcc it comes with the compiler" >&2; exit 2; }
    echo "$path"
}

address() {
    # nanobind's own casts are not vptr-clean, and its hidden types cannot be.
    configure address "-fsanitize=address,undefined -fno-sanitize=vptr"
    cmake --build "$TOP/address" -j "$JOBS" --target _native _simulation
    package=$TOP/package
    rm -rf "$package"
    mkdir -p "$package"
    cp -r src/expertwire "$package/"
    rm -f "$package"/expertwire/_*.so
    cp "$TOP"/address/_native*.so "$TOP"/address/_simulation*.so "$TOP"/address/_raw_loop "$package/expertwire/"
    [ $# -gt 0 ] || set -- tests/unit tests/sim tests/fabric tests/ep tests/transfer
    # The interpreter and torch keep memory until the end: leaks are not looked for. libstdc++ comes first of all, for its exceptions are
    # intercepted only where it is there when the sanitizer starts. CUDA's library, which torch may load, maps memory in the gap that the
    # sanitizer otherwise keeps free of it, and without it fails with "out of memory".
    env LD_PRELOAD="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so.6)" \
        ASAN_OPTIONS="detect_leaks=0:protect_shadow_gap=0:abort_on_error=1:log_path=$FINDINGS/address" \
        UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:log_path=$FINDINGS/undefined" \
        PYTHONMALLOC=malloc PYTHONPATH="$package" "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 600 \
        -n "$WORKERS" --dist loadfile --max-worker-restart 1 "$@"
}

thread() {
    configure thread "-fsanitize=thread" -DEXPERTWIRE_RACE=ON
    cmake --build "$TOP/thread" -j "$JOBS" --target race
    export TSAN_OPTIONS="halt_on_error=0:exitcode=66:suppressions=$PWD/tools/thread_suppressions.txt"
    "$TOP/thread/race" local 200
    # One library, the one that is taken by default: with two of them loaded the sanitizer cannot match its suppression, and ends.
    library=$(PYTHONPATH=src "$PYTHON" -c 'from expertwire.fabric.config import Settings
from expertwire.fabric.discover import library_facts
print(library_facts(Settings())["path"])')
    "$TOP/thread/race" tcp 50 "$library"
}

report() { # at every end: what was found, also where a test failed of it
    status=$?
    if [ -n "$(ls "$FINDINGS")" ]; then
        cat "$FINDINGS"/*
        exit 1
    fi
    [ "$status" -ne 0 ] || echo "sanitize: nothing found"
    exit "$status"
}
trap report EXIT

[ "$WHAT" = thread ] || address "$@"
[ "$WHAT" = address ] || thread
