"""The plan of a host: blocks, and one raylet for each set of NUMA nodes that blocks span.

A raylet is bound (by numactl, at exec) to exactly the nodes of its blocks, because CPU affinity and memory
policy are inherited by every process that Ray starts, and cannot be narrowed later for pages that are already
there. CPUs, memory and object store of a node are split between the raylets on it by the cores that each has
there, so the sum over raylets never exceeds the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from app.node.topology.blocks import Cut, contiguous, cut_blocks
from app.node.topology.idlist import format_idlist
from app.node.topology.model import (
    Block,
    Device,
    HostTopology,
    Problem,
    Raylet,
    TopologyError,
    TopologyPlan,
)

SYSTEM_RESERVE = 0.10
"""Fraction of memory that is left to the system, the agents and the boot steps."""

OBJECT_STORE_FRACTION = 0.05
OBJECT_STORE_MAX_BYTES = 4 * 1024**3
OBJECT_STORE_MIN_BYTES = 80 * 1024**2
"""Ray refuses less than 75 MiB. Tokens do not pass through the object store, so it may stay small."""

SHM_FRACTION = 0.8
"""Fraction of what is free in /dev/shm that object stores may take together; the engine needs some too."""

NUMACTL = "usr/bin/numactl"

_FATAL = frozenset({"duplicate-core", "no-device", "degree"})


def plan_topology(
    host: HostTopology,
    tp_degree: int,
    *,
    supported_degrees: Collection[int] | None = None,
    allow_degraded: bool = False,
    ignore_processes: bool = False,
) -> TopologyPlan:
    """Divide the host for replicas of ``tp_degree`` cores.

    Args:
        host: what ``read_host`` or ``read_neuron_ls_file`` found.
        tp_degree: cores that one replica owns.
        supported_degrees: degrees that the engine profile supports; None: any.
        allow_degraded: plan with what is left (devices missing or held, NUMA unknown) and say so in
            ``warnings``, where a strict plan fails.
        ignore_processes: leave processes on devices out of account (a host that already serves).

    Raises:
        TopologyError: every reason why there is no such plan.
    """
    problems = [p for p in host.problems if not (ignore_processes and p.kind == "stale-process")]
    warnings = list(host.warnings)
    devices = list(host.devices)
    fatal = [p for p in problems if p.kind in _FATAL] if allow_degraded and devices else problems
    degree = _degree_problem(tp_degree, devices, supported_degrees)
    if fatal or degree:
        raise TopologyError([*fatal, *([degree] if degree else [])])
    if problems:
        warnings += [f"degraded: {problem.message}" for problem in problems]
        devices = _without_faults(host, devices, ignore_processes)
    cuts = cut_blocks(devices, tp_degree, _sockets(host))
    if not cuts:
        raise TopologyError([*problems, _no_block_problem(tp_degree, devices)])
    blocks = [
        Block(
            index=index,
            cores=cut.cores,
            devices=tuple(device.index for device in cut.devices),
            numa_nodes=cut.numa_nodes,
        )
        for index, cut in enumerate(cuts)
    ]
    owned = {core for block in blocks for core in block.cores}
    raylets, raylet_warnings = _raylets(host, blocks, cuts)
    return TopologyPlan(
        tp_degree=tp_degree,
        blocks=tuple(blocks),
        raylets=tuple(raylets),
        idle_cores=tuple(sorted({c for device in host.devices for c in device.cores} - owned)),
        warnings=tuple(warnings + raylet_warnings),
    )


def plan_head(host: HostTopology, tp_degree: int) -> TopologyPlan:
    """The plan of a cluster's head host: one raylet with no CPUs and no cores, hence no replica.

    It is bound to every node that the host has, so that each raylet of a fleet starts through numactl alike.
    """
    memory, store, warnings = _memory(host, [host.memory_bytes])
    raylet = Raylet(
        index=0,
        numa_nodes=tuple(node.index for node in host.nodes if node.memory_bytes > 0),
        cores=(),
        cpus=0,
        memory_bytes=memory[0],
        object_store_bytes=store[0],
        blocks=(),
    )
    return TopologyPlan(
        tp_degree=tp_degree, blocks=(), raylets=(raylet,), idle_cores=(), warnings=tuple(warnings)
    )


def unbound(plan: TopologyPlan, reason: str) -> TopologyPlan:
    """The same blocks under one raylet that is bound to no node, with the reason as a warning."""
    raylet = Raylet(
        index=0,
        numa_nodes=(),
        cores=tuple(sorted(core for raylet in plan.raylets for core in raylet.cores)),
        cpus=sum(raylet.cpus for raylet in plan.raylets),
        memory_bytes=sum(raylet.memory_bytes for raylet in plan.raylets),
        object_store_bytes=sum(raylet.object_store_bytes for raylet in plan.raylets),
        blocks=tuple(block.index for block in plan.blocks),
    )
    return plan.model_copy(update={"raylets": (raylet,), "warnings": (*plan.warnings, reason)})


def numactl_problem(plan: TopologyPlan, root: Path = Path("/")) -> Problem | None:
    """A plan with bound raylets on a host without numactl."""
    if (root / NUMACTL).exists() or not any(raylet.numa_nodes for raylet in plan.raylets):
        return None
    return Problem(
        kind="numactl-missing",
        message=f"/{NUMACTL} is not there, and the plan binds raylets to NUMA nodes. Bake the Debian or "
        'Ubuntu package numactl into the image, or set numactl_from = "mirror" for this environment.',
    )


def _degree_problem(
    tp_degree: int, devices: Sequence[Device], supported_degrees: Collection[int] | None
) -> Problem | None:
    if supported_degrees is not None and tp_degree not in supported_degrees:
        listed = ", ".join(str(degree) for degree in sorted(supported_degrees))
        return Problem(
            kind="degree",
            message=f"tensor-parallel degree {tp_degree} is not supported by the engine profile; "
            f"it has {listed}.",
        )
    total = sum(len(device.cores) for device in devices)
    if tp_degree < 1:
        return Problem(kind="degree", message=f"tensor-parallel degree {tp_degree} is not a count of cores.")
    if devices and tp_degree > total:
        return Problem(
            kind="degree",
            message=f"tensor-parallel degree {tp_degree} does not fit: this host has {total} NeuronCores. "
            f"Choose a degree of at most {total}, or a larger instance type.",
        )
    return None


def _no_block_problem(tp_degree: int, devices: Sequence[Device]) -> Problem:
    runs = [device.cores for device in devices]
    cores = format_idlist(core for run in runs for core in run)
    odd = any(tp_degree % len(run) and len(run) % tp_degree for run in runs)
    why = (
        f"a block takes whole devices, and {tp_degree} is no multiple of their {len(runs[0])} cores"
        if odd and runs
        else "no such run of contiguous cores on whole devices is left"
    )
    return Problem(
        kind="degree",
        message=f"tensor-parallel degree {tp_degree} does not fit cores {cores or 'none'}: {why}.",
    )


def _without_faults(host: HostTopology, devices: list[Device], ignore_processes: bool) -> list[Device]:
    """Devices that a degraded plan may use: none that a process holds; a node that is not there is
    unknown."""
    usable = {node.index for node in host.nodes if node.cpus}
    kept = [device for device in devices if ignore_processes or not device.processes]
    return [
        device if device.numa_node in usable else device.model_copy(update={"numa_node": None})
        for device in kept
        if contiguous(device.cores)
    ]


def _sockets(host: HostTopology) -> dict[int, int]:
    return {node.index: node.socket for node in host.nodes if node.socket is not None}


def _raylets(
    host: HostTopology, blocks: Sequence[Block], cuts: Sequence[Cut]
) -> tuple[list[Raylet], list[str]]:
    groups: dict[tuple[int, ...], list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.numa_nodes, []).append(block)
    members = list(groups.items())
    weights = _weights(host, [[cuts[block.index] for block in group] for _, group in members])
    cpus = _split_cpus(host, weights)
    shares = _memory_shares(host, weights)
    memory, store, warnings = _memory(host, shares)
    raylets = []
    for index, (nodes, group) in enumerate(members):
        raylets.append(
            Raylet(
                index=index,
                numa_nodes=nodes,
                cores=tuple(core for block in group for core in block.cores),
                cpus=cpus[index],
                memory_bytes=memory[index],
                object_store_bytes=store[index],
                blocks=tuple(block.index for block in group),
            )
        )
        if not nodes:
            devices = format_idlist(device for block in group for device in block.devices)
            warnings.append(
                f"raylet {index} is bound to no NUMA node: nothing says where devices {devices} hang "
                "(neuron-ls, PCI and CPU lists are silent). Replicas may run far from their devices."
            )
        elif host.cpus and cpus[index] == 0:
            warnings.append(
                f"raylet {index} on NUMA nodes {format_idlist(nodes)} has no CPU of its own: the nodes have "
                "too few CPUs for the raylets that share them."
            )
    return raylets, warnings


def _weights(host: HostTopology, groups: Sequence[Sequence[Cut]]) -> list[dict[int, float]]:
    """For each raylet, NUMA node -> cores that it has there; a device of unknown node weighs on all nodes."""
    known = [node.index for node in host.nodes]
    weights = []
    for group in groups:
        weight: dict[int, float] = {}
        for cut in group:
            for device in cut.devices:
                cores = len(set(device.cores) & set(cut.cores))
                on = [device.numa_node] if device.numa_node is not None and cut.numa_nodes else known
                for node in on:
                    weight[node] = weight.get(node, 0.0) + cores / len(on)
        weights.append(weight)
    return weights


def _split_cpus(host: HostTopology, weights: Sequence[Mapping[int, float]]) -> list[int]:
    if not host.nodes:
        return _largest_remainder(len(host.cpus), [1.0] * len(weights))
    totals = [0] * len(weights)
    for node in host.nodes:
        on_node = [weight.get(node.index, 0.0) for weight in weights]
        if any(on_node):
            for index, count in enumerate(_largest_remainder(len(node.cpus), on_node)):
                totals[index] += count
    return totals


def _largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` in proportion to ``weights``; whole numbers, exact sum, the first wins a tie."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(value) for value in exact]
    order = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for index in order[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _memory_shares(host: HostTopology, weights: Sequence[Mapping[int, float]]) -> list[int]:
    """Bytes of the host's memory for each raylet, before any reserve."""
    on_nodes = sum(node.memory_bytes for node in host.nodes)
    if not on_nodes:
        return [host.memory_bytes // len(weights)] * len(weights)
    scale = host.memory_bytes / on_nodes if host.memory_bytes else 1.0
    if len(host.nodes) > 1:
        scale = min(scale, 1.0)
    shares = [0.0] * len(weights)
    for node in host.nodes:
        whole = sum(weight.get(node.index, 0.0) for weight in weights)
        for index, weight in enumerate(weights):
            if whole:
                shares[index] += node.memory_bytes * scale * weight.get(node.index, 0.0) / whole
    return [int(share) for share in shares]


def _memory(host: HostTopology, shares: Sequence[int]) -> tuple[list[int], list[int], list[str]]:
    """Heap and object store of each raylet, in bytes, from its share of the host's memory."""
    warnings: list[str] = []
    stores = [
        min(OBJECT_STORE_MAX_BYTES, max(OBJECT_STORE_MIN_BYTES, int(share * OBJECT_STORE_FRACTION)))
        if share
        else 0
        for share in shares
    ]
    if host.shm_bytes is not None and sum(stores) > host.shm_bytes * SHM_FRACTION:
        room = host.shm_bytes * SHM_FRACTION / sum(stores)
        stores = [max(OBJECT_STORE_MIN_BYTES, int(store * room)) for store in stores]
        if sum(stores) > host.shm_bytes * SHM_FRACTION:
            warnings.append(
                f"/dev/shm has {host.shm_bytes >> 20} MiB free, too little for {len(stores)} object stores "
                f"of {OBJECT_STORE_MIN_BYTES >> 20} MiB: Ray will keep objects on disk. Enlarge /dev/shm."
            )
    heaps = [
        max(0, int(share * (1 - SYSTEM_RESERVE)) - store) for share, store in zip(shares, stores, strict=True)
    ]
    return heaps, stores, warnings
