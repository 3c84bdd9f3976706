"""Long-lived helpers (dnsmasq, HAProxy, machines): started detached, found again by a record on disk.

A record holds the process id with its start time, so that a later daemon finds what an earlier one left and
never signals a stranger that got the same id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rehearsal.interfaces import RehearsalError


@dataclass(frozen=True)
class ProcessId:
    """A process and its start time (clock ticks after the machine's boot, field 22 of /proc/PID/stat)."""

    pid: int
    started: int

    def alive(self) -> bool:
        """True while it runs; a zombie does not."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] != "Z" and int(fields[19]) == self.started

    def signal(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def spawn(
    argv: Sequence[str],
    record: Path,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> ProcessId:
    """Start ``argv`` in a session of its own, output appended to ``log``, and write ``record``.

    Args:
        environment: replaces the daemon's own.

    Raises:
        RehearsalError: the program is not installed.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output:
            # Its own session: Ctrl-C in the terminal of `make up` must not reach it.
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                close_fds=True,
                env=None if environment is None else dict(environment),
            )
    except FileNotFoundError as error:
        raise RehearsalError(f"{argv[0]} is not installed: run scripts/debian_packages.sh") from error
    fields = _stat(child.pid)
    process = ProcessId(child.pid, int(fields[19]) if fields else 0)
    part = record.with_name(record.name + ".part")
    part.write_text(f"{process.pid} {process.started}\n")
    part.replace(record)
    return process


def recorded(record: Path) -> ProcessId | None:
    """The process of ``record`` while it is alive; None without a record or when it is gone."""
    try:
        pid, started = record.read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    process = ProcessId(int(pid), int(started))
    reap(process)
    return process if process.alive() else None


def reap(process: ProcessId) -> None:
    """Collect the exit status if it is an ended child of ours, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)


def end(record: Path, *, timeout_s: float = 5.0, number: int = signal.SIGTERM) -> None:
    """End the recorded process, by force after ``timeout_s``, and remove the record. None left: no error."""
    process = recorded(record)
    if process is not None:
        process.signal(number)
        if not wait_gone(process, timeout_s):
            process.signal(signal.SIGKILL)
            wait_gone(process, 5.0)
    record.unlink(missing_ok=True)


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait until the process is gone; False when it is not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        reap(process)
        if not process.alive():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


def run(argv: Sequence[str], what: str, *, input_text: str | None = None, timeout_s: float = 60.0) -> str:
    """Run a short command and return its standard output.

    Raises:
        RehearsalError: not installed, or failed; says ``what`` was being done and its last line.
    """
    try:
        done = subprocess.run(
            argv, input=input_text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise RehearsalError(
            f"cannot {what}: {argv[0]} is not installed; run scripts/debian_packages.sh"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RehearsalError(f"cannot {what}: {argv[0]} did not end within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise RehearsalError(f"cannot {what}: {' '.join(argv[:6])}: {lines[-1]}")
    return done.stdout


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, for an error's message."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return "no output"
    return lines[-1].strip() if lines else "no output"
