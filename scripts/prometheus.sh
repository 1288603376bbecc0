#!/usr/bin/env bash
# prometheus.sh FOLDER: unpacks prometheus and promtool from the distribution's package into FOLDER.
set -euo pipefail
folder=$1
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "there is no apt-get here; put prometheus and promtool on the PATH instead" >&2
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch" && apt-get download prometheus && cd - >/dev/null
mkdir -p "$folder"
dpkg -x "$scratch"/prometheus_*.deb "$folder"
"$folder/usr/bin/prometheus" --version 2>&1 | head -n 1
