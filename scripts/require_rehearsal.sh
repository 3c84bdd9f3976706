#!/usr/bin/env bash
# Says in one line what this machine lacks for the rehearsal, and what works here all the same.
set -euo pipefail
still="What works here: make serve (the Serve app alone), make synth, neuronfleet plan."
if [ "$(uname -s)" != Linux ]; then
    echo "The rehearsal needs Linux (this is $(uname -s)). $still" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "The rehearsal needs root (it makes machines, a bridge and mounts): sudo make up. $still" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "The rehearsal needs a Debian or Ubuntu machine (no apt-get here). $still" >&2
    exit 1
fi
