#!/usr/bin/env bash
# Makes the environment VENV with PYTHON that holds the experiment trackers of the extra `trackers`.
# torch first: the CPU build that constraints.txt pins must not be replaced by what they ask for.
set -euo pipefail
venv=$1 python=$2
# The trackers have bounds of their own for most of what constraints.txt pins.
core=$(mktemp)
trap 'rm -f "$core"' EXIT
grep -E '^(torch|transformers|accelerate|grpcio[a-z-]*|protobuf)==' constraints.txt >"$core"
project=(-c "$core" -e '.[trackers]' pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis beartype)
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    uv pip install --quiet --python "$venv/bin/python" -c "$core" torch
    uv pip install --quiet --python "$venv/bin/python" "${project[@]}"
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet -c "$core" torch
    "$venv/bin/python" -m pip install --quiet "${project[@]}"
fi
