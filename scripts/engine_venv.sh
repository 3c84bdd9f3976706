#!/usr/bin/env bash
# Make the engine venv of this machine: the profile "cpu" (vLLM built for CPU), what a host's bundle adds to it
# (Ray), and the tools that tests/serve runs with.
#
#   scripts/engine_venv.sh [DEST]      DEST defaults to .venv-engine
#
# Done already, it returns at once: a stamp holds the digest of everything that decides the contents, and is
# written last, so that an interrupted run is finished by the next one.
# Environment: PYTHON (3.11 or newer; default: the interpreter of .venv), PIP_FIND_LINKS (a folder with wheels).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dest=${1:-"$root/.venv-engine"}
uv=$root/.venv/bin/uv
python=${PYTHON:-$root/.venv/bin/python}
requirements=$root/requirements
engine_lock=$requirements/engine-cpu.lock
bundle_lock=$requirements/bundle-cpu.lock
control_lock=$requirements/control.lock
# What reads the embedded model's GGUF file (app.compile.embedded_model); hosts never need them.
conversion=(gguf==0.19.0 accelerate==1.15.0)
# With what the engine venv has already, these are all that pytest, hypothesis and openai need.
tools=(pytest pytest-timeout pytest-asyncio hypothesis openai iniconfig pluggy sortedcontainers distro)

fail() {
    echo "engine_venv: $1" >&2
    exit 1
}

[[ -x $uv ]] || fail "no uv at $uv: run 'make setup' first, it makes .venv"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))') ||
    fail "$python is Python ${version:-unknown}; expected 3.11 or newer: set PYTHON to one"

mkdir -p "$(dirname "$dest")"
dest=$(cd "$(dirname "$dest")" && pwd)/$(basename "$dest")
# One build at a time: two callers (make serve, make test) may come at once.
mkdir -p "$root/.cache"
exec 9>"$root/.cache/engine-venv.lock"
flock 9

stamp=$dest/.neuronfleet-stamp
wanted=$(
    cat "$engine_lock" "$bundle_lock" "${BASH_SOURCE[0]}" <(echo "$version $dest") \
        <(grep -E '^(pytest|pytest-timeout|pytest-asyncio|hypothesis|openai)==' "$control_lock") |
        sha256sum | cut -d' ' -f1
)
if [[ -f $stamp && $(<"$stamp") == "$wanted" && -x $dest/bin/python ]]; then
    exit 0
fi

started=$SECONDS
echo "engine_venv: making $dest (Python $version; about 3.5 GB, some minutes the first time)"
rm -f "$stamp"
[[ -x $dest/bin/python && $("$dest/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') == "$version" ]] ||
    "$uv" venv --quiet --clear --python "$python" "$dest"

export VIRTUAL_ENV=$dest UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
find_links=()
[[ -z ${PIP_FIND_LINKS:-} ]] || find_links=(--find-links "$PIP_FIND_LINKS")

# The lock leaves torchvision, torchaudio, torchcodec and triton out on purpose (CUDA builds that break vLLM's
# Llama import), so nothing may be resolved here: exactly the lock's lines, no dependencies.
echo "engine_venv: engine (vLLM, torch)"
engine=("$uv" pip install --quiet --no-deps "${find_links[@]}" --requirement "$engine_lock")
plain_error=$(mktemp)
trap 'rm -f "$plain_error" "${tool_lock:-}"' EXIT
if ! "${engine[@]}" 2>"$plain_error"; then
    grep -q 'torch==' "$plain_error" || { cat "$plain_error" >&2; fail "the engine's packages did not install"; }
    echo "engine_venv: the torch CPU build is not found plainly; asking PyTorch's CPU index"
    "${engine[@]}" --index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match ||
        fail "torch's CPU build is neither in PIP_FIND_LINKS nor reachable at PyTorch's CPU index"
fi

echo "engine_venv: bundle (Ray)"
"$uv" pip install --quiet --no-deps --require-hashes --requirement "$bundle_lock"

echo "engine_venv: tools"
tool_lock=$(mktemp)
for tool in "${tools[@]}"; do
    # One package of the lock with its hashes: its line and the continuation lines below it.
    awk -v name="$tool" 'index($0, name "==") == 1 {on = 1} on {print} on && !/\\$/ {exit}' "$control_lock" >>"$tool_lock"
done
"$uv" pip install --quiet --no-deps --require-hashes --requirement "$tool_lock"
"$uv" pip install --quiet --no-deps "${conversion[@]}"

# The working tree's app/ is importable wherever a process starts (Ray's workers start in their own folder).
site=$("$dest/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$root" >"$site/neuronfleet.pth"

echo "$wanted" >"$stamp"
echo "engine_venv: done in $((SECONDS - started)) s"
