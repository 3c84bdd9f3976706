"""``make down``: leave nothing behind of the rehearsal but its caches (image, model)."""

from __future__ import annotations

import argparse
import shutil
import sys

from rich.console import Console

from rehearsal.home import Home, default_home, stop_daemon
from rehearsal.interfaces import RehearsalError
from rehearsal.steps import Steps

_KEPT = {"image", "images", "cache", "logs"}


def main(argv: list[str] | None = None) -> int:
    """Stop the daemon and remove machines, load balancers, bridge and mounts, also of a daemon that died."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal.down", description=__doc__)
    parser.add_argument("--image", action="store_true", help="remove the cached image too")
    arguments = parser.parse_args(argv)
    from rehearsal.platform import build

    home = Home(default_home())
    steps = Steps(Console(stderr=True))
    if not home.path.exists():
        steps.console.print("nothing to remove: no rehearsal ran here")
        return 0
    try:
        with steps.step("Stopping the rehearsal"):
            stop_daemon(home)
        with steps.step("Removing machines, load balancers and the bridge"):
            platform = build(home.path)
            platform.load_balancer.remove_all()
            platform.machines.remove_all()
            platform.network.remove_all()
            kept = set() if arguments.image else _KEPT
            for entry in home.path.iterdir():
                if entry.name not in kept:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    except RehearsalError as error:
        steps.console.print(f"[red]error:[/red] {error}", highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
