#!/bin/sh
# What make test-cluster needs of Debian: installed where it is missing and may be; else says so, and the tests that need it skip.
set -eu
missing=
need() { # COMMAND PACKAGE
    PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null || missing="$missing $2"
}
need slurmctld slurmctld
need slurmd slurmd
need sbatch slurm-client
need munged munge
need ip iproute2
need nsenter util-linux
need shellcheck shellcheck
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "test-cluster: not installed:$missing. As root on Debian or Ubuntu they would be: what needs them is skipped." >&2
    exit 0
fi
echo "test-cluster: installing$missing"
apt-get update --quiet=2
# shellcheck disable=SC2086  # a list of packages
DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends $missing
