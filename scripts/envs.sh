#!/usr/bin/env bash
# Makes the environment VENV with PYTHON that holds the games of `make envs`: TextWorld, with what makes and plays them.
# torch first: the CPU build that constraints.txt pins must not be replaced by what they ask for.
set -euo pipefail
venv=$1 python=$2
# Jericho asks for spaCy, which builds for half an hour where it has no wheel and which playing a game never imports: both
# are installed without what they ask for, and TextWorld's own needs are named here. Jericho compiles an interpreter (gcc).
games=('textworld==1.7.0' 'jericho==3.3.1')
needs=('tatsu==5.8.3' networkx hashids mementos more-itertools prompt-toolkit termcolor tqdm wcwidth)
# The games have bounds of their own for most of what constraints.txt pins.
core=$(mktemp)
trap 'rm -f "$core"' EXIT
grep -E '^(torch|transformers|accelerate|grpcio[a-z-]*|protobuf|numpy)==' constraints.txt >"$core"
project=(-c "$core" -e . pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis beartype cryptography)
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    uv pip install --quiet --python "$venv/bin/python" -c "$core" torch
    uv pip install --quiet --python "$venv/bin/python" "${project[@]}" "${needs[@]}"
    uv pip install --quiet --python "$venv/bin/python" --no-deps "${games[@]}"
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet -c "$core" torch
    "$venv/bin/python" -m pip install --quiet "${project[@]}" "${needs[@]}"
    "$venv/bin/python" -m pip install --quiet --no-deps "${games[@]}"
fi
