#!/usr/bin/env bash
# Installs the Debian packages that the Slurm lab runs; does nothing when they are all there.
# As root, or through sudo where there is one. No daemon is started.
set -euo pipefail

packages=(slurm-wlm slurmdbd munge mariadb-server)

installed() {
    # Quick: dpkg's list of files, not the package manager. `dpkg-query` exits 1 when a package is unknown to it.
    local states
    states=$(dpkg-query --show --showformat='${db:Status-Status}\n' "${packages[@]}" 2>/dev/null) || return 1
    ! grep --quiet --invert-match --line-regexp installed <<<"$states"
}

installed && exit 0

if [ "$(id -u)" -eq 0 ]; then
    as_root=()
elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }; }; then
    as_root=(sudo)
else
    echo "install.sh: not root and no sudo; the Slurm tests need these Debian packages: ${packages[*]}" >&2
    exit 1
fi

"${as_root[@]}" apt-get update --quiet
# The packages would start their services: with SysV init not in a runlevel where they are off, such as 1, and with
# systemd not when systemctl takes itself to be offline.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 SYSTEMD_OFFLINE=1 \
    apt-get install --quiet --yes --no-install-recommends "${packages[@]}"
