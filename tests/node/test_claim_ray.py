"""Real raylets, started by the planned commands on one host, and Serve replicas that are killed at random."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.node import ports
from tests.node.claim_ray_program import NODE_IP, RAYLETS, the_plan

CLAIMS = 50

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("numactl") is None,
    reason="needs root, unshare and numactl (a network and process namespace of its own)",
)


@pytest.fixture(scope="module")
def run() -> Iterator[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="nf-", dir="/tmp"))  # short: Ray puts sockets below it
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
    command += ["-m", "tests.node.claim_ray_program", str(folder), str(CLAIMS), "7"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=580, check=False
        )
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("raylet-*.log")))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + logs
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_no_core_ever_has_two_owners(run: dict[str, Any]) -> None:
    assert len(run["log"]) >= CLAIMS and len(run["killed"]) > CLAIMS / 2
    held: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for entry in run["log"]:
        end = run["killed"].get(str(entry["pid"]), float("inf"))
        for core in entry["cores"]:
            held[core].append((entry["claimed"], end))
    assert len(held) == 12
    for intervals in held.values():
        intervals.sort()
        for (_, end), (begin, _) in pairwise(intervals):
            assert begin >= end


def test_every_block_is_whole_and_of_the_replicas_raylet(run: dict[str, Any]) -> None:
    plan = the_plan()
    for entry in run["log"]:
        own = [plan.blocks[block].cores for block in plan.raylets[int(entry["raylet"])].blocks]
        assert tuple(entry["cores"]) in own
        assert entry["visible"] == ",".join(str(core) for core in entry["cores"])
        assert entry["policy"] == "bind:0"  # numactl's, on the raylet, reached the replica


def test_nothing_leaks(run: dict[str, Any]) -> None:
    assert sorted(run["free"]) == list(range(6))


def test_each_raylet_offers_its_own_share(run: dict[str, Any]) -> None:
    assert len(run["nodes"]) == RAYLETS
    for node in run["nodes"]:
        assert node["Resources"]["CPU"] == 1 and node["Resources"]["neuron_cores"] == 4
        index = int(node["Labels"]["raylet"])
        assert node["Labels"]["numa"] == "0"
        assert node["NodeManagerPort"] == ports.raylet_ports(index).node_manager


def test_nothing_listens_outside_the_port_plan(run: dict[str, Any]) -> None:
    """But for one port of each Serve replica (calls between deployments), which the kernel chooses: nothing
    of ours calls it, and no security group opens it."""
    planned = set(ports.HEAD_PORTS).union(*(ports.raylet_ports(i).all_ports() for i in range(RAYLETS)))
    opened = {port for allowed in ports.cluster_ingress() for port in allowed.ports}
    listening = {port for _, port, _ in run["ports"]}
    strays = {(port, owner) for _, port, owner in run["ports"] if port not in planned}
    assert all(owner.startswith("ray::ServeRepl") or not owner for _, owner in strays), strays
    assert len(strays) <= 6 and not {port for port, _ in strays} & opened
    for index in range(RAYLETS):
        own = ports.raylet_ports(index)
        assert {own.node_manager, own.object_manager, own.agent_grpc, own.agent_http} <= listening
        assert {own.runtime_env_agent, own.metrics_export} <= listening


def test_the_dashboard_listens_on_loopback_only(run: dict[str, Any]) -> None:
    assert {address for address, port, _ in run["ports"] if port == ports.DASHBOARD_PORT} == {"0100007F"}
    assert NODE_IP != "127.0.0.1"


def test_sigterm_stops_one_raylet_and_leaves_the_others(run: dict[str, Any]) -> None:
    """Workers were stopped first, the last of them while the head and the others lived."""
    assert run["stopped"] == [[True, True, False], [True, False, False], [False, False, False]]
