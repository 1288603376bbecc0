#!/usr/bin/env bash
# chromium.sh FOLDER: unpacks the distribution's headless Chromium, and the libraries missing on this system, into FOLDER.
# FOLDER/chromium starts it; nothing is installed into the system.
set -euo pipefail
folder=$1
package=chromium-headless-shell
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "there is no apt-get here; put chromium on the PATH instead" >&2
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mapfile -t missing < <(apt-get install --simulate --no-install-recommends "$package" | awk '/^Inst/ {print $2}')
cd "$scratch" && apt-get download "${missing[@]:-$package}" && cd - >/dev/null
mkdir -p "$folder"
for archive in "$scratch"/*.deb; do
    dpkg -x "$archive" "$folder"
done
cat >"$folder/chromium" <<'X'
#!/usr/bin/env bash
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
libraries=$(find "$here/usr/lib" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$here/usr/lib/chromium/chromium-headless-shell" "$@"
X
chmod +x "$folder/chromium"
"$folder/chromium" --version
