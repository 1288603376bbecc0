#!/usr/bin/env bash
# trackers.sh VENV PYTHON: an environment with the experiment trackers of the extra `trackers`.
source "$(dirname "$0")/environment.sh"
pin protobuf
install -c "$pins" torch # first, so that the requirements of the others do not replace the CPU build
install -c "$pins" -e '.[trackers]' "${tests[@]}"
