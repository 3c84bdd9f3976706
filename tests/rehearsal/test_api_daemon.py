"""The daemon as a process: ready file, control socket, event log, idle cost, clean stop."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from rehearsal.control import ask
from rehearsal.interfaces import RehearsalError
from tests.rehearsal.api_world import wait_for


def start(home: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rehearsal.daemon", "--home", str(home), "--platform", "memory"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    process = start(tmp_path)
    wait_for(lambda: (tmp_path / "state.json").exists() or process.poll() is not None, 60, "the daemon")
    assert process.poll() is None, process.stderr and process.stderr.read()
    yield tmp_path
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_it_says_where_it_is_and_goes_without_a_trace(home: Path) -> None:
    state = json.loads((home / "state.json").read_text())
    assert state["api_endpoint"].startswith("http://localhost:")
    assert (state["region"], state["account"]) == ("us-east-1", "123456789012")
    assert stat.S_IMODE((home / "control.sock").stat().st_mode) == 0o600
    identity = boto3.client(
        "sts",
        endpoint_url=state["api_endpoint"],
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    ).get_caller_identity()
    assert identity["Account"] == state["account"]
    os.kill(state["pid"], signal.SIGTERM)
    wait_for(lambda: '"daemon.stopped"' in (home / "events.jsonl").read_text(), 30, "it to stop")
    assert not (home / "state.json").exists()
    assert not (home / "control.sock").exists()
    for line in (home / "daemon.log").read_text().splitlines():
        json.loads(line)


def test_it_answers_on_its_control_socket(home: Path) -> None:
    assert ask(home, "events")[0]["kind"] == "daemon.ready"
    assert ask(home, "hosts") == []
    assert ask(home, "wait", condition="hosts_gone", wait_s=5.0)["met"] is True
    assert ask(home, "wait", condition="targets_healthy", count=1, wait_s=0.2)["met"] is False
    with pytest.raises(RehearsalError, match="op must be one of: events"):
        ask(home, "nothing")
    with pytest.raises(RehearsalError, match="condition must be one of"):
        ask(home, "wait", condition="rain")


def test_two_daemons_do_not_share_a_home(home: Path) -> None:
    second = start(home)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 1
    assert b"another rehearsal daemon runs in" in errors
    assert ask(home, "hosts") == []


def test_it_costs_little_while_nothing_happens(home: Path) -> None:
    pid = json.loads((home / "state.json").read_text())["pid"]

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(1)
    before, began = cpu_s(), time.monotonic()
    time.sleep(4)
    assert (cpu_s() - before) / (time.monotonic() - began) < 0.03


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RehearsalError, match="no rehearsal daemon answers"):
        ask(tmp_path, "hosts")
