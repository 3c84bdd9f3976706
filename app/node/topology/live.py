"""Where raylets and replicas really are, read from /proc, beside where the plan wants them.

numactl execs, so no command line shows a binding: the CPUs that a process may use are in its status, the
memory policy in numa_maps. A process that is not where the plan says is flagged with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.node.claim import LOCK_DIR, LOCK_FILE, claim_owner, marked_processes
from app.node.topology.idlist import format_idlist, parse_idlist
from app.node.topology.model import TopologyPlan


def live_binding(pid: int, numa_nodes: Sequence[int], root: Path = Path("/")) -> dict[str, Any]:
    """The binding of one process, judged against the nodes that it should be bound to.

    Args:
        pid: the process; 0 stands for a unit that has none.
        numa_nodes: the planned nodes; empty if it should be bound to none.
        root: folder in place of ``/`` for /proc and /sys.

    Returns:
        ``ok``, ``reason`` (empty if ok), ``pid``, ``cpus`` (CPU list), ``cpu_nodes`` (nodes of these CPUs),
        ``memory_policy`` (as the kernel writes it: ``bind:2-3``, ``default``) and ``memory_nodes``.
    """
    live: dict[str, Any] = {"ok": False, "reason": "", "pid": pid, "cpus": "", "cpu_nodes": []}
    live |= {"memory_policy": "", "memory_nodes": []}
    process = root / "proc" / str(pid)
    try:
        if pid <= 0:
            raise FileNotFoundError
        cpus = _allowed_cpus(process)
    except OSError:
        return live | {"reason": "it does not run"}
    try:
        with (process / "numa_maps").open() as maps:
            words = maps.readline().split()
        policy = words[1] if len(words) > 1 else ""
    except OSError:  # another user's process, or a kernel without NUMA
        policy = ""
    node_cpus = _node_cpus(root)
    memory_nodes = parse_idlist(policy.partition(":")[2]) if policy.startswith("bind:") else ()
    live |= {
        "cpus": format_idlist(cpus),
        "cpu_nodes": sorted(node for node, on_node in node_cpus.items() if on_node & cpus),
        "memory_policy": policy,
        "memory_nodes": list(memory_nodes),
    }
    live["reason"] = _reason(numa_nodes, cpus, node_cpus, policy, memory_nodes)
    live["ok"] = not live["reason"]
    return live


def replica_bindings(
    plan: TopologyPlan, lock_dir: Path = LOCK_DIR, root: Path = Path("/")
) -> list[dict[str, Any]]:
    """Each claimed block: its owner's binding, and the other processes that were started under the claim.

    Returns:
        For each block that is held: ``block``, ``raylet``, ``cores``, ``devices``, ``numa_nodes``, ``pid``,
        ``children`` (pids) and ``live`` (as ``live_binding`` gives it). A block that only orphans hold has
        ``live.ok`` false and names them.
    """
    raylet_of = {block: raylet.index for raylet in plan.raylets for block in raylet.blocks}
    lock_path = lock_dir / LOCK_FILE
    found = []
    for block in plan.blocks:
        owner = claim_owner(lock_path, block)
        children = marked_processes(lock_path, block.cores)
        if owner is None and not children:
            continue
        pid = owner or 0
        live = live_binding(pid, block.numa_nodes, root)
        if live["reason"] == "it does not run":
            named = ", ".join(map(str, children)) or "a process that inherited its lock"
            live["reason"] = f"its replica (process {pid}) is gone, {named} still holds the cores"
        found.append(
            {
                "block": block.index,
                "raylet": raylet_of.get(block.index),
                "cores": list(block.cores),
                "devices": list(block.devices),
                "numa_nodes": list(block.numa_nodes),
                "pid": pid,
                "children": children,
                "live": live,
            }
        )
    return found


def _reason(
    planned: Sequence[int],
    cpus: set[int],
    node_cpus: dict[int, frozenset[int]],
    policy: str,
    memory_nodes: Sequence[int],
) -> str:
    if not planned:
        return f"memory is bound ({policy}), the plan binds nothing" if memory_nodes else ""
    wanted = format_idlist(planned)
    missing = [node for node in planned if node not in node_cpus]
    if missing:
        return f"the plan wants NUMA node {format_idlist(missing)}, which this kernel does not have"
    allowed = frozenset().union(*(node_cpus[node] for node in planned))
    outside = cpus - allowed
    if outside:
        return f"it may run on CPUs {format_idlist(outside)}, outside NUMA nodes {wanted}"
    if not policy:
        return "its memory policy cannot be read (root can)"
    if sorted(memory_nodes) != sorted(planned):
        return f"its memory policy is {policy}, the plan says bind:{wanted}"
    return ""


def _allowed_cpus(process: Path) -> set[int]:
    """CPUs that some thread of the process may use."""
    cpus: set[int] = set()
    for task in (process / "task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # a thread that has just ended
            continue
        for line in lines:
            if line.startswith("Cpus_allowed_list:"):
                cpus.update(parse_idlist(line.partition(":")[2]))
    return cpus


def _node_cpus(root: Path) -> dict[int, frozenset[int]]:
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_idlist((folder / "cpulist").read_text())
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = frozenset(cpus)
    return nodes
