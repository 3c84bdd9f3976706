"""Reading a host: every generation of neuron-ls, the fallbacks below it, and the kernel's side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.node.topology import TopologyError, plan_topology, read_host
from app.node.topology.host import host_of_output
from app.node.topology.idlist import format_idlist, parse_idlist
from app.node.topology.neuron_ls import normal_bdf, parse_neuron_ls
from tests.unit.topology_trees import (
    GIB,
    INF2_48XLARGE_NODES,
    emulated_output,
    file_host,
    host_tree,
    tool,
)

PUBLISHED = [2, 3, 2, 3, 2, 3, 1, 1, 0, 0, 0, 1]
PCI_48XLARGE = {
    "0000:80:1e.0": 2,
    "0000:90:1e.0": 3,
    "0000:80:1d.0": 2,
    "0000:90:1f.0": 3,
    "0000:80:1f.0": 2,
    "0000:90:1d.0": 3,
    "0000:20:1e.0": 1,
    "0000:20:1f.0": 1,
    "0000:10:1e.0": 0,
    "0000:10:1f.0": 0,
    "0000:10:1d.0": 0,
    "0000:20:1d.0": 1,
}


@pytest.mark.parametrize("generation", ["2.26", "2.32"])
@pytest.mark.parametrize("domain", [True, False])
def test_the_published_map_is_read(tmp_path: Path, generation: str, domain: bool) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", generation=generation, bdf_domain=domain)
    host = file_host(tmp_path, text)
    assert [device.numa_node for device in host.devices] == PUBLISHED
    assert [device.cores for device in host.devices] == [(2 * i, 2 * i + 1) for i in range(12)]
    assert host.devices[0].bdf == "0000:80:1e.0"
    assert host.devices[0].connected_to == (11, 1)
    assert [node.cpus for node in host.nodes] == [parse_idlist(c) for c in INF2_48XLARGE_NODES.values()]
    assert host.instance_type == ("inf2.48xlarge" if generation == "2.32" else None)
    assert host.problems == () and host.warnings == ()


def test_an_old_neuron_ls_without_numa_finds_the_nodes_by_pci(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", generation="2.24")
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES, pci=PCI_48XLARGE)
    host = read_host(root, tool(tmp_path, text))
    assert [device.numa_node for device in host.devices] == PUBLISHED
    assert [device.cores for device in host.devices] == [(2 * i, 2 * i + 1) for i in range(12)]
    assert host.problems == ()


def test_minus_one_finds_the_node_by_the_devices_cpus(tmp_path: Path) -> None:
    listed = json.loads(emulated_output(tmp_path, "inf2.48xlarge"))
    for device in listed:
        device["numa_node"] = "-1"
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES)
    host = read_host(root, tool(tmp_path, json.dumps(listed)))
    assert [device.numa_node for device in host.devices] == PUBLISHED


def test_a_host_with_one_node_settles_what_nobody_says(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", generation="2.24")
    host = read_host(host_tree(tmp_path / "root", {0: "0-95"}), tool(tmp_path, text))
    assert {device.numa_node for device in host.devices} == {0}


def test_where_nothing_says_the_node_stays_unknown(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge")
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    host = read_host(root, tool(tmp_path, text))
    assert {device.numa_node for device in host.devices} == {None}
    assert host.problems == ()


@pytest.mark.parametrize("value", ["1", 1, " 1 "])
def test_numa_node_may_be_a_string_or_a_number(value: Any) -> None:
    reading = parse_neuron_ls(json.dumps([{"neuron_device": 0, "nc_count": 2, "numa_node": value}]))
    assert reading.devices[0].numa_node == 1


@pytest.mark.parametrize("value", ["-1", -1, "", None])
def test_numa_node_may_be_unknown(value: Any) -> None:
    reading = parse_neuron_ls(json.dumps([{"neuron_device": 0, "nc_count": 2, "numa_node": value}]))
    assert reading.devices[0].numa_node is None
    assert reading.warnings == [] and reading.problems == []


@pytest.mark.parametrize("value", ["node0", True, 1.5, [0]])
def test_a_numa_node_that_is_no_number_is_left_out_and_said(value: Any) -> None:
    reading = parse_neuron_ls(json.dumps([{"neuron_device": 0, "nc_count": 2, "numa_node": value}]))
    assert reading.devices[0].numa_node is None
    assert "numa_node" in reading.warnings[0]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "printed nothing"),
        ("  \n", "printed nothing"),
        ("Segmentation fault", "no JSON"),
        ('[{"neuron_device": 0', "no JSON"),
        ("{}", "an array of devices was expected"),
        ("null", "an array of devices was expected"),
        ('["x"]', "where a device was expected"),
        ('[{"nc_count": 2}]', "neuron_device"),
        ('[{"neuron_device": -1, "nc_count": 2}]', "neuron_device"),
        ('[{"neuron_device": 0}]', "nc_count"),
        ('[{"neuron_device": 0, "nc_count": 0}]', "nc_count"),
        ('[{"neuron_device": 0, "nc_count": 1000000000}]', "nc_count"),
        ('[{"neuron_device": 99999999, "nc_count": 2}]', "neuron_device"),
        ('[{"neuron_device": 0, "neuroncore_ids": ["a", 1]}]', "neuroncore_ids"),
        ('[{"neuron_device": 0, "neuroncore_ids": [1, 1]}]', "twice"),
        (
            '[{"neuron_device": 0, "nc_count": 2}, {"neuron_device": 0, "neuroncore_ids": [2, 3]}]',
            "lists device 0 twice",
        ),
        (
            '[{"neuron_device": 0, "neuroncore_ids": [0, 1]}, {"neuron_device": 1, "neuroncore_ids": [1]}]',
            "gives core 1 to device 0 and to device 1",
        ),
    ],
)
def test_output_that_is_wrong_is_a_problem_that_says_what(output: str, words: str) -> None:
    reading = parse_neuron_ls(output)
    assert any(words in problem.message for problem in reading.problems), reading.problems


def test_no_device_at_all_is_a_problem(tmp_path: Path) -> None:
    host = read_host(host_tree(tmp_path / "root", {0: "0-3"}), tool(tmp_path, "[]"))
    assert [problem.kind for problem in host.problems] == ["no-device"]
    assert host.source == "none"


def test_a_tool_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    error = (
        'level=fatal msg="Failed to load MLA system information" error="failed to discover Neuron devices"\n'
    )
    host = read_host(host_tree(tmp_path / "root", {0: "0-3"}), tool(tmp_path, stderr=error, code=1))
    assert host.problems[0].kind == "neuron-ls-failed"
    assert "exit code 1" in host.problems[0].message
    assert "failed to discover Neuron devices" in host.problems[0].message


def test_a_tool_that_is_not_there_is_named(tmp_path: Path) -> None:
    host = read_host(host_tree(tmp_path / "root", {0: "0-3"}), tmp_path / "nowhere/neuron-ls")
    assert "nowhere/neuron-ls is not there" in host.problems[0].message


def test_without_neuron_ls_the_drivers_folder_gives_devices_and_links(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    for index in range(6):
        folder = root / f"sys/devices/virtual/neuron_device/neuron{index}"
        folder.mkdir(parents=True)
        (folder / "core_count").write_text("2\n")
        (folder / "connected_devices").write_text(
            ", ".join(str(n) for n in (index - 1, index + 1) if 0 <= n < 6)
        )
    host = read_host(root, tool(tmp_path, "garbage"))
    assert host.source == "sysfs"
    assert [device.cores for device in host.devices] == [(2 * i, 2 * i + 1) for i in range(6)]
    assert host.devices[1].connected_to == (0, 2)
    assert host.devices[0].numa_node is None
    assert [problem.kind for problem in host.problems] == ["neuron-ls-output"]


def test_without_neuron_ls_and_driver_folder_pci_counts_devices(tmp_path: Path) -> None:
    pci = {f"0000:10:1{n}.0": 1 for n in "def"}
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"}, pci=pci)
    host = read_host(root, tool(tmp_path, code=2))
    assert len(host.devices) == 3 and {device.numa_node for device in host.devices} == {1}


def test_a_device_of_another_kind_on_the_bus_is_none_of_ours(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-3"}, pci={"0000:00:1f.0": 0})
    (root / "sys/bus/pci/devices/0000:00:1f.0/device").write_text("0x7364")
    host = read_host(root, tool(tmp_path, code=1))
    assert host.devices == ()


@pytest.mark.parametrize("missing", [[5], [0], [11], [3, 4]])
def test_a_missing_device_is_named(tmp_path: Path, missing: list[int]) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", missing_devices=missing)
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES)
    host = read_host(root, tool(tmp_path, text), instance_type="inf2.48xlarge")
    (problem,) = host.problems
    assert problem.kind == "device-missing"
    assert f"device {format_idlist(missing)} is missing" in problem.message
    assert "inf2.48xlarge has 12" in problem.message


def test_a_missing_device_shows_without_the_instance_type(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", missing_devices=[11])
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES, pci=PCI_48XLARGE)
    host = read_host(root, tool(tmp_path, text))
    assert "PCI lists 12" in host.problems[0].message


def test_the_instance_type_comes_from_dmi(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", missing_devices=[5])
    root = host_tree(tmp_path / "root", {0: "0-95"})
    (root / "sys/devices/virtual/dmi/id").mkdir(parents=True)
    (root / "sys/devices/virtual/dmi/id/product_name").write_text("inf2.24xlarge\n")
    host = read_host(root, tool(tmp_path, text))
    assert host.instance_type == "inf2.24xlarge"
    assert "device 5 is missing" in host.problems[0].message


def test_a_node_that_the_kernel_lacks_is_a_problem(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge")
    host = read_host(host_tree(tmp_path / "root", {0: "0-23", 1: "24-47"}), tool(tmp_path, text))
    messages = " ".join(problem.message for problem in host.problems)
    assert {problem.kind for problem in host.problems} == {"node-missing"}
    assert "device 0,2,4 hangs on NUMA node 2" in messages and "NUMA node 3" in messages


def test_a_node_outside_the_cgroup_is_a_problem(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge")
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES, allowed="0-71,96-167")
    host = read_host(root, tool(tmp_path, text))
    assert "may use none of its CPUs (72-95,168-191)" in host.problems[0].message


def test_a_held_core_is_named_with_its_process(tmp_path: Path) -> None:
    process = {"pid": 4242, "command": "python old_server.py", "neuron_runtime_version": "2.0.0"}
    text = emulated_output(tmp_path, "inf2.48xlarge", processes={"3": [process]})
    host = read_host(host_tree(tmp_path / "root", INF2_48XLARGE_NODES), tool(tmp_path, text))
    (problem,) = host.problems
    assert problem.kind == "stale-process"
    assert "cores 6-7 of device 3 are held by process 4242 (python old_server.py)" in problem.message


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.8xlarge")
    host = read_host(host_tree(tmp_path / "root", {0: "0-31"}, allowed="0-3,16-19"), tool(tmp_path, text))
    assert host.cpus == host.nodes[0].cpus == (0, 1, 2, 3, 16, 17, 18, 19)


def test_a_node_of_memory_only_is_left_out(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-3"})
    extra = root / "sys/devices/system/node/node1"
    extra.mkdir()
    (extra / "cpulist").write_text("\n")
    host = read_host(root, tool(tmp_path, emulated_output(tmp_path, "inf2.xlarge")))
    assert [node.index for node in host.nodes] == [0]


def test_memory_is_the_smallest_limit_above_us_in_cgroup_v2(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-3"}, node_gib=16)
    slice_folder = root / "sys/fs/cgroup/system.slice"
    (slice_folder / "neuronfleet-configure.service").mkdir(parents=True)
    (slice_folder / "neuronfleet-configure.service/memory.max").write_text("max\n")
    (slice_folder / "memory.max").write_text(f"{8 * GIB}\n")
    host = read_host(root, tool(tmp_path, emulated_output(tmp_path, "inf2.xlarge")))
    assert host.memory_bytes == 8 * GIB


def test_memory_limit_of_cgroup_v1(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-3"}, node_gib=16, cgroup="4:memory:/a/b\n3:cpuset:/\n0::/\n")
    (root / "sys/fs/cgroup/memory/a/b").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/a/memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    host = read_host(root, tool(tmp_path, emulated_output(tmp_path, "inf2.xlarge")))
    assert host.memory_bytes == 4 * GIB


def test_a_kernel_without_numa_gives_no_node(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-3"})
    for path in (root / "sys/devices/system/node/node0").iterdir():
        path.unlink()
    (root / "sys/devices/system/node/node0").rmdir()
    listed = json.loads(emulated_output(tmp_path, "inf2.xlarge"))
    host = read_host(root, tool(tmp_path, json.dumps(listed)))
    assert host.nodes == () and host.devices[0].numa_node is None and host.cpus == (0, 1, 2, 3)


def test_this_machine_is_read(tmp_path: Path) -> None:
    host = read_host(neuron_ls=tool(tmp_path, emulated_output(tmp_path, "inf2.xlarge")))
    assert host.cpus and host.nodes and host.memory_bytes > GIB and host.shm_bytes


@pytest.mark.parametrize("text", ["0-2,5", "7", "", "0-23,96-119"])
def test_id_lists_are_written_as_they_are_read(text: str) -> None:
    assert format_idlist(parse_idlist(text)) == text


@pytest.mark.parametrize("text", ["a", "3-1", "0-", "-3", "1,,x"])
def test_id_lists_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        parse_idlist(text)


@pytest.mark.parametrize(
    ("text", "normal"),
    [("80:1e.0", "0000:80:1e.0"), ("0000:80:1E.0", "0000:80:1e.0"), ("80:1e", None), (7, None), ("", None)],
)
def test_pci_addresses_get_their_domain(text: Any, normal: str | None) -> None:
    assert normal_bdf(text) == normal


KEYS = [
    "bdf",
    "cpu_affinity",
    "numa_node",
    "connected_to",
    "memory_size",
    "neuroncore_ids",
    "neuron_processes",
    "instance_type",
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0-3", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pid", "command"]), inner),
    max_leaves=5,
)
device_like = st.fixed_dictionaries(
    {
        "neuron_device": st.integers(0, 12) | json_values,
        "nc_count": st.integers(1, 4) | json_values,
    },
    optional=dict.fromkeys(KEYS, json_values),
)


@given(listed=st.lists(device_like | json_values, max_size=6), degree=st.integers(-1, 9))
@settings(max_examples=300, deadline=None)
def test_no_output_ends_in_anything_but_a_plan_or_reasons(listed: list[Any], degree: int) -> None:
    host = host_of_output(json.dumps(listed))
    for allow_degraded in (False, True):
        try:
            plan = plan_topology(host, degree, allow_degraded=allow_degraded)
        except TopologyError as error:
            assert error.problems and all(problem.message for problem in error.problems)
        else:
            cores = [core for block in plan.blocks for core in block.cores]
            assert len(set(cores)) == len(cores) and not set(cores) & set(plan.idle_cores)


@given(text=st.text(max_size=60))
def test_no_text_ends_in_an_exception(text: str) -> None:
    assert host_of_output(text).problems
