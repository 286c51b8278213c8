#!/bin/sh
# What the tests with several computers (network namespaces) need besides Python: sshd, ip, iptables.
# On Debian and Ubuntu as root they are installed; elsewhere those tests are skipped with a reason.
set -eu
missing=""
command -v sshd >/dev/null 2>&1 || [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh >/dev/null 2>&1 || missing="$missing openssh-client"
command -v ip >/dev/null 2>&1 || [ -x /usr/sbin/ip ] || missing="$missing iproute2"
command -v iptables >/dev/null 2>&1 || [ -x /usr/sbin/iptables ] || missing="$missing iptables"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed:$missing; the tests that need them are skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 - the names are meant to be split
apt-get install -y -q --no-install-recommends $missing >/dev/null ||
  { apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends $missing >/dev/null; } ||
  echo "could not be installed:$missing; the tests that need them are skipped" >&2
