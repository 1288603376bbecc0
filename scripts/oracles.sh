#!/usr/bin/env bash
# oracles.sh VENV PYTHON: an environment with the projects that we compare our mathematics with, TRL and Liger.
source "$(dirname "$0")/environment.sh"
peers=('trl==1.16.0' 'liger-kernel==0.8.5')
pin
install -c "$pins" torch # first, so that the requirements of the others do not replace the CPU build
install -c "$pins" -e . "${tests[@]}" "${peers[@]}"
