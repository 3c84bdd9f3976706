"""The plan of a host: what must come out for each Inf2 size, shares, degraded plans, and bad input."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.node.topology import (
    Device,
    HostTopology,
    TopologyError,
    TopologyPlan,
    load_plan,
    plan_head,
    plan_topology,
    read_host,
    write_plan,
)
from app.node.topology.plan import numactl_problem, unbound
from tests.unit.topology_trees import (
    GIB,
    INF2_48XLARGE_NODES,
    emulated_output,
    file_host,
    host_tree,
    nodes_of,
    tool,
)


@pytest.fixture
def inf2_48xlarge(tmp_path: Path) -> HostTopology:
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES, sockets={0: 0, 1: 0, 2: 1, 3: 1})
    host = read_host(root, tool(tmp_path, emulated_output(tmp_path, "inf2.48xlarge")))
    return host.model_copy(update={"shm_bytes": 384 * GIB})


def bindings(plan: TopologyPlan) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    return [(raylet.numa_nodes, raylet.blocks, raylet.cpus) for raylet in plan.raylets]


def test_inf2_48xlarge_tp_2(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 2)
    assert len(plan.blocks) == 12
    assert all(len(block.numa_nodes) == 1 for block in plan.blocks)
    assert bindings(plan) == [
        ((2,), (0, 2, 4), 48),
        ((3,), (1, 3, 5), 48),
        ((1,), (6, 7, 11), 48),
        ((0,), (8, 9, 10), 48),
    ]
    assert plan.raylets[0].cores == (0, 1, 4, 5, 8, 9)
    assert plan.idle_cores == () and plan.warnings == ()


def test_inf2_48xlarge_tp_8(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 8)
    assert [(block.cores[0], block.cores[-1], block.numa_nodes) for block in plan.blocks] == [
        (0, 7, (2, 3)),
        (8, 15, (1, 2, 3)),
        (16, 23, (0, 1)),
    ]
    assert bindings(plan) == [((2, 3), (0,), 64), ((1, 2, 3), (1,), 64), ((0, 1), (2,), 64)]


def test_inf2_48xlarge_tp_24(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 24)
    assert [block.cores for block in plan.blocks] == [tuple(range(24))]
    assert bindings(plan) == [((0, 1, 2, 3), (0,), 192)]


@pytest.mark.parametrize("instance_type", ["inf2.xlarge", "inf2.8xlarge"])
def test_one_device_hosts_have_one_block_at_tp_2(tmp_path: Path, instance_type: str) -> None:
    root = host_tree(tmp_path / "root", {0: "0-31"}, node_gib=128)
    plan = plan_topology(read_host(root, tool(tmp_path, emulated_output(tmp_path, instance_type))), 2)
    assert [block.cores for block in plan.blocks] == [(0, 1)]
    assert bindings(plan) == [((0,), (0,), 32)]


@pytest.mark.parametrize("instance_type", ["inf2.xlarge", "inf2.8xlarge"])
def test_one_device_hosts_from_a_file(tmp_path: Path, instance_type: str) -> None:
    plan = plan_topology(file_host(tmp_path, emulated_output(tmp_path, instance_type)), 2)
    assert [block.cores for block in plan.blocks] == [(0, 1)]
    assert (
        len(plan.raylets) == 1
        and plan.raylets[0].cpus == {"inf2.xlarge": 4, "inf2.8xlarge": 32}[instance_type]
    )


def test_inf2_24xlarge_when_neuron_ls_says_nothing(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    plan = plan_topology(read_host(root, tool(tmp_path, emulated_output(tmp_path, "inf2.24xlarge"))), 8)
    assert [block.cores for block in plan.blocks] == [tuple(range(8))]
    assert plan.idle_cores == (8, 9, 10, 11)
    assert bindings(plan) == [((), (0,), 96)]
    assert "bound to no NUMA node" in plan.warnings[0] and "devices 0-3" in plan.warnings[0]


def test_inf2_24xlarge_follows_what_neuron_ls_says(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=[1, 1, 0, 0, 1, 1])
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    plan = plan_topology(read_host(root, tool(tmp_path, text)), 4)
    assert [block.numa_nodes for block in plan.blocks] == [(1,), (0,), (1,)]
    assert bindings(plan) == [((1,), (0, 2), 48), ((0,), (1,), 48)]


def test_a_device_of_unknown_node_makes_an_unbound_raylet_beside_bound_ones(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=[0, 0, 0, 0, None, None])
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    plan = plan_topology(read_host(root, tool(tmp_path, text)), 4)
    assert [raylet.numa_nodes for raylet in plan.raylets] == [(0,), ()]
    assert sum(raylet.cpus for raylet in plan.raylets) <= 96
    assert "devices 4-5" in plan.warnings[0]


def test_memory_is_split_by_node_and_reserved(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 8)
    sizes = [raylet.memory_bytes + raylet.object_store_bytes for raylet in plan.raylets]
    assert sum(sizes) <= 0.9 * inf2_48xlarge.memory_bytes
    assert all(size == pytest.approx(0.9 * 256 * GIB, rel=1e-6) for size in sizes)


def test_object_stores_fit_dev_shm(inf2_48xlarge: HostTopology) -> None:
    small = inf2_48xlarge.model_copy(update={"shm_bytes": GIB})
    plan = plan_topology(small, 2)
    assert sum(raylet.object_store_bytes for raylet in plan.raylets) <= 0.8 * GIB
    assert plan.warnings == ()


def test_a_dev_shm_that_is_too_small_is_said(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge.model_copy(update={"shm_bytes": 64 * 1024**2}), 2)
    assert any("/dev/shm has 64 MiB free" in warning for warning in plan.warnings)
    assert all(raylet.object_store_bytes >= 75 * 1024**2 for raylet in plan.raylets)  # Ray refuses less


def test_a_cgroup_limit_bounds_the_raylets(inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge.model_copy(update={"memory_bytes": 64 * GIB}), 2)
    assert sum(r.memory_bytes + r.object_store_bytes for r in plan.raylets) <= 64 * GIB


@pytest.mark.parametrize("degree", [0, -1, 3, 5, 48])
def test_a_degree_that_does_not_fit_is_refused(inf2_48xlarge: HostTopology, degree: int) -> None:
    with pytest.raises(TopologyError) as caught:
        plan_topology(inf2_48xlarge, degree)
    assert [problem.kind for problem in caught.value.problems] == ["degree"]
    assert f"degree {degree}" in str(caught.value)


def test_a_degree_outside_the_profile_names_those_inside(inf2_48xlarge: HostTopology) -> None:
    with pytest.raises(
        TopologyError, match="12 is not supported by the engine profile; it has 1, 2, 4, 8, 24"
    ):
        plan_topology(inf2_48xlarge, 12, supported_degrees={24, 8, 4, 2, 1})


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    text = emulated_output(
        tmp_path,
        "inf2.48xlarge",
        missing_devices=[5],
        processes={"3": [{"pid": 77, "command": "old"}]},
    )
    root = host_tree(tmp_path / "root", {0: "0-23", 1: "24-47"})
    with pytest.raises(TopologyError) as caught:
        plan_topology(read_host(root, tool(tmp_path, text), "inf2.48xlarge"), 48)
    kinds = {problem.kind for problem in caught.value.problems}
    assert kinds == {"device-missing", "node-missing", "stale-process", "degree"}


def test_eleven_devices_of_twelve_degrade_to_what_is_left(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", missing_devices=[5])
    host = read_host(host_tree(tmp_path / "root", INF2_48XLARGE_NODES), tool(tmp_path, text), "inf2.48xlarge")
    with pytest.raises(TopologyError, match="device 5 is missing or dead"):
        plan_topology(host, 8)
    plan = plan_topology(host, 8, allow_degraded=True)
    assert [block.cores[0] for block in plan.blocks] == [0, 12]
    assert plan.blocks[1].numa_nodes == (0, 1)
    assert plan.idle_cores == (8, 9, 20, 21, 22, 23)
    assert any("degraded" in warning and "device 5" in warning for warning in plan.warnings)


def test_a_held_device_is_left_out_of_a_degraded_plan(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge", processes={"3": [{"pid": 77, "command": "old"}]})
    host = read_host(host_tree(tmp_path / "root", INF2_48XLARGE_NODES), tool(tmp_path, text))
    with pytest.raises(TopologyError, match="process 77"):
        plan_topology(host, 2)
    degraded = plan_topology(host, 2, allow_degraded=True)
    assert degraded.idle_cores == (6, 7) and len(degraded.blocks) == 11
    serving = plan_topology(host, 2, ignore_processes=True)
    assert len(serving.blocks) == 12


def test_a_node_that_is_not_there_degrades_to_unbound(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge")
    host = read_host(host_tree(tmp_path / "root", {0: "0-23", 1: "24-47"}), tool(tmp_path, text))
    plan = plan_topology(host, 8, allow_degraded=True)
    assert [raylet.numa_nodes for raylet in plan.raylets] == [(), (0, 1)]


@pytest.mark.parametrize(
    "output",
    ['[{"neuron_device":0,"neuroncore_ids":[0,1]},{"neuron_device":1,"neuroncore_ids":[1]}]', "[]"],
)
def test_what_nothing_can_be_planned_from_is_fatal_even_degraded(tmp_path: Path, output: str) -> None:
    host = read_host(host_tree(tmp_path / "root", {0: "0-3"}), tool(tmp_path, output))
    with pytest.raises(TopologyError):
        plan_topology(host, 2, allow_degraded=True)


@pytest.mark.parametrize(("output", "code"), [("garbage", 0), ("", 0), ("", 1)])
def test_a_failed_neuron_ls_is_fatal_unless_degraded(tmp_path: Path, output: str, code: int) -> None:
    root = host_tree(tmp_path / "root", {0: "0-47", 1: "48-95"})
    for index in range(6):
        (root / f"sys/class/neuron_device/neuron{index}").mkdir(parents=True)
    host = read_host(root, tool(tmp_path, output, code=code))
    with pytest.raises(TopologyError, match="neuron-ls"):
        plan_topology(host, 8)
    plan = plan_topology(host, 8, allow_degraded=True)
    assert bindings(plan) == [((), (0,), 96)]
    assert len(plan.warnings) == 2  # neuron-ls failed, and the raylet is unbound


def test_numactl_must_be_there_for_a_bound_plan(tmp_path: Path, inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 8)
    problem = numactl_problem(plan, tmp_path)
    assert problem is not None and "/usr/bin/numactl is not there" in problem.message
    free = unbound(plan, problem.message)
    assert bindings(free) == [((), (0, 1, 2), 192)]
    assert free.warnings == (problem.message,)
    assert numactl_problem(free, tmp_path) is None
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/numactl").touch()
    assert numactl_problem(plan, tmp_path) is None


def test_a_head_host_has_one_raylet_with_nothing_to_claim(inf2_48xlarge: HostTopology) -> None:
    plan = plan_head(inf2_48xlarge, 8)
    assert plan.blocks == () and bindings(plan) == [((0, 1, 2, 3), (), 0)]
    assert 0 < plan.raylets[0].memory_bytes < inf2_48xlarge.memory_bytes


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path, inf2_48xlarge: HostTopology) -> None:
    plan = plan_topology(inf2_48xlarge, 8)
    path = tmp_path / "run/topology.json"
    write_plan(plan, path)
    assert load_plan(path) == plan
    assert [entry.name for entry in path.parent.iterdir()] == ["topology.json"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": 2}', '{"version": 1, "blocks": 3}'])
def test_a_plan_that_cannot_be_read_says_where_to_look(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "topology.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TopologyError, match="journalctl -u neuronfleet-configure"):
        load_plan(path)


def test_planning_takes_less_than_200_ms(tmp_path: Path) -> None:
    """Reading and planning at boot, without neuron-ls's own time; the best of five on a busy machine."""
    root = host_tree(tmp_path / "root", INF2_48XLARGE_NODES)
    script = tool(tmp_path, emulated_output(tmp_path, "inf2.48xlarge"))
    times = []
    for degree in (1, 2, 8, 24, 2):
        started = time.perf_counter()
        write_plan(plan_topology(read_host(root, script), degree), tmp_path / "plan.json")
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1, times


@st.composite
def hosts(draw: st.DrawFn) -> HostTopology:
    count = draw(st.integers(1, 4))
    nodes = nodes_of(sorted(draw(st.permutations(range(6)))[:count]), draw(st.integers(1, 8)))
    devices = tuple(
        Device(
            index=index,
            cores=(2 * index, 2 * index + 1),
            numa_node=draw(st.one_of(st.none(), st.sampled_from([node.index for node in nodes]))),
        )
        for index in range(draw(st.integers(1, 12)))
    )
    return HostTopology(
        devices=devices,
        nodes=nodes,
        cpus=tuple(cpu for node in nodes for cpu in node.cpus),
        memory_bytes=draw(st.integers(1, 800)) * GIB,
        shm_bytes=draw(st.one_of(st.none(), st.integers(0, 400).map(lambda n: n * GIB))),
    )


@given(host=hosts(), degree=st.sampled_from([1, 2, 4, 8, 12, 24]))
@settings(max_examples=150, deadline=None)
def test_shares_of_a_random_host_never_exceed_it(host: HostTopology, degree: int) -> None:
    if degree > 2 * len(host.devices):
        with pytest.raises(TopologyError):
            plan_topology(host, degree)
        return
    plan = plan_topology(host, degree)
    assert sum(raylet.cpus for raylet in plan.raylets) <= len(host.cpus)
    total = sum(raylet.memory_bytes for raylet in plan.raylets)
    stores = sum(raylet.object_store_bytes for raylet in plan.raylets)
    assert total + stores <= max(host.memory_bytes, 80 * 1024**2 * len(plan.raylets))
    assert len({raylet.numa_nodes for raylet in plan.raylets}) == len(plan.raylets)
    assert sorted(block for raylet in plan.raylets for block in raylet.blocks) == list(
        range(len(plan.blocks))
    )
    for raylet in plan.raylets:
        assert raylet.cores == tuple(core for block in raylet.blocks for core in plan.blocks[block].cores)
        assert {plan.blocks[block].numa_nodes for block in raylet.blocks} == {raylet.numa_nodes}
    cores = sorted([core for block in plan.blocks for core in block.cores] + list(plan.idle_cores))
    assert cores == list(range(2 * len(host.devices)))


def test_the_plan_file_is_versioned_json(tmp_path: Path, inf2_48xlarge: HostTopology) -> None:
    write_plan(plan_topology(inf2_48xlarge, 8), tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["version"] == 1 and data["raylets"][0]["numa_nodes"] == [2, 3]
