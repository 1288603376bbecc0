#!/usr/bin/env bash
# gpu.sh: brings what `make gpu` needs to a machine with a GPU, torch and transformers, but neither opd nor a network.
#   there        python benchmarks/gpu.py --lacking >needs.txt
#   elsewhere    bash scripts/gpu.sh fetch needs.txt wheels 3.12      downloads them for that version of Python
#   there        bash scripts/gpu.sh install needs.txt wheels python  with the checkout and the folder of wheels
# What is installed there stays as it is: torch and transformers are never brought.
set -euo pipefail
what=$1 needs=$2 wheels=$3 python=$4
case $what in
fetch)
    mkdir -p "$wheels"
    platforms=()
    for minor in 17 24 27 28 34; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
    python3 -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version "$python" \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -r "$needs"
    # What they share with packages that are there.
    rm -f "$wheels"/{torch,transformers,accelerate,triton,numpy,nvidia_*,cuda_*}-*.whl
    du -sh "$wheels"
    ;;
install)
    export PIP_BREAK_SYSTEM_PACKAGES=1
    "$python" -m pip install --quiet --no-index --find-links "$wheels" -r "$needs"
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation -e "$(dirname "$0")/.."
    ;;
*)
    echo "gpu.sh fetch or gpu.sh install, not $what" >&2
    exit 2
    ;;
esac
