#!/usr/bin/env bash
# newest.sh VENV PYTHON: an environment with the newest versions that pyproject.toml admits, whatever constraints.txt pins.
# The package index has torch with CUDA, which is several gigabytes.
source "$(dirname "$0")/environment.sh"
install --upgrade -e '.[test,otel,http]'
