#!/usr/bin/env bash
# setup.sh VENV PYTHON: the environment of the project, for CPUs, with what constraints.txt pins.
source "$(dirname "$0")/environment.sh"
[ -e "$venv/.installed" ] ||
    echo "installing opd and $(grep -c '==' constraints.txt) pinned packages into $venv:" \
        "about 2 GB with torch's CPU build, 6 GB with its CUDA build (see docs/quickstart.md), one to five minutes"
install -c constraints.txt -e '.[dev]'
