"""The partition into blocks is the best there is: against every partition, and on random machines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.node.topology.blocks import Cut, cut_blocks, cut_cost
from app.node.topology.model import Device
from tests.unit.topology_trees import emulated_output, file_host

DEGREES = [1, 2, 4, 6, 8, 12, 24]
Score = tuple[int, int, int, int]


def every_partition(devices: list[Device], tp_degree: int) -> Iterator[list[Cut]]:
    """All ways to cut blocks out of the line of devices, found without the planner's code.

    A block is a set of whole devices whose core ids, sorted, have no hole and count ``tp_degree``; where a
    device has more cores than that, a block is an aligned run on it. A partition is any set of blocks that
    share nothing.
    """
    possible: list[Cut] = []
    for first in range(len(devices)):
        for last in range(first, len(devices)):
            chosen = devices[first : last + 1]
            cores = sorted(core for device in chosen for core in device.cores)
            if len(cores) == tp_degree and cores[-1] - cores[0] == tp_degree - 1:
                possible.append(Cut(tuple(cores), tuple(chosen)))
    for device in devices:
        count = len(device.cores)
        if count > tp_degree and device.cores[-1] - device.cores[0] == count - 1:
            for start in range(0, count - tp_degree + 1, tp_degree):
                possible.append(Cut(device.cores[start : start + tp_degree], (device,)))
    if len(possible) > 14:  # too many subsets; the caller chooses sizes where this is not reached
        yield from _disjoint_runs(possible)
        return
    for picks in product((False, True), repeat=len(possible)):
        cuts = [cut for cut, pick in zip(possible, picks, strict=True) if pick]
        cores = [core for cut in cuts for core in cut.cores]
        if len(set(cores)) == len(cores):
            yield sorted(cuts, key=lambda cut: cut.cores)


def _disjoint_runs(possible: list[Cut], start: int = 0) -> Iterator[list[Cut]]:
    """Every set of disjoint cuts, by recursion over where the next one begins."""
    yield []
    for cut in possible:
        if cut.cores[0] >= start:
            for rest in _disjoint_runs(possible, cut.cores[-1] + 1):
                yield [cut, *rest]


def score(cuts: list[Cut], sockets: dict[int, int]) -> Score:
    costs = [cut_cost(cut, sockets) for cut in cuts]
    return -len(cuts), sum(c[0] for c in costs), sum(c[1] for c in costs), sum(c[2] for c in costs)


@pytest.mark.parametrize("instance_type", ["inf2.xlarge", "inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge"])
@pytest.mark.parametrize("tp_degree", DEGREES)
def test_no_partition_of_an_inf2_size_is_better(tmp_path: Path, instance_type: str, tp_degree: int) -> None:
    host = file_host(tmp_path, emulated_output(tmp_path, instance_type))
    sockets = {0: 0, 1: 0, 2: 1, 3: 1}
    devices = list(host.devices)
    if tp_degree == 1:  # every core is a block: 2^24 partitions, of which one is whole
        expected = [(core,) for device in devices for core in device.cores]
        assert [cut.cores for cut in cut_blocks(devices, 1, sockets)] == expected
        return
    found = cut_blocks(devices, tp_degree, sockets)
    best = min(score(cuts, sockets) for cuts in every_partition(devices, tp_degree))
    assert score(found, sockets) == best


@pytest.mark.parametrize(
    "nodes", [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1]]
)
@pytest.mark.parametrize("tp_degree", [2, 4, 6, 8, 12])
def test_no_partition_of_any_map_of_six_devices_is_better(
    tmp_path: Path, nodes: list[int], tp_degree: int
) -> None:
    host = file_host(tmp_path, emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=nodes))
    devices = list(host.devices)
    best = min(score(cuts, {}) for cuts in every_partition(devices, tp_degree))
    assert score(cut_blocks(devices, tp_degree), {}) == best


def test_the_block_that_stays_on_one_node_is_taken(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=[0, 0, 1, 1, 1, 1])
    (cut,) = cut_blocks(list(file_host(tmp_path, text).devices), 8)
    assert cut.cores == tuple(range(4, 12)) and cut.numa_nodes == (1,)


def test_of_equal_nodes_the_fewest_sockets_win() -> None:
    devices = [Device(index=i, cores=(2 * i, 2 * i + 1), numa_node=n) for i, n in enumerate([0, 2, 3])]
    (cut,) = cut_blocks(devices, 4, {0: 0, 2: 1, 3: 1})
    assert cut.cores == (2, 3, 4, 5)


def test_of_equal_sockets_the_linked_devices_win() -> None:
    devices = [
        Device(index=0, cores=(0, 1), numa_node=0, connected_to=(2,)),
        Device(index=1, cores=(2, 3), numa_node=0, connected_to=(2,)),
        Device(index=2, cores=(4, 5), numa_node=0, connected_to=(1, 0)),
    ]
    (cut,) = cut_blocks(devices, 4)
    assert cut.cores == (2, 3, 4, 5)


def test_of_equal_blocks_the_lowest_cores_win() -> None:
    devices = [Device(index=i, cores=(2 * i, 2 * i + 1), numa_node=0) for i in range(5)]
    assert [cut.cores[0] for cut in cut_blocks(devices, 4)] == [0, 4]


def test_a_block_never_spans_a_missing_device() -> None:
    devices = [Device(index=i, cores=(2 * i, 2 * i + 1), numa_node=0) for i in range(6) if i != 1]
    assert [cut.cores for cut in cut_blocks(devices, 4)] == [(4, 5, 6, 7), (8, 9, 10, 11)]


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Device], dict[int, int]]:
    """Up to nine devices of one to four cores, with holes in the numbering, on up to four nodes."""
    nodes = draw(st.integers(1, 4))
    sockets = {node: draw(st.integers(0, 1)) for node in range(nodes)}
    devices: list[Device] = []
    next_core = 0
    for index in range(draw(st.integers(1, 9))):
        next_core += draw(st.sampled_from([0, 0, 0, 1, 2]))
        count = draw(st.sampled_from([2, 2, 2, 1, 4]))
        devices.append(
            Device(
                index=index,
                cores=tuple(range(next_core, next_core + count)),
                numa_node=draw(st.one_of(st.none(), st.integers(0, nodes - 1))),
                connected_to=tuple(draw(st.sets(st.integers(0, 8), max_size=2))),
            )
        )
        next_core += count
    return devices, sockets


@given(machine=machines(), tp_degree=st.sampled_from([2, 4, 6, 8]))
@settings(max_examples=150, deadline=None)
def test_no_partition_of_a_random_machine_is_better(
    machine: tuple[list[Device], dict[int, int]], tp_degree: int
) -> None:
    devices, sockets = machine
    found = cut_blocks(devices, tp_degree, sockets)
    best = min(score(cuts, sockets) for cuts in every_partition(devices, tp_degree))
    assert score(found, sockets) == best


@given(machine=machines(), tp_degree=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_blocks_of_a_random_machine_are_whole(
    machine: tuple[list[Device], dict[int, int]], tp_degree: int
) -> None:
    devices, sockets = machine
    cuts = cut_blocks(devices, tp_degree, sockets)
    cores = [core for cut in cuts for core in cut.cores]
    assert cores == sorted(set(cores))
    for cut in cuts:
        assert len(cut.cores) == tp_degree
        assert cut.cores == tuple(range(cut.cores[0], cut.cores[0] + tp_degree))
        on_them = {core for device in cut.devices for core in device.cores}
        assert set(cut.cores) <= on_them
        if len(cut.devices) > 1:
            assert set(cut.cores) == on_them
