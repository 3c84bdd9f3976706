"""What the guest's report proves: each check of a run against its plan, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

EXPECTED_RAYLETS = {2: [(2,), (3,), (1,), (0,)], 8: [(2, 3), (1, 2, 3), (0, 1)], 24: [(0, 1, 2, 3)]}
"""Nodes of each raylet on an inf2.48xlarge, from its published NUMA map; not taken from the planner."""


@dataclass(frozen=True)
class Check:
    """One replica (or the bad plan) and where it and its memory were."""

    tp_degree: int
    raylet: int
    cores: str
    device_nodes: tuple[int, ...]
    thread_cpus: tuple[int, ...]
    thread_nodes: tuple[int, ...]
    pages_by_node: Mapping[str, int]
    worst_distance: int
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def checks_of(report: Mapping[str, Any]) -> list[Check]:
    """A check for each replica of each planned run; ``faults`` is empty where it sat as planned."""
    node_cpus = {node["index"]: set(node["cpus"]) for node in report["nodes"]}
    found = []
    for run in report["runs"]:
        plan = run["plan"]
        for raylet in run["raylets"]:
            planned = plan["raylets"][raylet["index"]]
            replicas = raylet["replicas"]
            claimed = sorted(replica["block"] for replica in replicas)
            for replica in replicas:
                block = plan["blocks"][replica["block"]]
                allowed = set().union(*(node_cpus[node] for node in block["numa_nodes"]))
                faults = _faults(replica, block["numa_nodes"], allowed)
                if replica["visible_cores"] != ",".join(str(core) for core in block["cores"]):
                    faults.append(f"NEURON_RT_VISIBLE_CORES is {replica['visible_cores']}")
                if claimed != sorted(planned["blocks"]):
                    faults.append(f"blocks {claimed} were claimed, planned were {planned['blocks']}")
                if set(raylet["status"]["cpus"]) != allowed:
                    faults.append(f"the raylet may run on CPUs {raylet['status']['cpus']}")
                found.append(
                    _check(report, run["tp_degree"], raylet["index"], replica, block, node_cpus, faults)
                )
    return found


def bad_plan_check(report: Mapping[str, Any]) -> Check:
    """The same evidence for devices 0-5 bound to node 0; its ``faults`` say what is remote."""
    bad = report["bad_plan"]
    node_cpus = {node["index"]: set(node["cpus"]) for node in report["nodes"]}
    block = bad["block"]
    allowed = set().union(*(node_cpus[node] for node in block["numa_nodes"]))
    replica = bad["replicas"][0]
    return _check(report, 12, 0, replica, block, node_cpus, _faults(replica, block["numa_nodes"], allowed))


def faults_of(report: Mapping[str, Any]) -> list[str]:
    """Why the proof does not hold; empty if it does."""
    faults = [f"the guest's host has a problem: {text}" for text in report["problems"]]
    if len(report["nodes"]) != 4:
        faults.append(f"the guest has {len(report['nodes'])} NUMA nodes, not 4")
    for run in report["runs"]:
        nodes = [tuple(raylet["numa_nodes"]) for raylet in run["plan"]["raylets"]]
        expected = EXPECTED_RAYLETS[run["tp_degree"]]
        if nodes != expected:
            faults.append(
                f"TP {run['tp_degree']}: raylets on nodes {nodes}, the published map gives {expected}"
            )
        for raylet in run["raylets"]:
            if "error" in raylet:
                faults.append(
                    f"TP {run['tp_degree']}: raylet {raylet['index']} failed: {raylet['error'][-300:]}"
                )
    for check in checks_of(report):
        faults += [
            f"TP {check.tp_degree}, raylet {check.raylet}, cores {check.cores}: {f}" for f in check.faults
        ]
    bad = bad_plan_check(report)
    if bad.ok or bad.worst_distance <= max(
        check.worst_distance for check in checks_of(report) if _local(check)
    ):
        faults.append("the bad plan (node 0 for devices 0-5) does not show as remote: the check sees nothing")
    return faults


def as_json(report: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    faults = faults_of(report)
    return {
        "ok": not faults,
        "faults": faults,
        "seconds": round(seconds, 1),
        "kernel": report["kernel"],
        "nodes": report["nodes"],
        "distances": report["distances"],
        "device_nodes": report["devices"],
        "replicas": [asdict(check) for check in checks_of(report)],
        "bad_plan": asdict(bad_plan_check(report)),
        "commands": [raylet["command"] for run in report["runs"] for raylet in run["raylets"]],
    }


def _local(check: Check) -> bool:
    return len(check.device_nodes) == 1


def _faults(replica: Mapping[str, Any], nodes: list[int], allowed: set[int]) -> list[str]:
    faults = []
    outside = {node: pages for node, pages in replica["anonymous_pages"].items() if int(node) not in nodes}
    if outside:
        faults.append(f"pages outside its devices' nodes {nodes}: {outside}")
    if not replica["anonymous_pages"]:
        faults.append("no touched page was found in numa_maps")
    for thread in replica["threads"]:
        if not set(thread["cpus"]) <= allowed:
            faults.append(f"a thread may run on CPUs {thread['cpus']}")
        if thread["ran_on_cpu"] not in allowed:
            faults.append(f"a thread ran on CPU {thread['ran_on_cpu']}")
    if len(replica["threads"]) != 3:
        faults.append(f"{len(replica['threads'])} threads were seen, not 3")
    policy = [word for word in replica["policies"] if not word.startswith("bind:")]
    if policy:
        faults.append(f"memory policy {policy}, not bind")
    return faults


def _check(
    report: Mapping[str, Any],
    tp_degree: int,
    raylet: int,
    replica: Mapping[str, Any],
    block: Mapping[str, Any],
    node_cpus: Mapping[int, set[int]],
    faults: list[str],
) -> Check:
    ran = sorted({thread["ran_on_cpu"] for thread in replica["threads"]})
    order = [node["index"] for node in report["nodes"]]
    distance = {
        (one, other): report["distances"][str(one)][order.index(other)] for one in order for other in order
    }
    nearest = [  # a page serves the nearest device of its block; how far is the farthest page from one?
        min(distance[int(node), device] for device in block["numa_nodes"])
        for node in replica["anonymous_pages"]
    ]
    return Check(
        tp_degree=tp_degree,
        raylet=raylet,
        cores=f"{block['cores'][0]}-{block['cores'][-1]}",
        device_nodes=tuple(block["numa_nodes"]),
        thread_cpus=tuple(ran),
        thread_nodes=tuple(sorted(node for node, cpus in node_cpus.items() if cpus & set(ran))),
        pages_by_node=dict(sorted(replica["anonymous_pages"].items())),
        worst_distance=max(nearest, default=0),
        faults=tuple(faults),
    )
