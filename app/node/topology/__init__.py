"""Topology: what the host is, and how it is divided into core blocks and NUMA-bound raylets."""

from __future__ import annotations

from app.node.topology.host import read_host, read_neuron_ls_file
from app.node.topology.model import (
    TOPOLOGY_PATH,
    Block,
    Device,
    DeviceProcess,
    HostTopology,
    NumaNode,
    Problem,
    Raylet,
    TopologyError,
    TopologyPlan,
    load_plan,
    write_plan,
)
from app.node.topology.plan import plan_head, plan_topology

__all__ = [
    "TOPOLOGY_PATH",
    "Block",
    "Device",
    "DeviceProcess",
    "HostTopology",
    "NumaNode",
    "Problem",
    "Raylet",
    "TopologyError",
    "TopologyPlan",
    "load_plan",
    "plan_head",
    "plan_topology",
    "read_host",
    "read_neuron_ls_file",
    "write_plan",
]
