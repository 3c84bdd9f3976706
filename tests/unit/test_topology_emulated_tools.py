"""The emulated neuron-ls and neuron-monitor: sizes, faults, and that they never pass for the real tools."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.node.topology.host import INF2_DEVICES
from tests.unit.topology_trees import EMULATED

MONITOR = EMULATED.with_name("neuron-monitor")


def run(
    tool: Path, *arguments: str, tmp_path: Path, config: dict[str, Any] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "emulated.json"
    if config is not None:
        path.write_text(json.dumps(config))
    environment = {**os.environ, "NEURON_EMULATED_CONFIG": str(path), **variables}
    return subprocess.run(
        [str(tool), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("size", sorted(INF2_DEVICES))
def test_each_size_has_its_devices_and_links(tmp_path: Path, size: str) -> None:
    done = run(EMULATED, "-j", tmp_path=tmp_path, NEURON_EMULATED_INSTANCE_TYPE=size)
    devices = json.loads(done.stdout)
    count = INF2_DEVICES[size]
    assert [device["neuron_device"] for device in devices] == list(range(count))
    links = [device["connected_to"] for device in devices]
    if count == 12:
        assert links[0] == [11, 1] and links[11] == [10, 0]  # a ring
    elif count == 6:
        assert links[0] == [1] and links[5] == [4] and links[2] == [1, 3]  # a chain
    else:
        assert links == [None]


def test_on_this_host_every_node_and_cpu_exists(tmp_path: Path) -> None:
    done = run(EMULATED, "--json-output", tmp_path=tmp_path, NEURON_EMULATED_INSTANCE_TYPE="inf2.48xlarge")
    online = Path("/sys/devices/system/node/online").read_text()
    for device in json.loads(done.stdout):
        assert Path(f"/sys/devices/system/node/node{device['numa_node']}").exists(), online


@pytest.mark.parametrize("arguments", [[], ["-j"], ["--topology"]])
def test_another_instance_type_has_no_device(tmp_path: Path, arguments: list[str]) -> None:
    done = run(EMULATED, *arguments, tmp_path=tmp_path, NEURON_EMULATED_INSTANCE_TYPE="m7i.large")
    assert done.returncode == 1 and done.stdout == ""
    assert 'error="failed to discover Neuron devices"' in done.stderr


def test_without_any_configuration_there_is_no_device(tmp_path: Path) -> None:
    assert run(EMULATED, "-j", tmp_path=tmp_path, NEURON_EMULATED_INSTANCE_TYPE="").returncode == 1


def test_people_are_told_that_it_is_emulated(tmp_path: Path) -> None:
    text = run(EMULATED, "-t", tmp_path=tmp_path, NEURON_EMULATED_INSTANCE_TYPE="inf2.48xlarge").stdout
    assert text.startswith("EMULATED") and "| 11 " in text.replace("|  11", "| 11") and "0000:80:1e.0" in text
    for tool in (EMULATED, MONITOR):
        assert "EMULATED" in run(tool, "--version", tmp_path=tmp_path).stdout


def test_a_process_that_holds_a_device_is_listed(tmp_path: Path) -> None:
    process = {"pid": 7, "command": "old", "neuron_runtime_version": "2.0.0"}
    config = {"instance_type": "inf2.xlarge", "processes": {"0": [process]}}
    (device,) = json.loads(run(EMULATED, "-j", tmp_path=tmp_path, config=config).stdout)
    assert device["neuron_processes"] == [process]


@pytest.mark.parametrize("generation", ["2.24", "2.26", "2.32"])
def test_generations_differ_by_their_keys(tmp_path: Path, generation: str) -> None:
    config = {"instance_type": "inf2.xlarge", "generation": generation}
    (device,) = json.loads(run(EMULATED, "-j", tmp_path=tmp_path, config=config).stdout)
    new = {"numa_node", "cpu_affinity", "neuroncore_ids"}
    assert (new <= set(device)) == (generation != "2.24")
    assert ("instance_type" in device) == (generation == "2.32")


def test_neuron_monitor_streams_documents_with_the_hosts_own_figures(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "period": "100ms",
                "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": "neuroncore_counters"}]}],
                "system_metrics": [{"type": "memory_info"}, {"type": "neuron_hw_counters"}],
            }
        )
    )
    config = tmp_path / "emulated.json"
    process = {"pid": os.getpid(), "command": "x", "neuron_runtime_version": "2.0.0"}
    config.write_text(
        json.dumps(
            {
                "instance_type": "inf2.48xlarge",
                "processes": {"3": [process]},
                "utilization": {"6": 41.5},
                "ecc": {"3": {"mem_ecc_uncorrected": 2}},
            }
        )
    )
    monitor = subprocess.Popen(
        [str(MONITOR), "-c", str(settings)],
        env={**os.environ, "NEURON_EMULATED_CONFIG": str(config)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert monitor.stdout is not None
        first, second = (json.loads(monitor.stdout.readline()) for _ in range(2))
    finally:
        monitor.kill()
        monitor.wait()
    assert first["emulated"] is True
    (runtime,) = second["neuron_runtime_data"]
    in_use = runtime["report"]["neuroncore_counters"]["neuroncores_in_use"]
    assert runtime["pid"] == os.getpid() and in_use["6"]["neuroncore_utilization"] == 41.5
    assert in_use["7"]["neuroncore_utilization"] == 0.0
    counters = second["system_data"]["neuron_hw_counters"]["neuron_devices"]
    assert counters[3]["mem_ecc_uncorrected"] == 2 and counters[2]["mem_ecc_uncorrected"] == 0
    total = second["system_data"]["memory_info"]["memory_total_bytes"]
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "vcpu_usage" not in second["system_data"]
    assert second["neuron_hardware_info"]["neuron_device_count"] == 12
