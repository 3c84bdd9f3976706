"""The plan's warnings and the live binding reach Prometheus."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from app.node.claim import claim_block
from app.node.topology import plan_topology, write_plan
from app.node.topology.host import host_of_output
from app.node.topology.metrics import TopologyCollector
from tests.unit.topology_trees import emulated_output


def test_a_host_without_a_plan_says_so(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(TopologyCollector(tmp_path / "topology.json", tmp_path / "claims"))
    assert registry.get_sample_value("neuronfleet_topology_plan") == 0
    assert registry.get_sample_value("neuronfleet_topology_warnings") is None


def test_warnings_and_bindings_are_gauges(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    path, claims = tmp_path / "topology.json", tmp_path / "claims"
    registry.register(TopologyCollector(path, claims))
    text = emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=[901, 901, 901, None, None, None])
    write_plan(plan_topology(host_of_output(text), 2), path)
    assert registry.get_sample_value("neuronfleet_topology_plan") == 1
    assert registry.get_sample_value("neuronfleet_topology_warnings") == 1
    assert registry.get_sample_value("neuronfleet_raylet_bound", {"raylet": "0"}) == 1
    assert registry.get_sample_value("neuronfleet_raylet_bound", {"raylet": "1"}) == 0
    with (
        claim_block(path, claims, 0, bind=False),
        claim_block(path, claims, 1, bind=False),
    ):
        assert registry.get_sample_value("neuronfleet_block_claimed", {"block": "0"}) == 1
        assert (
            registry.get_sample_value("neuronfleet_block_as_planned", {"block": "0"}) == 0
        )  # no node 901 here
        assert (
            registry.get_sample_value("neuronfleet_block_as_planned", {"block": "3"}) == 1
        )  # bound to nothing
        assert registry.get_sample_value("neuronfleet_block_claimed", {"block": "1"}) == 0
        assert b"neuronfleet_block_claimed" in generate_latest(registry)
    assert registry.get_sample_value("neuronfleet_block_claimed", {"block": "0"}) == 0
