"""What systemd does with the raylets' units: real systemd, in a container over this machine's own root.

Ray is replaced by a program that behaves like it in what matters here: a head refuses to start while a
worker of its old cluster lives, SIGTERM ends it with code 1, and a head listens on the GCS port.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.node import raylet as raylets
from app.node.raylet import render_raylet_units
from app.node.topology import TopologyPlan, plan_topology
from rehearsal.machines import cgroups
from tests.unit.topology_trees import emulated_output, file_host

SYSTEMD = Path("/lib/systemd/systemd")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-nspawn") is None or not SYSTEMD.exists(),
    reason="needs root, systemd and systemd-nspawn (Debian package systemd-container)",
)

FAKE_RAY = """#!/usr/bin/python3 -S
import os, signal, socket, sys, time
head = "--head" in sys.argv
name = next(a for a in sys.argv if a.startswith("--labels=")).split("raylet=")[1]
def log(what):
    with open("/result/events", "a") as file:
        file.write("%s %s %d\\n" % (what, name, os.getpid()))
def workers():
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                arguments = open("/proc/%s/cmdline" % entry).read().split("\\0")
            except OSError:
                continue
            if "--block" in arguments and "--head" not in arguments:
                return True
def end(*_):
    log("stop")
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
if head:
    if os.path.exists("/run/broken"):
        log("broken")
        sys.exit(1)
    if workers():
        log("refused")
        sys.exit(1)
    listener = socket.create_server(("127.0.0.1", 6379))
log("start")
time.sleep(600)
"""

SCENARIO = """#!/bin/bash
units="neuronfleet-ray-head neuronfleet-ray-worker@1 neuronfleet-ray-worker@2 neuronfleet-ray-worker@3"
pids() { for u in $units; do systemctl show -P MainPID $u; done | xargs; }
states() { for u in $units; do systemctl show -P ActiveState $u; done | xargs; }
all_up() { # and none of the pids given is among theirs
    for _ in $(seq 400); do
        if [ "$(states)" = "active active active active" ]; then
            fresh=yes
            for p in "$@"; do [[ " $(pids) " != *" $p "* ]] || fresh=; done
            [ -z "$fresh" ] || return 0
        fi
        sleep 0.1
    done
    return 1
}
note() { echo "$1: $(pids) | $(states)" >>/result/notes; }
useradd --system neuronfleet
chmod 777 /result
mkdir -p /run/neuronfleet && echo HEAD_ADDRESS=127.0.0.1:6379 >/run/neuronfleet/head.env
systemctl start --no-block neuronfleet.target
all_up; note booted
kill -9 $(systemctl show -P MainPID neuronfleet-ray-worker@2); sleep 0.3
all_up; note worker-killed
systemctl restart neuronfleet-ray-worker@1
all_up; note worker-restarted
old=$(pids)
kill -9 $(systemctl show -P MainPID neuronfleet-ray-head); sleep 0.3
all_up $old; note head-killed
old=$(pids)
systemctl restart neuronfleet-ray-head
all_up $old; note head-restarted
systemctl stop neuronfleet.target
for _ in $(seq 300); do [ "$(states)" = "inactive inactive inactive inactive" ] && break; sleep 0.1; done
note stopped
systemctl list-units --failed --plain --no-legend 'neuronfleet*' >>/result/failed
touch /run/broken
systemctl reset-failed
begin=$(date +%s%N)
systemctl start --no-block neuronfleet-ray-head
for _ in $(seq 900); do [ -e /result/handled ] && break; sleep 0.1; done
echo $((($(date +%s%N) - begin) / 1000000)) >/result/milliseconds
journalctl --no-pager -n 400 >/result/journal 2>&1
touch /result/done
systemctl poweroff --force
"""

CONTAINER = """set -e
for group in $5; do echo $$ >"$group"; done
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp -a "$2/." "$1/root/"
exec systemd-nspawn --quiet --boot --register=no --keep-unit --private-network --settings=no \\
    --machine="$4" --directory="$1/root" --bind="$3:/result" --resolv-conf=off --timezone=off \\
    --link-journal=no --console=read-only -- --unit=scenario.service
"""


def plan_of(tmp_path: Path) -> TopologyPlan:
    """Four raylets of an inf2.48xlarge, bound to no node (this machine lacks theirs)."""
    plan = plan_topology(file_host(tmp_path, emulated_output(tmp_path, "inf2.48xlarge")), 2)
    free = tuple(raylet.model_copy(update={"numa_nodes": ()}) for raylet in plan.raylets)
    return plan.model_copy(update={"raylets": free})


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The notes (unit pids and states at each step) and events (starts, stops, refusals) of the scenario."""
    base = tmp_path_factory.mktemp("raylet-restart")
    units = render_raylet_units(plan_of(base), "cell", "127.0.0.1")
    files = base / "files"
    for name, text in units.items():
        write(files / "etc/systemd/system" / name, text)
    wants = " ".join(units)
    write(files / "etc/systemd/system/neuronfleet.target", f"[Unit]\nWants={wants}\n")
    write(
        files / "etc/systemd/system/neuronfleet-failed@.service",
        "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo %i >>/result/handled'\n",
    )
    write(
        files / "etc/systemd/system/scenario.service",
        "[Unit]\nRequires=basic.target\nAfter=basic.target\n[Service]\nExecStart=/scenario\n",
    )
    write(files / raylets.RAY.lstrip("/"), FAKE_RAY, 0o755)
    write(files / "scenario", SCENARIO, 0o755)
    (base / "machine").mkdir()
    result = base / "result"
    result.mkdir()
    name = f"neuronfleet-restart-{os.getpid()}"
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", CONTAINER, "container"]
    groups = cgroups.create("raylet-restart", name)  # of its own: this machine's processes are not its
    command += [str(base / "machine"), str(files), str(result), name, " ".join(str(path) for path in groups)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL, check=False
        )
    finally:
        cgroups.kill("raylet-restart", name)
        cgroups.remove("raylet-restart", name)
        cgroups.remove("raylet-restart")
    assert (result / "done").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    notes = {}
    for line in (result / "notes").read_text().splitlines():
        step, _, rest = line.partition(": ")
        pids, _, states = rest.partition(" | ")
        notes[step] = (pids.split(), states.split())
    events = [tuple(line.split()) for line in (result / "events").read_text().splitlines()]
    return {
        "notes": notes,
        "events": events,
        "failed": (result / "failed").read_text(),
        "journal": (result / "journal").read_text(),
        "handled": (result / "handled").read_text().split() if (result / "handled").exists() else [],
        "milliseconds": int((result / "milliseconds").read_text()),
    }


def changed(scenario: dict[str, Any], before: str, after: str) -> list[bool]:
    pairs = zip(scenario["notes"][before][0], scenario["notes"][after][0], strict=True)
    return [old != new for old, new in pairs]


def test_all_raylets_come_up(scenario: dict[str, Any]) -> None:
    assert scenario["notes"]["booted"][1] == ["active"] * 4, scenario["journal"][-3000:]


def test_a_worker_that_dies_restarts_alone(scenario: dict[str, Any]) -> None:
    assert scenario["notes"]["worker-killed"][1] == ["active"] * 4
    assert changed(scenario, "booted", "worker-killed") == [False, False, True, False]


def test_a_worker_that_is_restarted_leaves_the_others_alone(scenario: dict[str, Any]) -> None:
    assert changed(scenario, "worker-killed", "worker-restarted") == [False, True, False, False]


@pytest.mark.parametrize("step", [("worker-restarted", "head-killed"), ("head-killed", "head-restarted")])
def test_a_head_takes_all_raylets_with_it_and_all_come_back(
    scenario: dict[str, Any], step: tuple[str, str]
) -> None:
    assert scenario["notes"][step[1]][1] == ["active"] * 4, scenario["journal"][-3000:]
    assert changed(scenario, *step) == [True] * 4


def test_a_head_never_meets_a_worker_of_its_old_cluster(scenario: dict[str, Any]) -> None:
    events = [event for event, _, _ in scenario["events"]]
    assert "refused" not in events
    assert events.count("start") == 4 + 1 + 1 + 4 + 4


def test_a_stop_is_clean(scenario: dict[str, Any]) -> None:
    assert scenario["notes"]["stopped"][1] == ["inactive"] * 4
    assert scenario["failed"].strip() == ""


def test_a_head_that_cannot_start_is_tried_again_and_then_reported(scenario: dict[str, Any]) -> None:
    """The scenario has started it before, so fewer than StartLimitBurst tries are left."""
    assert "neuronfleet-ray-head.service" in scenario["handled"]
    tries = [event for event, _, _ in scenario["events"]].count("broken")
    assert 2 <= tries <= 4
    assert scenario["milliseconds"] < 30_000  # RestartSec between tries; no wait for a port that never opens
