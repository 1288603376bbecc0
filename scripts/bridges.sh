#!/usr/bin/env bash
# bridges.sh VENV PYTHON: an environment with a trainer that uses our teachers over HTTP, TRL.
source "$(dirname "$0")/environment.sh"
pin starlette uvicorn
install -c "$pins" torch # first, so that the requirements of the others do not replace the CPU build
install -c "$pins" -e '.[http]' "${tests[@]}" requests 'trl==1.16.0'
