"""Cutting a host's cores into blocks, one a replica: the best partition, not a good one.

The Neuron runtime takes contiguous, ascending core ids only, and a device belongs to one block unless blocks
are smaller than a device. So blocks are intervals on the line of devices, a cost is a sum over blocks, and
dynamic programming over that line finds the optimum: as many blocks as fit, then the fewest NUMA nodes
spanned (summed over blocks), then the fewest sockets, then the fewest neighbours in a block without a
NeuronLink, then the lowest cores. Tests compare it with every possible partition.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.node.topology.model import Device

Cost = tuple[int, int, int, int, tuple[int, ...]]
"""Minus the blocks, NUMA nodes, sockets, missing links, first core of each block."""


@dataclass(frozen=True)
class Cut:
    """A block before it has a number: its cores, and the devices they are on."""

    cores: tuple[int, ...]
    devices: tuple[Device, ...]

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The nodes spanned, ascending; empty if one device's node is unknown."""
        nodes = {device.numa_node for device in self.devices}
        return () if None in nodes else tuple(sorted(node for node in nodes if node is not None))


def cut_cost(cut: Cut, sockets: dict[int, int]) -> tuple[int, int, int]:
    """(NUMA nodes, sockets, consecutive devices without a NeuronLink) of one block.

    A device whose node is unknown counts as a node of its own: a block that is known to stay on one is
    better.
    """
    known = {device.numa_node for device in cut.devices if device.numa_node is not None}
    unknown = sum(1 for device in cut.devices if device.numa_node is None)
    packages = {sockets[node] for node in known if node in sockets}
    unlinked = sum(
        1
        for left, right in zip(cut.devices, cut.devices[1:], strict=False)
        if right.index not in left.connected_to and left.index not in right.connected_to
    )
    return len(known) + unknown, len(packages), unlinked


def cuts_at(devices: list[Device], start: int, tp_degree: int) -> tuple[list[Cut], int] | None:
    """The blocks that begin with the device at position ``start``, and the position after them.

    A device that holds several blocks gives them all; a block of several devices takes whole ones with
    contiguous cores. None: no block can begin here.
    """
    first = devices[start]
    if len(first.cores) > tp_degree:
        if not contiguous(first.cores):
            return None
        count = len(first.cores) // tp_degree
        parts = [first.cores[i * tp_degree : (i + 1) * tp_degree] for i in range(count)]
        return [Cut(part, (first,)) for part in parts], start + 1
    cores: tuple[int, ...] = ()
    for end in range(start, len(devices)):
        cores += devices[end].cores
        if not contiguous(cores) or len(cores) > tp_degree:
            return None
        if len(cores) == tp_degree:
            return [Cut(cores, tuple(devices[start : end + 1]))], end + 1
    return None


def contiguous(cores: tuple[int, ...]) -> bool:
    return cores == tuple(range(cores[0], cores[0] + len(cores)))


def cut_blocks(devices: list[Device], tp_degree: int, sockets: dict[int, int] | None = None) -> list[Cut]:
    """The best partition into blocks of ``tp_degree`` cores, ascending by core.

    Args:
        devices: the host's devices, in the order of their cores, no core twice.
        tp_degree: cores of one block, at least 1.
        sockets: NUMA node to CPU socket, where known.
    """
    known_sockets = sockets or {}
    best: list[tuple[Cost, list[Cut]]] = [((0, 0, 0, 0, ()), [])]  # from the last position backwards
    for start in range(len(devices) - 1, -1, -1):
        candidates = [best[-1]]  # this device stays idle
        step = cuts_at(devices, start, tp_degree)
        if step is not None:
            cuts, after = step
            rest_cost, rest_cuts = best[len(devices) - after]
            costs = [cut_cost(cut, known_sockets) for cut in cuts]
            cost: Cost = (
                rest_cost[0] - len(cuts),
                rest_cost[1] + sum(c[0] for c in costs),
                rest_cost[2] + sum(c[1] for c in costs),
                rest_cost[3] + sum(c[2] for c in costs),
                tuple(cut.cores[0] for cut in cuts) + rest_cost[4],
            )
            candidates.append((cost, cuts + rest_cuts))
        best.append(min(candidates, key=lambda candidate: candidate[0]))
    return best[-1][1]
