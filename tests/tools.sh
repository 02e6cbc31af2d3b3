#!/bin/sh
# What the tests on several nodes need beside Python: where it is missing, root installs it on Debian or Ubuntu.
# Without it and without root those tests are skipped, with a reason (under CI=true that is a failure).
set -eu
PATH=$PATH:/usr/sbin:/sbin

missing() {
    for pair in etcd:etcd-server etcdctl:etcd-client nft:nftables ip:iproute2 openssl:openssl zsh:zsh \
        slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge \
        sshd:openssh-server ssh:openssh-client tcsh:tcsh; do
        command -v "${pair%%:*}" >/dev/null || printf '%s ' "${pair#*:}"
    done
}

packages=$(missing)
[ -n "$packages" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Tests on several nodes need these Debian packages, or what gives the same commands: ${packages% }"
    exit 0
fi
# The tests start members of their own: the package's service is not to start.
export DEBIAN_FRONTEND=noninteractive SYSTEMD_OFFLINE=1
apt-get -qq update
# shellcheck disable=SC2086
apt-get -qq -y --no-install-recommends install $packages >/dev/null
[ -z "$(missing)" ]
