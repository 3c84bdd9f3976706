"""Run every benchmark, one after the other: ``python -m bench [--json]``; each runs alone as well."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("bench.tnx_scheduler", "bench.fetch")


def main(arguments: list[str]) -> int:
    """Each in a process of its own, so that none measures what another left in memory; 1 if one failed."""
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", name, *arguments], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"bench: {', '.join(failed)} did not end well, see above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
