"""A control group for each machine, in every hierarchy that its systemd writes to.

``systemd-nspawn --keep-unit`` starts a machine in the control group of its caller. Two machines in one group
would be two systemds that manage, and kill, the same processes: each gets a group of its own first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PARENT = "neuronfleet"
# cpuset would need its CPUs and memory nodes set by hand, and systemd does not write to it on version 1.
_V1 = ("systemd", "memory", "pids", "cpu,cpuacct", "cpu", "cpuacct", "blkio", "devices", "unified")


def _hierarchies() -> list[Path]:
    if (_ROOT / "cgroup.controllers").exists():
        return [_ROOT]
    found = [_ROOT / name for name in _V1 if (_ROOT / name / "cgroup.procs").exists()]
    return list({path.resolve(): path for path in found}.values())


def create(rehearsal: str, machine: str) -> list[Path]:
    """Make the machine's groups and return their ``cgroup.procs`` files, for its first process to enter."""
    entries = []
    for hierarchy in _hierarchies():
        group = hierarchy / _PARENT / rehearsal / machine
        group.mkdir(parents=True, exist_ok=True)
        entries.append(group / "cgroup.procs")
    return entries


def _groups(rehearsal: str, machine: str | None) -> Iterator[Path]:
    for hierarchy in _hierarchies():
        group = hierarchy / _PARENT / rehearsal
        group = group / machine if machine else group
        if group.is_dir():
            yield group


def processes(rehearsal: str, machine: str) -> set[int]:
    """Ids of every process of the machine, those of its nspawn included."""
    found: set[int] = set()
    for group in _groups(rehearsal, machine):
        for folder, _, _ in os.walk(group):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (Path(folder) / "cgroup.procs").read_text().split()}
    found.discard(0)
    return found


def kill(rehearsal: str, machine: str, *, timeout_s: float = 10.0) -> bool:
    """Kill every process of the machine; False when some is still there after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while pids := processes(rehearsal, machine):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def remove(rehearsal: str, machine: str | None = None) -> None:
    """Remove the groups of a machine, or of a whole rehearsal, once they hold no process."""
    for group in _groups(rehearsal, machine):
        for folder, _, _ in os.walk(group, topdown=False):
            for _ in range(20):
                try:
                    Path(folder).rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    # Its last process is still being taken down by the kernel.
                    time.sleep(0.05)
                else:
                    break
        if machine is None:
            with contextlib.suppress(OSError):
                group.parent.rmdir()
