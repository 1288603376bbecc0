#!/usr/bin/env bash
# quantized.sh VENV PYTHON: bitsandbytes, added to the environment that setup.sh made.
source "$(dirname "$0")/environment.sh"
install -c constraints.txt -e '.[quantized]'
