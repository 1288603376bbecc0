#!/usr/bin/env bash
# oldest.sh VENV PYTHON: an environment with the oldest versions that pyproject.toml admits. Only uv can resolve these.
# The package index has torch with CUDA, which is several gigabytes.
command -v uv >/dev/null 2>&1 || { echo "only uv can resolve the oldest versions, and it is not installed" >&2; exit 1; }
source "$(dirname "$0")/environment.sh"
install --resolution lowest-direct -e '.[test,otel,http]'
