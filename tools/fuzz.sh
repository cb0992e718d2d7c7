#!/bin/sh
# The fuzz targets of csrc/fuzz under AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tools/fuzz.sh [SECONDS]     each target for as long (60), from the inputs kept in csrc/fuzz/corpus
#
# Needs clang++ (CLANG names it). What it finds is written to build/fuzz/findings, and ends the run; `build/fuzz/fuzz_NAME FILE` replays it.
# PYTHON names the interpreter that CMake is to find.
set -eu
cd "$(dirname "$0")/.."
SECONDS_EACH=${1:-60}
PYTHON=${PYTHON:-.venv/bin/python}
CLANG=${CLANG:-clang++}
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)')
export PATH="$(dirname "$PYTHON"):$PATH"
command -v "$CLANG" >/dev/null || { echo "fuzz: no $CLANG; libFuzzer comes with clang" >&2; exit 2; }
TOP=$PWD/build/fuzz
mkdir -p "$TOP/findings"
cmake -S . -B "$TOP" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$CLANG" -DPython_EXECUTABLE="$PYTHON" \
    -DEXPERTWIRE_FUZZ=ON -DCMAKE_CXX_FLAGS="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all" >"$TOP/log"
cmake --build "$TOP" -j "${JOBS:-2}" --target fuzz_engine fuzz_peer_bytes
for target in engine peer_bytes; do
    mkdir -p "$TOP/grown/$target"
    "$TOP/fuzz_$target" -max_total_time="$SECONDS_EACH" -max_len=2048 -artifact_prefix="$TOP/findings/$target-" -print_final_stats=1 \
        "$TOP/grown/$target" "csrc/fuzz/corpus/$target"
done
