#!/usr/bin/env bash
# sglang.sh VENV PYTHON: an environment in which an SGLang server runs on a CPU.
# SGLang's wheel pins CUDA's builds of torch and of its kernels. A server of a dense model on a CPU without AMX calls
# none of these kernels, so the wheel is installed without its requirements, beside this project's torch and the packages
# that starting and asking a server imports (scripts/sglang.txt). tests/support/sglang_stand_ins holds two modules that it
# imports and does not use.
source "$(dirname "$0")/environment.sh"
pin
install -c "$pins" -r "$(dirname "$0")/sglang.txt" -e '.[lora]' "${tests[@]}"
install --no-deps 'sglang==0.5.23'
