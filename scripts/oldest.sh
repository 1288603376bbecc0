#!/usr/bin/env bash
# Makes the environment VENV with PYTHON that holds the oldest versions of what pyproject.toml names. Only uv resolves so.
# The torch of the package index brings CUDA along, some gigabytes of it.
set -euo pipefail
venv=$1 python=$2
command -v uv >/dev/null 2>&1 || { echo "the oldest versions are resolved by uv, which is not installed" >&2; exit 1; }
[ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
uv pip install --quiet --python "$venv/bin/python" --resolution lowest-direct -e '.[test,otel]'
