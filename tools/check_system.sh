#!/bin/sh
# Says which system packages are missing before pip fails half-way in a page of compiler output.
set -u
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null 2>&1; then
    echo "Barnraise needs Python 3.10 or newer; run: sudo apt-get install python3 python3-venv python3-dev" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "Barnraise needs Python 3.10 or newer, and $("$python" --version) is $(command -v "$python");" \
         "name another one with: make setup PYTHON=python3.12" >&2
    exit 1
fi

missing=
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
compiler=$(command -v cc || command -v gcc || command -v clang) || { compiler=; missing="$missing build-essential"; }
if [ -n "$compiler" ]; then
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    has() { echo "#include <$1>" | "$compiler" -E -I"$include" - >/dev/null 2>&1; }
    has gmp.h || missing="$missing libgmp-dev"       # fastecdsa, which libp2p needs, compiles against both
    has Python.h || missing="$missing python3-dev"
else
    missing="$missing libgmp-dev python3-dev"
fi

if [ -n "$missing" ]; then
    echo "Barnraise needs system packages that are missing; run: sudo apt-get install$missing" >&2
    exit 1
fi
