"""HAProxy in master-worker mode: a configuration checked, started, reloaded without a lost stream, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from rehearsal import processes
from rehearsal.interfaces import RehearsalError


class HaProxy:
    """One HAProxy: ``<home>/run/<name>.cfg`` and its sockets, ``<home>/logs/<name>.log``.

    On a reload the old worker keeps its open connections until they end, and the listening sockets are handed
    over to the new one, so that no connection is refused in between.
    """

    def __init__(self, home: Path, name: str) -> None:
        self._name = name
        self._run = home / "run"
        self._config = self._run / f"{name}.cfg"
        self._record = self._run / f"{name}.process"
        self._log = home / "logs" / f"{name}.log"
        self.stats_socket = self._run / f"{name}.stats"
        self._master_socket = self._run / f"{name}.master"

    @property
    def running(self) -> bool:
        """True while its master process is alive."""
        return processes.recorded(self._record) is not None

    def ensure(self, config: str) -> None:
        """Run with ``config``: started, or reloaded when it differs from what runs.

        Raises:
            RehearsalError: HAProxy refuses the configuration or does not start; with its own words.
        """
        if self.running and self._config.exists() and self._config.read_text() == config:
            return
        self._run.mkdir(parents=True, exist_ok=True)
        self._run.chmod(0o700)
        part = self._config.with_suffix(".part")
        part.write_text(config)
        self._check(part)
        if not self.running:
            part.replace(self._config)
            self._start()
            return
        before = self._reloads()
        part.replace(self._config)
        process = processes.recorded(self._record)
        assert process is not None
        process.signal(signal.SIGUSR2)
        self._wait_reload(before)

    def stop(self) -> None:
        """End it and its open connections, also one that an earlier daemon left."""
        processes.end(self._record)
        for path in (self._config, self.stats_socket, self._master_socket):
            path.unlink(missing_ok=True)

    def command(self, line: str, worker: int | None = None) -> str:
        """Ask a worker, by default the current one; empty when it does not answer."""
        if worker is None:
            return _ask(self.stats_socket, line)
        return _ask(self._master_socket, f"@!{worker} {line}")

    def old_workers(self) -> list[int]:
        """Process ids of workers that a reload left, and that end with their last connection."""
        shown = _ask(self._master_socket, "show proc")
        old = shown.partition("# old workers")[2].partition("# programs")[0]
        return [int(line.split()[0]) for line in old.splitlines() if line.split()[1:2] == ["worker"]]

    def _check(self, config: Path) -> None:
        checked = subprocess.run(
            ["haproxy", "-c", "-q", "-f", str(config)], capture_output=True, text=True, check=False
        )
        if checked.returncode != 0:
            reasons = [line for line in checked.stderr.splitlines() if "ALERT" in line] or [checked.stderr]
            raise RehearsalError(f"HAProxy refuses {config}: {reasons[0].strip()}")

    def _start(self) -> None:
        argv = ["haproxy", "-W", "-S", f"{self._master_socket},mode,600", "-f", str(self._config)]
        environment = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}
        process = processes.spawn(argv, self._record, self._log, environment=environment)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            processes.reap(process)
            if not process.alive():
                self._record.unlink(missing_ok=True)
                raise RehearsalError(
                    f"HAProxy ({self._name}) does not start: {self._reason()}. Its log: {self._log}"
                )
            if self.command("show info"):
                return
            time.sleep(0.03)
        raise RehearsalError(f"HAProxy ({self._name}) does not answer. Its log: {self._log}")

    def _reason(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        alerts = [line for line in lines if "ALERT" in line and "cannot" in line.lower()]
        return alerts[-1].strip() if alerts else processes.last_line(self._log)

    def _reloads(self) -> int:
        """How often the master has been told to reload, by its own count."""
        for line in _ask(self._master_socket, "show proc").splitlines():
            fields = line.split()
            if len(fields) >= 3 and fields[1] == "master":
                return int(fields[2])
        return -1

    def _wait_reload(self, before: int) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            shown = _ask(self._master_socket, "show proc")
            workers = [line.split() for line in shown.splitlines() if line.split()[1:2] == ["worker"]]
            if self._reloads() > before and workers:
                current = workers[0][0]
                info = self.command("show info")
                if f"Pid: {current}\n" in info:
                    return
            time.sleep(0.03)
        raise RehearsalError(f"HAProxy ({self._name}) did not reload: {self._reason()}. Its log: {self._log}")


def _ask(path: Path, line: str) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(path))
            connection.sendall(line.encode() + b"\n")
            # The master keeps the connection open for more until it is told that none comes.
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
    except OSError:
        return ""
    return b"".join(parts).decode(errors="replace")
