"""The rehearsal's one daemon: ``python -m rehearsal.daemon --home DIR``.

It is AWS for this machine: the API (moto and what it lacks), the instance metadata service, and the
reconciler that makes machines, network and load balancers follow the API. ``HOME/state.json`` appears once it
is ready and goes when it ends; ``HOME/events.jsonl`` tells what happens, ``HOME/daemon.log`` why. State is in
memory: a daemon that died leaves machines behind, which the next one removes before it starts.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

from rehearsal.api.extensions import extend
from rehearsal.api.public_images import publish
from rehearsal.api.server import ApiServer
from rehearsal.api.world import World
from rehearsal.control import ControlServer
from rehearsal.events import EventLog
from rehearsal.interfaces import Platform, RehearsalError
from rehearsal.metadata import MetadataService
from rehearsal.metadata.directory import InstanceDirectory
from rehearsal.reconcile import Reconciler
from rehearsal.view import View

log = logging.getLogger("rehearsal.daemon")
STATE_NAME = "state.json"

BuildPlatform = Callable[[int], Platform]
"""API port on loopback -> the platform."""


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Daemon:
    """Everything that runs; ``start`` and ``stop`` once each."""

    def __init__(self, home: Path, build: BuildPlatform, *, port: int = 0, region: str = "us-east-1") -> None:
        self.home = home
        self._build = build
        self._port = port
        self._region = region
        self._metadata: MetadataService | None = None
        self._started = 0.0
        self._lock_file: TextIO | None = None

    def start(self) -> None:
        """Start all; returns when the API answers and ``state.json`` says so.

        Raises:
            RehearsalError: another daemon holds this home, a port is taken, moto is not the right one.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        self._lock_home()
        (self.home / STATE_NAME).unlink(missing_ok=True)
        events = self.home / "events.jsonl"
        events.unlink(missing_ok=True)
        self.world = World(EventLog(events), region=self._region)
        _reset_moto()
        self._patches = extend(self.world)
        publish(self.world)
        self.server = ApiServer(self.world, port=self._port)
        self.platform = self._build(self.server.port)
        self._remove_leftovers()
        self.world.console = self._console
        self.world.run_in_machine = self.platform.machines.run
        self.directory = InstanceDirectory(self.world)
        self.reconciler = Reconciler(self.world, self.platform, on_network=self._open_metadata)
        self.view = View(self.world, self.platform, self.reconciler)
        self._control = ControlServer(self.home, self.view.operations())
        self.server.start()
        self._control.start()
        self.reconciler.start()
        self._started = time.time()
        self._write_state()
        self.world.events.add("daemon.ready", f"the AWS API answers at {self.server.endpoint}")

    def stop(self) -> None:
        """Stop all: hosts first, while the API still answers them."""
        (self.home / STATE_NAME).unlink(missing_ok=True)
        self.world.events.add("daemon.stopping", "stopping: hosts shut down")
        self.reconciler.stop()
        self.platform.machines.remove_all()
        self.platform.load_balancer.remove_all()
        if self._metadata is not None:
            self._metadata.stop()
        self.platform.network.remove_all()
        self._control.stop()
        self.server.stop()
        self._patches.remove()
        self.world.events.add("daemon.stopped", "stopped")
        if self._lock_file is not None:
            self._lock_file.close()

    @property
    def metadata(self) -> MetadataService | None:
        """The metadata service, None before the first network."""
        return self._metadata

    def _lock_home(self) -> None:
        self._lock_file = (self.home / "daemon.lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RehearsalError(
                f"another rehearsal daemon runs in {self.home}: stop it with `make down`, "
                "or give another --home"
            ) from None

    def _remove_leftovers(self) -> None:
        self.platform.machines.remove_all()
        self.platform.load_balancer.remove_all()
        self.platform.network.remove_all()

    def _open_metadata(self) -> None:
        if self._metadata is None:
            platform = self.platform
            self._metadata = MetadataService(
                self.directory, platform.metadata_address, platform.metadata_port, platform.metadata_v1_port
            )
            self._metadata.start()

    def _console(self, instance_id: str) -> str:
        try:
            return self.platform.machines.console(instance_id).read_text(errors="replace")
        except OSError:
            return ""

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "api_endpoint": self.server.endpoint,
            "started": self._started,
            "region": self.world.region,
            "account": self.world.account,
        }
        partial = self.home / (STATE_NAME + ".partial")
        partial.write_text(json.dumps(state))
        partial.replace(self.home / STATE_NAME)


def _reset_moto() -> None:
    """Begin with an empty account: a second daemon in one process (tests) must not see the first's."""
    import moto.backends as backends

    for service in (
        "autoscaling",
        "cloudformation",
        "ec2",
        "elbv2",
        "iam",
        "s3",
        "secretsmanager",
        "ssm",
        "sts",
    ):
        backends.get_backend(service).reset()


def _memory_platform(home: Path) -> BuildPlatform:
    from rehearsal.fakes import fake_platform

    return lambda port: fake_platform(home)


def _real_platform(home: Path, region: str) -> BuildPlatform:
    from rehearsal.platform import build

    return lambda port: build(home, api_port=port, region=region)


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("werkzeug", "botocore", "moto"):
        logging.getLogger(name).setLevel(logging.WARNING)


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m rehearsal.daemon", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="folder of state, logs and machines")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the API on loopback (default: a free one)"
    )
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument(
        "--platform",
        choices=("machines", "memory"),
        default="machines",
        help="machines: boots real ones (root); memory: the API alone, instances are names",
    )
    options = parser.parse_args(arguments)
    options.home.mkdir(parents=True, exist_ok=True)
    _log_to(options.home / "daemon.log")
    build = (
        _memory_platform(options.home)
        if options.platform == "memory"
        else _real_platform(options.home, options.region)
    )
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    daemon = Daemon(options.home, build, port=options.port, region=options.region)
    try:
        daemon.start()
    except RehearsalError as error:
        log.error("%s", error)
        print(f"rehearsal daemon: {error}", file=sys.stderr)
        return 1
    ended.wait()
    daemon.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
