# Sourced with VENV and PYTHON by the scripts that create environments: creates the environment and defines `install` and `pin`.
# uv is used if it is installed, otherwise pip; a folder of wheels that pip knows (PIP_FIND_LINKS) is passed on to uv.
set -euo pipefail
venv=$1 python=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    { echo "opd needs Python 3.11 or newer, but $python is: $("$python" --version 2>&1); use make PYTHON=..." >&2; exit 1; }

uv=$(command -v uv || true)
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
if [ -x "$venv/bin/python" ]; then
    :
elif [ -n "$uv" ]; then
    uv venv --quiet --python "$python" "$venv"
else
    "$python" -m venv "$venv"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# install ARGUMENTS: as `pip install ARGUMENTS`.
install() {
    if [ -n "$uv" ]; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet "$@"
    fi
}

# pin NAMES: write $pins, the lines of constraints.txt for torch, transformers, accelerate, gRPC and NAMES. Other packages are
# not pinned in an environment that also holds another project, which has bounds of its own for most of them.
pins=$scratch/pins.txt
pin() {
    local names='torch|transformers|accelerate|grpcio[a-z-]*' name
    for name in "$@"; do names+="|$name"; done
    grep -E "^($names)==" constraints.txt >"$pins"
}

# What the tests in such environments need.
tests=(pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis beartype cryptography)
