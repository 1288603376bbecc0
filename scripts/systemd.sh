#!/usr/bin/env bash
# systemd.sh: installs the distribution's systemd and systemd-nspawn. This machine itself is not booted by them.
set -euo pipefail
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "apt-get and root are needed to install systemd-container; put systemd-nspawn on the PATH instead" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd systemd-container dbus >/dev/null
systemd-nspawn --version | head -1
