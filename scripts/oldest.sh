#!/usr/bin/env bash
# oldest.sh VENV PYTHON: an environment with the oldest versions of what pyproject.toml names. Only uv resolves so.
# The torch of the package index brings CUDA along, some gigabytes of it.
command -v uv >/dev/null 2>&1 || { echo "the oldest versions are resolved by uv, which is not installed" >&2; exit 1; }
source "$(dirname "$0")/environment.sh"
install --resolution lowest-direct -e '.[test,otel]'
