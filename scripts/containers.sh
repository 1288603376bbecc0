#!/usr/bin/env bash
# containers.sh VENV PYTHON: installs the distribution's Podman, runc and debootstrap, and podman-compose into an environment of its
# own. What is installed already is left alone.
source "$(dirname "$0")/environment.sh"
if ! command -v podman >/dev/null || ! command -v runc >/dev/null || ! command -v debootstrap >/dev/null; then
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "apt-get and root are needed to install Podman; put podman, runc and debootstrap on the PATH instead" >&2
        exit 1
    fi
    apt-get update -qq
    # With what they recommend: the container networks of this distribution's Podman, and names on them.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq podman runc debootstrap debian-archive-keyring >/dev/null
fi
install 'podman-compose>=1.6'
podman --version
