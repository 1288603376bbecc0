#!/usr/bin/env bash
# setup.sh VENV PYTHON: the environment of the project, for CPUs, with what constraints.txt pins.
source "$(dirname "$0")/environment.sh"
[ -e "$venv/.installed" ] ||
    echo "installing opd with PyTorch for CPU and $(grep -c '==' constraints.txt) pinned packages into $venv:" \
        "about 2 GB, one to five minutes"
install -c constraints.txt -e '.[dev]'
