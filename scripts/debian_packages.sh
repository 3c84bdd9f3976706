#!/bin/bash
# Installs the Debian packages that the rehearsal needs, and only those that are missing.
# Exit 0: all there. Exit 1: one line on standard error says what is missing and what still works without it.
set -euo pipefail

packages=(
  systemd-container # systemd-nspawn: a machine per EC2 instance
  mmdebstrap        # the machines' root
  haproxy           # the load balancer, and the end of TLS on the bridge
  dnsmasq-base      # the resolver
  nftables          # security groups
  dpkg-dev          # the index of the packages' mirror on the bridge
  iproute2 procps util-linux numactl openssl curl ca-certificates
)

fail() {
  echo "rehearsal: $1; 'make synth', 'make serve' and 'neuronfleet plan' work without it" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || fail "needs Linux, this is $(uname -s)"
command -v dpkg-query apt-get >/dev/null || fail "needs Debian or Ubuntu: there is no apt-get here"

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || fail "needs root, to run: apt-get install ${missing[*]}"

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
made_policy=
trap 'rm -f "$log"; [ -z "$made_policy" ] || rm -f "$policy"' EXIT
if [ ! -e "$policy" ]; then
  # The packages' own services are not started: the rehearsal runs its own, on its own addresses.
  made_policy=yes
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "${missing[@]}" >"$log" 2>&1
}
echo "rehearsal: installing ${missing[*]}"
# The package lists may be missing or old: a second try follows an update.
apt_install || { apt-get update >"$log" 2>&1 && apt_install; } || {
  tail -n 15 "$log" >&2
  fail "apt-get could not install ${missing[*]} (its last lines are above)"
}
