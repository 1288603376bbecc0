# Sourced with VENV and PYTHON by the scripts that make an environment: it is there then, and `install` installs into it.
# uv is used where it is there, pip otherwise; a folder of wheels that pip knows (PIP_FIND_LINKS) is handed on to uv.
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

# install ARGUMENTS: of `pip install`.
install() {
    if [ -n "$uv" ]; then
        uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        "$venv/bin/python" -m pip install --quiet "$@"
    fi
}

# pin NAMES: write $pins, what constraints.txt says of what the project computes and speaks with, and of NAMES. The rest is
# not pinned in an environment that holds another project: that one has bounds of its own for most of it.
pins=$scratch/pins.txt
pin() {
    local names='torch|transformers|accelerate|grpcio[a-z-]*' name
    for name in "$@"; do names+="|$name"; done
    grep -E "^($names)==" constraints.txt >"$pins"
}

# What the tests need that such an environment is for.
tests=(pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis beartype cryptography)
