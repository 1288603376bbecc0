#!/usr/bin/env bash
# Makes the environment VENV with PYTHON and installs the project into it, with uv when it is there, else pip.
# constraints.txt pins the CPU environment; a folder of wheels that pip knows (PIP_FIND_LINKS) is handed on to uv.
set -euo pipefail
venv=$1 python=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "opd needs Python 3.11 or newer, but $python is: $("$python" --version 2>&1); use make PYTHON=..." >&2; exit 1; }
count=$(grep -c '==' constraints.txt)
[ -e "$venv/.installed" ] ||
    echo "installing opd with PyTorch for CPU and $count pinned packages into $venv: about 2 GB, one to five minutes"
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} uv pip install --quiet --python "$venv/bin/python" \
        -c constraints.txt -e '.[dev]'
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e '.[dev]'
fi
