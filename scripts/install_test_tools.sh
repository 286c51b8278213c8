#!/bin/sh
# What some tests need besides Python: sshd, rsync, ip and iptables for several computers (network namespaces), Slurm, and Chromium.
# On Debian and Ubuntu as root they are installed, and no service of theirs is started; elsewhere those tests are
# skipped with a reason.
set -eu
PATH=$PATH:/usr/sbin:/sbin
missing=""
need() { # PROGRAM PACKAGE
  command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need sshd openssh-server
need ssh openssh-client
need rsync rsync
need ip iproute2
need iptables iptables
need munged munge
need slurmctld slurmctld
need slurmd slurmd
need srun slurm-client
need chromium chromium
# Slurm's PMIx asks for the library by the name that only this package has.
ls /usr/lib/*/pmix*/lib/libpmix.so >/dev/null 2>&1 || missing="$missing libpmix-dev"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed:$missing; the tests that need them are skipped" >&2
  exit 0
fi

# Debian starts what it installs, unless this file says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # the names are meant to be split
apt-get install -y -q --no-install-recommends $missing >/dev/null ||
  { apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends $missing >/dev/null; } ||
  echo "could not be installed:$missing; the tests that need them are skipped" >&2
