"""The rehearsal's home folder, and the daemon that lives there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.operate.target import REHEARSAL_HOME, rehearsal_state
from rehearsal.interfaces import RehearsalError
from rehearsal.loadbalancer import DEFAULT_PORTS, PORT_VARIABLES

REPOSITORY = Path(__file__).resolve().parent.parent


def default_home() -> Path:
    """``NEURONFLEET_REHEARSAL_HOME``, or ``/var/lib/neuronfleet-rehearsal``."""
    return Path(os.environ.get("NEURONFLEET_REHEARSAL_HOME", str(REHEARSAL_HOME)))


@dataclass(frozen=True)
class Home:
    """Everything that the rehearsal keeps on this machine."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def daemon_log(self) -> Path:
        return self.path / "daemon.log"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def state(self) -> dict[str, Any] | None:
        """What the running daemon says of itself, None when none runs."""
        return rehearsal_state(self.path)


def require_free_port(home: Home, listener: int) -> None:
    """Say that the load balancer's port is in use before anything is made, not when the hosts wait for it.

    Args:
        home: the rehearsal; when its load balancer listens already, the port is its own.
        listener: the listener's port in the environment, 80 or 443.

    Raises:
        RehearsalError: something else listens there; names the port and the variable that moves it.
    """
    if home.state() and (home.path / "run/loadbalancer.ports").exists():
        return
    variable = PORT_VARIABLES[listener]
    chosen = os.environ.get(variable) or str(DEFAULT_PORTS[listener])
    if not chosen.isdigit() or not 1 <= int(chosen) <= 65535:
        raise RehearsalError(f"{variable} is {chosen!r}: expected a port from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(chosen)))
        except OSError as error:
            raise RehearsalError(
                f"port {chosen} of this machine, where the load balancer's listener {listener} is to be: "
                f"{error.strerror}. End what listens there, or set {variable} to a free port (after "
                "`make down`, when a rehearsal runs)"
            ) from error


def start_daemon(home: Home, *, timeout_s: float = 60.0, progress: Callable[[str], None]) -> dict[str, Any]:
    """Start the daemon unless it runs, and wait until it answers.

    Returns:
        Its state (``pid``, ``api_endpoint``, ``region``, ``account``).

    Raises:
        RehearsalError: it ended or did not answer in time; names its log.
    """
    state = home.state()
    if state:
        return state
    home.path.mkdir(parents=True, exist_ok=True)
    (home.path / "state.json").unlink(missing_ok=True)
    progress("starting the rehearsal's AWS API")
    with (home.path / "daemon.out").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rehearsal.daemon", "--home", str(home.path)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = home.state()
        if state:
            return state
        if process.poll() is not None:
            break
        time.sleep(0.1)
    else:
        process.terminate()
    last = _last_line(home.path / "daemon.out") or _last_line(home.daemon_log) or "no output"
    raise RehearsalError(
        f"the rehearsal's daemon did not start: {last}. Its log: {home.path / 'daemon.out'} and "
        f"{home.daemon_log}. `make down` removes what is left"
    )


def stop_daemon(home: Home, *, timeout_s: float = 90.0) -> bool:
    """End the daemon, which ends its machines first; True when there was one.

    Raises:
        RehearsalError: it did not end in time.
    """
    state = home.state()
    if not state:
        return False
    pid = int(state["pid"])
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if _is_zombie(pid):
            return True
        time.sleep(0.1)
    raise RehearsalError(
        f"the rehearsal's daemon (pid {pid}) did not end in {timeout_s:.0f} s: kill it by hand"
    )


def read_events(home: Home, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Events written since byte ``offset`` of the event log, and the new offset."""
    try:
        with home.events.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines() if line.strip()], offset + len(whole)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, IndexError):
        return True


def _last_line(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
