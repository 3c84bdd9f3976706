"""The proof on four NUMA nodes runs, holds, and would notice a plan that is wrong."""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import pytest

from rehearsal.numa_proof.machine import MachineRun, missing_programs, run_machine
from rehearsal.numa_proof.verdict import as_json, bad_plan_check, checks_of, faults_of

pytestmark = pytest.mark.skipif(
    bool(missing_programs()) and os.geteuid() != 0,
    reason=f"needs the Debian packages {missing_programs()}, and root to install them",
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> MachineRun:
    return run_machine(tmp_path_factory.mktemp("numa-proof"))


@pytest.fixture
def report(machine: MachineRun) -> dict[str, Any]:
    return dict(json.loads(machine.result))


def test_every_replica_sits_where_the_plan_says(machine: MachineRun, report: dict[str, Any]) -> None:
    result = as_json(report, machine.seconds)
    assert result["faults"] == []
    assert len(result["replicas"]) == 12 + 3 + 1
    assert result["device_nodes"] == {
        str(device): node for device, node in enumerate([2, 3, 2, 3, 2, 3, 1, 1, 0, 0, 0, 1])
    }


def test_pages_of_blocks_on_one_node_are_local(report: dict[str, Any]) -> None:
    for check in checks_of(report):
        if check.tp_degree == 2:
            assert tuple(int(node) for node in check.pages_by_node) == check.device_nodes
            assert check.thread_nodes == check.device_nodes
            assert check.worst_distance == 10


def test_node_0_for_devices_0_to_5_is_remote(report: dict[str, Any]) -> None:
    bad = bad_plan_check(report)
    assert bad.device_nodes == (2, 3)
    assert set(bad.pages_by_node) == {"0"}
    assert bad.worst_distance == 32


def test_the_commands_are_those_of_the_units(report: dict[str, Any]) -> None:
    first = report["runs"][0]["raylets"][0]["command"]
    assert first[:3] == ["/usr/bin/numactl", "--cpunodebind=2", "--membind=2"]
    assert "--num-cpus=2" in first


def test_a_page_on_the_wrong_node_is_noticed(report: dict[str, Any]) -> None:
    moved = copy.deepcopy(report)
    replica = moved["runs"][0]["raylets"][0]["replicas"][0]
    replica["anonymous_pages"] = {"0": 2048}
    assert any("pages outside" in fault for fault in faults_of(moved))


def test_a_thread_on_the_wrong_node_is_noticed(report: dict[str, Any]) -> None:
    moved = copy.deepcopy(report)
    moved["runs"][1]["raylets"][2]["replicas"][0]["threads"][1]["ran_on_cpu"] = 7
    assert any("ran on CPU 7" in fault for fault in faults_of(moved))
