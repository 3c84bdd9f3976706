#!/usr/bin/env bash
# Installs NeuronFleet on a host, from the bundle that this script lies in; user data runs it as root. Run again,
# it finishes what is missing and changes nothing else. No step needs the internet, except numactl where the node
# config says "mirror". On failure it ends non-zero with the reason as its last line on standard error.
#
# It makes /opt/neuronfleet/venv, a layer over the engine profile's venv: the layer's .pth names the engine's
# site-packages, so Ray and the engine are imported together, while the image's venv is never written to.
#
# NEURONFLEET_INSTALL=venv (the compile job's host): make the venv only; no user, no unit.
# NEURONFLEET_ROOT (tests): a folder to install under in place of /; then nothing is started and no user made.
set -Eeuo pipefail

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${NEURONFLEET_ROOT:-}
node_config=$root/etc/neuronfleet/node.json
home=$root/opt/neuronfleet
venv=$home/venv
user=neuronfleet

say() { echo "install: $*"; }
die() {
    echo "install: $*" >&2
    exit 1
}
failed() {
    echo "install: line $2 failed with exit code $1: $3" >&2
    exit "$1"
}
trap 'failed "$?" "$LINENO" "$BASH_COMMAND"' ERR

# shellcheck source=/dev/null  # PROFILE, ENGINE_VENV and PYTHON_VERSION, written by scripts/build_bundle.py
. "$bundle/bundle.env"
engine_python=$root$ENGINE_VENV/bin/python

check_image() {
    [[ $EUID -eq 0 || -n $root ]] || die "must run as root"
    [[ -r $node_config ]] || die "no node config at $node_config: user data writes it before it runs this"
    [[ -x $engine_python ]] ||
        die "profile $PROFILE needs its engine venv at $ENGINE_VENV and this image has none: wrong AMI for the profile"
    local version
    version=$("$engine_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [[ $version == "$PYTHON_VERSION" ]] ||
        die "$ENGINE_VENV has Python $version, the bundle of profile $PROFILE is for $PYTHON_VERSION: wrong AMI"
    local wanted
    wanted=$(setting engine.profile)
    [[ $wanted == "$PROFILE" ]] || die "the node config names profile $wanted, this bundle is for $PROFILE"
}

setting() { # setting a.b: a value of the node config
    "$engine_python" - "$node_config" "$1" <<'PY'
import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2].split("."):
    value = value[key]
print(value)
PY
}

install_numactl() {
    if command -v numactl >/dev/null; then
        return
    fi
    local from
    from=$(setting numactl_from)
    if [[ $from == image ]]; then
        die "numactl is not on this image and the node config says numactl_from=image: bake it in, or let the environment install it (numactl_from=mirror, which needs a way out)"
    fi
    say "installing numactl from the distribution's mirror"
    local options=(-o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10 -o Acquire::Retries=2 -o DPkg::Lock::Timeout=120)
    local log=$root/var/log/neuronfleet-apt.log
    install -d "$root/var/log"
    export DEBIAN_FRONTEND=noninteractive
    # The image's package lists may do; they are fetched anew only if they do not.
    timeout 180 apt-get "${options[@]}" install -y -q --no-install-recommends numactl >"$log" 2>&1 ||
        { timeout 120 apt-get "${options[@]}" update -q >>"$log" 2>&1 &&
            timeout 180 apt-get "${options[@]}" install -y -q --no-install-recommends numactl >>"$log" 2>&1; } ||
        die "numactl cannot be installed from the mirror ($(grep -E '^(E|Err|W):?' "$log" | tail -1)): does this host have a way out? An image with numactl needs none (numactl_from=image)"
}

make_user() {
    [[ -z $root ]] || return 0
    getent passwd "$user" >/dev/null ||
        useradd --system --user-group --home-dir /var/lib/neuronfleet --no-create-home --shell /usr/sbin/nologin "$user"
}

make_folders() {
    local owner=()
    [[ -n $root ]] || owner=(-o "$user" -g "$user")
    install -d -m 0755 "$root/etc/neuronfleet" "$home" "$root/etc/tmpfiles.d"
    install -d -m 0750 "${owner[@]}" "$root/var/lib/neuronfleet" "$root/var/lib/neuronfleet/artifacts"
    cat >"$root/etc/tmpfiles.d/neuronfleet.conf" <<TMPFILES
d /run/neuronfleet 0755 $user $user -
TMPFILES
    [[ -n $root ]] || systemd-tmpfiles --create /etc/tmpfiles.d/neuronfleet.conf
}

install_venv() {
    local mark wanted
    mark=$venv/.made-from
    wanted=$(cat "$bundle/requirements.lock" "$bundle/bundle.env" | sha256sum | cut -d' ' -f1)
    if [[ -f $mark && $(<"$mark") == "$wanted" ]]; then
        say "$venv is this bundle's already"
        return
    fi
    say "making $venv over $ENGINE_VENV"
    rm -rf "$venv"
    # Without pip: the base Python of an image may lack ensurepip. The bundle's uv installs instead.
    "$engine_python" -m venv --without-pip "$venv"
    local packages=$venv/lib/python$PYTHON_VERSION/site-packages
    # addsitedir, not a bare path: the engine's own .pth files (editable installs) must count too.
    echo "import site; site.addsitedir('$root$ENGINE_VENV/lib/python$PYTHON_VERSION/site-packages')" >"$packages/engine-venv.pth"
    local tools=$home/tools
    rm -rf "$tools"
    "$engine_python" - "$bundle/wheels" "$tools" <<'PY'
import pathlib, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("uv-*.whl"))
target = pathlib.Path(sys.argv[2]) / "uv"
target.parent.mkdir(parents=True)
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
    target.write_bytes(archive.read(name))
target.chmod(0o755)
PY
    # Compiled here: the services run as a user that may not write next to the modules.
    UV_CACHE_DIR=$tools/cache "$tools/uv" pip install --quiet --offline --no-config --no-index --no-deps \
        --find-links "$bundle/wheels" --require-hashes --requirement "$bundle/requirements.lock" \
        --python "$venv/bin/python" --compile-bytecode --no-break-system-packages ||
        die "the bundle's wheels could not be installed into $venv (the lines above say why)"
    rm -rf "$tools"
    "$venv/bin/python" -c 'import app.node.cli, ray' || die "the installed packages cannot be imported from $venv"
    echo "$wanted" >"$mark"
}

start_units() {
    "$venv/bin/neuronfleet-node" install-units --root "${root:-/}"
    [[ -z $root ]] || return 0
    systemctl daemon-reload
    systemctl enable --quiet neuronfleet-configure.service
    # Not waited for: from here on each unit reports its own failure.
    systemctl start --no-block neuronfleet-configure.service
}

check_image
if [[ ${NEURONFLEET_INSTALL:-host} == venv ]]; then
    install -d -m 0755 "$home"
    install_venv
    say "done in ${SECONDS} s, without units"
    exit 0
fi
install_numactl
make_user
make_folders
install_venv
start_units
say "done in ${SECONDS} s"
