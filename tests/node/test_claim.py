"""A block has one owner, until the last process that may hold its cores is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.node.claim import CLAIM_VARIABLE, ClaimError, claim_block, claim_owner
from app.node.topology import TopologyPlan, load_plan, plan_topology, write_plan
from app.node.topology.live import live_binding, replica_bindings
from tests.unit.topology_trees import emulated_output, file_host


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Claims set variables of this process and its affinity: put both back."""
    affinity = os.sched_getaffinity(0)
    for name in ("NEURON_RT_VISIBLE_CORES", CLAIM_VARIABLE, "NEURONFLEET_RAYLET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    os.sched_setaffinity(0, affinity)


def make_plan(folder: Path, instance_type: str = "inf2.48xlarge", degree: int = 2) -> TopologyPlan:
    """The plan of a host, its blocks bound to no node (this machine does not have theirs)."""
    plan = plan_topology(file_host(folder, emulated_output(folder, instance_type)), degree)
    blocks = tuple(block.model_copy(update={"numa_nodes": ()}) for block in plan.blocks)
    plan = plan.model_copy(update={"blocks": blocks})
    write_plan(plan, folder / "topology.json")
    return plan


def claim(folder: Path, raylet: int | None = 0, timeout_s: float = 0, **options: Any) -> Any:
    return claim_block(folder / "topology.json", folder / "claims", raylet, timeout_s=timeout_s, **options)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.node.claim_programs", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def read_until_ready(process: subprocess.Popen[str], count: int = 1) -> list[int]:
    """The pids of the program's children, once there are ``count`` and all are ready."""
    assert process.stdout is not None
    children: list[int] = []
    ready = 0
    while ready < max(count, 1) or len(children) < count:
        line = process.stdout.readline()
        assert line, "the program ended"
        if line.startswith("child "):
            children.append(int(line.split()[1]))
        ready += line.strip() == "ready"
    return children


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_each_claim_of_a_raylet_gets_another_of_its_blocks(tmp_path: Path) -> None:
    make_plan(tmp_path)
    claims = [claim(tmp_path, raylet=1) for _ in range(3)]
    assert [one.cores for one in claims] == [(2, 3), (6, 7), (10, 11)]
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "10,11"
    with pytest.raises(ClaimError, match=f"held by process {os.getpid()}"):
        claim(tmp_path, raylet=1)
    assert claim(tmp_path, raylet=0).cores == (0, 1)
    claims[1].release()
    assert claim(tmp_path, raylet=1).cores == (6, 7)


def test_the_raylet_is_what_its_unit_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(tmp_path)
    monkeypatch.setenv("NEURONFLEET_RAYLET", "3")
    with claim(tmp_path, raylet=None) as held:
        assert held.cores == (16, 17) and held.raylet == 3


@pytest.mark.parametrize(
    ("value", "words"), [(None, "NEURONFLEET_RAYLET is not set"), ("x", "is 'x'"), ("4", "0-3")]
)
def test_an_unknown_raylet_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    make_plan(tmp_path)
    if value is not None:
        monkeypatch.setenv("NEURONFLEET_RAYLET", value)
    with pytest.raises(ClaimError, match=words):
        claim(tmp_path, raylet=None)


def test_a_plan_with_one_raylet_needs_no_hint(tmp_path: Path) -> None:
    make_plan(tmp_path, "inf2.8xlarge")
    with claim(tmp_path, raylet=None) as held:
        assert held.cores == (0, 1)


def test_plans_of_other_degrees_share_the_same_cores(tmp_path: Path) -> None:
    make_plan(tmp_path, degree=2)
    with claim(tmp_path, raylet=1):  # cores 2-3
        make_plan(tmp_path, degree=8)
        with pytest.raises(ClaimError, match="cores 0-7"):
            claim(tmp_path, raylet=0)
        assert claim(tmp_path, raylet=1).cores == tuple(range(8, 16))


def test_a_wait_ends_when_a_block_comes_free(tmp_path: Path) -> None:
    make_plan(tmp_path, "inf2.8xlarge")
    held = claim(tmp_path)
    threading.Timer(0.5, held.release).start()
    started = time.monotonic()
    with claim(tmp_path, timeout_s=20):
        assert 0.3 < time.monotonic() - started < 10


@pytest.mark.parametrize(
    "how", ["nothing", "fork-unmarked", "spawn-unmarked", "subprocess", "spawn", "spawn-twice"]
)
def test_a_killed_owner_frees_its_block_only_when_its_children_are_gone(tmp_path: Path, how: str) -> None:
    """Unmarked: nothing but the inherited descriptor holds the block; it is the kernel that frees it."""
    make_plan(tmp_path, "inf2.8xlarge")
    owner = start("hold", str(tmp_path), how)
    children = read_until_ready(owner, {"nothing": 0, "spawn-twice": 2}.get(how, 1))
    with pytest.raises(ClaimError, match=f"held by process .*{owner.pid}"):
        claim(tmp_path)
    kill(owner.pid)
    owner.wait()
    while children:
        with pytest.raises(ClaimError, match="held by"):
            claim(tmp_path)
        child = children.pop(0)
        kill(child)
        wait_gone(child)
    with claim(tmp_path, timeout_s=5) as held:  # multiprocessing's tracker may take a moment to end
        assert held.cores == (0, 1)


def test_an_orphan_that_holds_cores_shows_in_status(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "inf2.8xlarge")
    owner = start("hold", str(tmp_path), "spawn")
    (child,) = read_until_ready(owner)
    (seen,) = replica_bindings(plan, tmp_path / "claims")
    assert seen["pid"] == owner.pid and child in seen["children"] and seen["live"]["ok"]
    assert seen["raylet"] == 0 and seen["cores"] == [0, 1]
    kill(owner.pid)
    owner.wait()
    (seen,) = replica_bindings(plan, tmp_path / "claims")
    assert not seen["live"]["ok"] and f"{child}" in seen["live"]["reason"]
    kill(child)
    wait_gone(child)
    deadline = time.monotonic() + 10
    while replica_bindings(plan, tmp_path / "claims"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        ([0, 1, 2], "not 2 contiguous"),
        ([0], "not 2 contiguous"),
        ([0, 2], "not 2"),
        ([1, 0], "not 2"),
        ([2, 3], "too"),
    ],
)
def test_a_block_that_is_not_whole_is_refused(tmp_path: Path, cores: list[int], words: str) -> None:
    make_plan(tmp_path)
    data = json.loads((tmp_path / "topology.json").read_text())
    data["blocks"][0]["cores"] = cores
    (tmp_path / "topology.json").write_text(json.dumps(data))
    with pytest.raises(ClaimError, match=f"block 0 is not whole.*{words}"):
        claim(tmp_path)


def test_a_device_that_has_gone_is_refused(tmp_path: Path) -> None:
    make_plan(tmp_path, "inf2.24xlarge", 4)
    dev = tmp_path / "root/dev"
    dev.mkdir(parents=True)
    for index in (0, 2, 3, 4, 5):
        (dev / f"neuron{index}").touch()
    with pytest.raises(ClaimError, match=r"/dev/neuron1 is gone since boot"):
        claim(tmp_path, root=tmp_path / "root")


def test_a_node_that_this_kernel_lacks_is_refused_and_frees_the_block(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "inf2.8xlarge")
    block = plan.blocks[0].model_copy(update={"numa_nodes": (907,)})
    write_plan(plan.model_copy(update={"blocks": (block,)}), tmp_path / "topology.json")
    with pytest.raises(ClaimError, match="NUMA node 907, which this kernel does not have"):
        claim(tmp_path)
    assert claim_owner(tmp_path / "claims/cores.lock", block) is None


def test_every_thread_is_moved_to_the_blocks_cpus(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "inf2.8xlarge")
    cpu = min(os.sched_getaffinity(0))
    nodes = tmp_path / "root/sys/devices/system/node/node5"
    nodes.mkdir(parents=True)
    (nodes / "cpulist").write_text(f"{cpu}\n")
    block = plan.blocks[0].model_copy(update={"numa_nodes": (5,)})
    write_plan(plan.model_copy(update={"blocks": (block,)}), tmp_path / "topology.json")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with claim(tmp_path, root=tmp_path / "root"):
            assert os.sched_getaffinity(0) == {cpu}
            assert thread.native_id is not None and os.sched_getaffinity(thread.native_id) == {cpu}
    finally:
        os.sched_setaffinity(thread.native_id or 0, os.sched_getaffinity(os.getppid()))
        stop.set()
        thread.join()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    make_plan(tmp_path)
    (tmp_path / "claims").write_text("a file")
    with pytest.raises(ClaimError, match="cannot be opened"):
        claim(tmp_path)


def test_live_binding_follows_numactl(tmp_path: Path) -> None:
    process = subprocess.Popen(["numactl", "--cpunodebind=0", "--membind=0", "sleep", "60"])
    try:
        deadline = time.monotonic() + 10
        while not live_binding(process.pid, (0,))["ok"] and time.monotonic() < deadline:
            time.sleep(0.02)  # until numactl has become sleep
        bound = live_binding(process.pid, (0,))
        assert bound["ok"] and bound["memory_policy"] == "bind:0" and bound["cpu_nodes"] == [0]
        assert "bound (bind:0), the plan binds nothing" in live_binding(process.pid, ())["reason"]
        assert "which this kernel does not have" in live_binding(process.pid, (0, 906))["reason"]
    finally:
        process.kill()
        process.wait()
    assert live_binding(process.pid, (0,))["reason"] == "it does not run"
    assert "memory policy is default" in live_binding(os.getpid(), (0,))["reason"]


def test_churn_of_plain_processes_never_gives_two_owners_and_leaks_nothing(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    program = start("churn", str(tmp_path), "2000", "1")
    output, _ = program.communicate(timeout=400)
    summary = json.loads(output)
    assert summary["started"] == 2000 and summary["failed"] == {}
    claimed: dict[int, tuple[int, list[int], float]] = {}
    released: dict[int, float] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        event, pid, *rest = json.loads(line)
        if event == "claimed":
            raylet, cores, when, visible_cores_right = rest
            assert visible_cores_right
            assert tuple(cores) in {plan.blocks[block].cores for block in plan.raylets[raylet].blocks}
            assert pid not in claimed
            claimed[pid] = (raylet, cores, when)
        else:
            released[pid] = max(released.get(pid, 0), rest[0])
    assert len(claimed) > 1200  # the others were killed before they had claimed, or found no block
    held: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pid, (_, cores, when) in claimed.items():
        for core in cores:
            held[core].append((when, released[pid]))
    for intervals in held.values():
        intervals.sort()
        for (_, end), (begin, _) in pairwise(intervals):
            assert begin >= end
    deadline = time.monotonic() + 20  # until the last orphans are gone
    free = [
        claim(tmp_path, raylet.index, deadline - time.monotonic())
        for raylet in plan.raylets
        for _ in raylet.blocks
    ]
    assert sorted(one.block.index for one in free) == list(range(12))
    for one in free:
        one.release()
    assert load_plan(tmp_path / "topology.json") == plan
