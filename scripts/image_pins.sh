#!/usr/bin/env bash
# image_pins.sh: writes deploy/containers/vllm.txt and sglang.txt, the pins of images with one of these engines. Only uv can: it
# resolves for another Python, and keeps the versions of the file that it overwrites. That file is constraints.txt at first, so the
# images differ from the environment of the tests only where the engine forces them to.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PYTHON_DOWNLOADS=never

# pins ENGINE==VERSION REQUIREMENT...: all extras of pyproject.toml but the other engine, and what the engine's own packages forgot.
pins() {
    local file=deploy/containers/${1%%=*}.txt extra extras=()
    for extra in "${1%%=*}" envs gpu lora merge otel quantized trackers; do extras+=(--extra "$extra"); done
    cp constraints.txt "$file"
    printf '%s\n' "$@" | uv pip compile --quiet --no-annotate --custom-compile-command 'bash scripts/image_pins.sh' \
        --python-version 3.12 --python-platform x86_64-manylinux_2_36 "${extras[@]}" -o "$file" pyproject.toml - >/dev/null
}

# The vLLM of scripts/engines.sh. An older cuda-python would put a second `cuda` beside cuda-bindings 13. Ray: a teacher on several nodes.
pins vllm==0.32.0 'cuda-python>=13' ray
pins sglang==0.5.23
