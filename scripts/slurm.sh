#!/usr/bin/env bash
# slurm.sh: installs the distribution's Slurm, whose programs must lie where it was built to find them. No daemon stays.
set -euo pipefail
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "apt-get and root are needed to install Slurm; put slurmctld, slurmd and srun on the PATH instead" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client >/dev/null
for daemon in slurmctld slurmd munge; do service "$daemon" stop >/dev/null 2>&1 || true; done
slurmd -V
