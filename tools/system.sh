#!/bin/sh
# Looks for what the build needs of the system, and installs what is missing with apt where root or sudo allows. Says so where not.
set -eu
PYTHON="${PYTHON:-python3}"

fail() { printf 'set-up: %s\n' "$1" >&2; exit 1; }

command -v "$PYTHON" >/dev/null 2>&1 || fail "no $PYTHON here: install Python 3.11 or newer, or say which with PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$PYTHON is $("$PYTHON" -c 'import platform; print(platform.python_version())'); 3.11 or newer is needed: say which with PYTHON=/path/to/python3.11"
series="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"

has_compiler() { command -v c++ >/dev/null 2>&1 && printf '#include <span>\nint main(){}\n' | c++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }
has_libfabric() { printf '#include <rdma/fabric.h>\n#include <rdma/fi_atomic.h>\n' | c++ -x c++ -fsyntax-only - 2>/dev/null; }
has_headers() { "$PYTHON" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; }
has_venv() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }

missing=""
has_compiler || missing="$missing g++"
{ has_compiler && has_libfabric; } || missing="$missing libfabric-dev"
has_headers || missing="$missing python$series-dev"
has_venv || missing="$missing python$series-venv"
[ -n "$missing" ] || exit 0

command -v apt-get >/dev/null 2>&1 || fail "missing:$missing (names of Debian packages), and there is no apt-get here: install them and run make again"
if [ "$(id -u)" = 0 ]; then
    as_root=""
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    fail "missing:$missing; run \`sudo apt-get install$missing\` and then make again (this user is not root, and sudo asks for a password)"
fi
echo "set-up: apt-get install$missing"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
    $as_root apt-get update -qq
    $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
has_compiler || fail "still no C++20 compiler after apt-get install$missing: a g++ of 11 or newer, or clang 14, is needed as c++"
has_libfabric || fail "rdma/fabric.h is still not found after apt-get install$missing"
has_headers || fail "Python.h of $PYTHON is still not found after apt-get install$missing: $PYTHON may not be Debian's; say which with PYTHON="
has_venv || fail "$PYTHON still has no venv after apt-get install$missing: it may not be Debian's; say which with PYTHON="
