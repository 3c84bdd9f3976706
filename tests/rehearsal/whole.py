"""Run `make up` and `make down` as a person does, and look at what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.operate.remote import run_on_hosts
from app.operate.target import Target
from rehearsal.home import REPOSITORY, Home, default_home

PYTHON = str(REPOSITORY / ".venv/bin/python")
NEURONFLEET = str(REPOSITORY / ".venv/bin/neuronfleet")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="machines need root")


@dataclass
class Deployed:
    """An environment that is up."""

    environment: str
    output: str
    seconds: float
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.status["url"])

    @property
    def hosts(self) -> list[dict[str, Any]]:
        return list(self.status["hosts"])

    def target(self) -> Target:
        state = Home(default_home()).state()
        assert state, "the daemon ended"
        return Target(region=state["region"], endpoint_url=state["api_endpoint"])

    def run(self, instance_id: str, command: str) -> str:
        """Run a shell command on a host; fails the test when it fails."""
        result = run_on_hosts(self.target().client("ssm"), {instance_id: command})[instance_id]
        assert not result.error, f"{command}: {result.error}"
        return result.output

    def refresh(self) -> dict[str, Any]:
        shown = subprocess.run(
            [NEURONFLEET, "status", "--env", self.environment, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        self.status = json.loads(shown.stdout)
        return self.status

    def wait_until(self, what: str, holds: Any, timeout_s: float) -> dict[str, Any]:
        """Poll the status until ``holds(status)``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if holds(self.refresh()):
                return self.status
            time.sleep(1)
        raise AssertionError(
            f"not within {timeout_s:.0f} s: {what}; status: {json.dumps(self.status)[:3000]}"
        )


def run_up(environment: str, *arguments: str, timeout_s: float = 900) -> tuple[int, str, float]:
    """Exit code, output and seconds of `make up` (less its installs)."""
    started = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-m", "rehearsal.up", "--env", environment, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - started


def run_down() -> None:
    """`make down`; fails the test when it fails."""
    done = subprocess.run(
        [PYTHON, "-m", "rehearsal.down"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def refuse_to_disturb() -> None:
    """A rehearsal that a person runs on this machine is not the test's to end."""
    if Home(default_home()).state():
        pytest.fail("a rehearsal runs on this machine: end it with `make down`, then run the tests again")


@contextmanager
def deployed(environment: str) -> Iterator[Deployed]:
    """`make up` before, `make down` after, and nothing left."""
    refuse_to_disturb()
    try:
        code, output, seconds = run_up(environment)
        assert code == 0, output[-6000:] + consoles()
        up = Deployed(environment, output, seconds)
        up.refresh()
        yield up
    finally:
        run_down()
    assert_nothing_left()


def consoles() -> str:
    """The end of every machine's console, for a failing test's report."""
    shown = []
    for path in sorted((default_home() / "consoles").glob("*.log")):
        shown.append(f"\n--- {path.name}\n" + path.read_text(errors="replace")[-3000:])
    return "".join(shown)


def assert_nothing_left(within_s: float = 5.0) -> None:
    """The kernel ends what was told to end a moment later."""
    deadline = time.monotonic() + within_s
    while left := leftovers():
        assert time.monotonic() < deadline, f"`make down` left: {left}"
        time.sleep(0.5)


def leftovers() -> list[str]:
    """Machines, bridges, mounts and processes of the rehearsal that are still there."""
    home = str(default_home())
    left = [
        f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if home in line
    ]
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    left += [
        f"interface {line.split()[0]}" for line in links.splitlines() if line.startswith(("nf-", "vb-i-"))
    ]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(home.encode() in word for word in words):
            left.append(f"process {entry.name}: {b' '.join(words)[:120].decode(errors='replace')}")
    machines = Path(home, "machines")
    if machines.exists():
        left += [f"machine {entry.name}" for entry in machines.iterdir()]
    return left
