"""The host's plan and live binding as Prometheus metrics, read anew at each scrape.

A process that serves ``/metrics`` registers the collector once: ``REGISTRY.register(TopologyCollector())``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.node.claim import LOCK_DIR
from app.node.topology.live import replica_bindings
from app.node.topology.model import TOPOLOGY_PATH, TopologyError, load_plan


class TopologyCollector(Collector):
    """Warnings of the plan, and for each block whether it is held and sits where the plan says.

    A host without a readable plan gives ``neuronfleet_topology_plan`` 0 and nothing else.
    """

    def __init__(
        self, plan_path: Path = TOPOLOGY_PATH, lock_dir: Path = LOCK_DIR, root: Path = Path("/")
    ) -> None:
        self._plan_path = plan_path
        self._lock_dir = lock_dir
        self._root = root

    def describe(self) -> list[Metric]:
        """Nothing is read when the collector is registered: there may be no plan yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        readable = GaugeMetricFamily(
            "neuronfleet_topology_plan", "1 if this host has a readable topology plan"
        )
        try:
            plan = load_plan(self._plan_path)
        except TopologyError:
            readable.add_metric([], 0)
            yield readable
            return
        readable.add_metric([], 1)
        yield readable
        warnings = GaugeMetricFamily(
            "neuronfleet_topology_warnings", "Warnings of the topology plan (neuronfleet status shows them)"
        )
        warnings.add_metric([], len(plan.warnings))
        yield warnings
        bound = GaugeMetricFamily(
            "neuronfleet_raylet_bound", "1 if the plan binds the raylet to NUMA nodes", labels=["raylet"]
        )
        for raylet in plan.raylets:
            bound.add_metric([str(raylet.index)], int(bool(raylet.numa_nodes)))
        yield bound
        held = {
            binding["block"]: binding["live"]["ok"]
            for binding in replica_bindings(plan, self._lock_dir, self._root)
        }
        claimed = GaugeMetricFamily(
            "neuronfleet_block_claimed", "1 if a process holds the block", labels=["block"]
        )
        placed = GaugeMetricFamily(
            "neuronfleet_block_as_planned",
            "1 if the block's replica has the CPUs and memory policy of the plan",
            labels=["block"],
        )
        for block in plan.blocks:
            claimed.add_metric([str(block.index)], int(block.index in held))
            if block.index in held:
                placed.add_metric([str(block.index)], int(held[block.index]))
        yield claimed
        yield placed
