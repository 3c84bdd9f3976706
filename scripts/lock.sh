#!/usr/bin/env bash
# Make every lock of requirements/ again from its .in file, exactly as the committed ones were made.
#
#   scripts/lock.sh             keep each version that still fits (uv reads the present lock first)
#   scripts/lock.sh --upgrade   take the newest that fits
#
# Needs .venv (make setup) and a package index. Order matters: a profile's bundle is resolved against the lock of
# the engine whose venv it is layered over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv=.venv/bin/uv
[[ -x $uv ]] || { echo "lock: no $uv: run 'make setup' first" >&2; exit 1; }

find_links=()
[[ -z ${PIP_FIND_LINKS:-} ]] || find_links=(--find-links "$PIP_FIND_LINKS")

compile() { # compile NAME PYTHON [uv options]: requirements/NAME.in -> requirements/NAME.lock
    local name=$1 python=$2
    shift 2
    echo "lock: requirements/$name.lock"
    "$uv" pip compile --quiet --no-header --python-version "$python" "$@" -o "requirements/$name.lock"
}

# Universal: a developer's Python may be 3.11, 3.12 or 3.13.
compile control 3.11 "$@" --universal --generate-hashes requirements/control.in
# torchvision, torchaudio and torchcodec come as CUDA builds that break vLLM's Llama import on a CPU.
compile engine-cpu 3.11 "$@" "${find_links[@]}" \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec \
    --no-emit-package triton requirements/engine-cpu.in
compile engine-vllm-neuron-2.28 3.12 "$@" --python-platform x86_64-manylinux_2_28 \
    --override requirements/engine-vllm-neuron-2.28.override requirements/engine-vllm-neuron-2.28.in
compile bundle-cpu 3.11 "$@" --generate-hashes "${find_links[@]}" \
    -c requirements/engine-cpu.lock requirements/bundle.in
compile bundle-vllm-neuron-2.28 3.12 "$@" --generate-hashes --python-platform x86_64-manylinux_2_28 \
    -c requirements/engine-vllm-neuron-2.28.lock requirements/bundle.in
