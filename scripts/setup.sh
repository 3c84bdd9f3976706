#!/usr/bin/env bash
# Makes everything that the planner, synth and the tests need: .venv (Python lock), node_modules (the pinned CDK
# command line, run by the Node that comes with .venv), and dist/ (the bundles that hosts fetch).
# Every part is skipped when what it is made from has not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [ -n "$candidate" ] || continue
        if command -v "$candidate" >/dev/null 2>&1 \
            && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

ensure_python() {
    if ! python=$(find_python) || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            say "installing python3 and python3-venv"
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3 python3-venv >/dev/null
        fi
        python=$(find_python) || die "no Python 3.11 to 3.13 found. Install one, or name it: PYTHON=/path/to/python3.11 make setup"
        "$python" -c 'import venv, ensurepip' 2>/dev/null \
            || die "$python has no venv module. Install it (Debian: apt-get install python3-venv) and run this again"
    fi
}

make_venv() {
    local want
    ensure_python
    want=$({ "$python" --version; cat requirements/control.lock pyproject.toml; } | sha256sum | cut -d' ' -f1)
    [ "$(cat .venv/.made-from 2>/dev/null)" = "$want" ] && [ -x .venv/bin/neuronfleet ] && return
    say ".venv: Python packages from requirements/control.lock"
    if ! .venv/bin/python -c 'import sys' 2>/dev/null; then
        rm -rf .venv
        "$python" -m venv .venv
    fi
    rm -f .venv/.made-from
    local uv
    uv=$(sed -n 's/^\(uv==[^ ;\\]*\).*/\1/p' requirements/control.lock)
    .venv/bin/uv --version 2>/dev/null | grep -qF "${uv#uv==}" \
        || .venv/bin/python -m pip install --quiet --disable-pip-version-check "$uv"
    .venv/bin/uv pip sync --quiet --python .venv/bin/python --require-hashes requirements/control.lock
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
    echo "$want" >.venv/.made-from
}

make_node_modules() {
    local want
    want=$(sha256sum <package-lock.json | cut -d' ' -f1)
    [ "$(cat node_modules/.made-from 2>/dev/null)" = "$want" ] && return
    say "node_modules: the AWS CDK command line from package-lock.json"
    PATH="$PWD/.venv/bin:$PATH" npm ci --no-audit --no-fund --loglevel=error >&2
    echo "$want" >node_modules/.made-from
}

make_bundles() {
    local profile
    for profile in ${BUNDLES:-cpu vllm-neuron-2.28}; do
        .venv/bin/python scripts/build_bundle.py --profile "$profile" --out dist
    done
}

make_venv
make_node_modules
make_bundles
