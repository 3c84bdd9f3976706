"""What runs inside the emulated machine: the planner on what the guest's kernel shows, and its commands.

Two parts of one file. ``prove`` reads the host, plans it, and runs each raylet's command with this file in
the place of ray. As that stand-in (``start``), it does what a raylet does: it forks a replica for each of its
blocks; each replica claims a block, starts threads, allocates memory and touches it, and reports what /proc
says of it.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from app.node.claim import claim_block
from app.node.raylet import raylet_command, raylet_environment
from app.node.topology import HostTopology, TopologyPlan, plan_topology, read_host, write_plan
from app.node.topology.idlist import parse_idlist

NEURON_LS = "/opt/aws/neuron/bin/neuron-ls"
RAY = "/proof/ray"
PLAN_PATH = Path("/run/neuronfleet/topology.json")
CLAIMS = Path("/run/neuronfleet/claims")
MEBIBYTES = 8
"""Memory that each replica touches."""

DEGREES = (2, 8, 24)


def main() -> None:
    if sys.argv[1:2] == ["start"]:
        raylet()
    else:
        print(json.dumps(prove(), separators=(",", ":")))


def prove() -> dict[str, Any]:
    host = read_host(neuron_ls=NEURON_LS)
    runs = []
    for degree in DEGREES:
        plan = plan_topology(host, degree)
        write_plan(plan, PLAN_PATH)
        runs.append({"tp_degree": degree, "plan": plan.model_dump(), "raylets": run_raylets(plan)})
    return {
        "nodes": [node.model_dump() for node in host.nodes],
        "distances": distances(),
        "devices": {device.index: device.numa_node for device in host.devices},
        "warnings": list(host.warnings),
        "problems": [problem.message for problem in host.problems],
        "runs": runs,
        "bad_plan": bad_plan(host),
        "kernel": os.uname().release,
    }


def run_raylets(plan: TopologyPlan) -> list[dict[str, Any]]:
    """All raylets of the plan at once, as a host runs them."""
    started = []
    for index, one in enumerate(plan.raylets):
        command = raylet_command(one, "cell", "127.0.0.1", ray=RAY)
        environment = {**os.environ, **raylet_environment(one, "cell")}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append((index, command, process))
    results = []
    for index, command, process in started:
        output, _ = process.communicate(timeout=120)
        report = json.loads(output) if process.returncode == 0 else {"error": output, "replicas": []}
        results.append({"index": index, "command": command, **report})
    return results


def bad_plan(host: HostTopology) -> dict[str, Any]:
    """What the tutorial does: devices 0-5, the first block at degree 12, bound to node 0."""
    plan = plan_topology(host, 12)
    command = ["/usr/bin/numactl", "--cpunodebind=0", "--membind=0", RAY, "start", "--unclaimed"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return {"command": command, "block": plan.blocks[0].model_dump(), **json.loads(done.stdout)}


def raylet() -> None:
    """The stand-in for ``ray start --block``: fork a replica for each block, print what they report."""
    claimed = "--unclaimed" not in sys.argv
    blocks = 1
    if claimed:
        plan = TopologyPlan.model_validate_json(PLAN_PATH.read_text())
        blocks = len(plan.raylets[int(os.environ["NEURONFLEET_RAYLET"])].blocks)
    replicas = []
    ready: list[tuple[int, int]] = []
    hold_read, hold_write = os.pipe()
    for _ in range(blocks):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hold_write)
            os.write(write_end, json.dumps(replica(claimed)).encode())
            os.close(write_end)
            os.read(hold_read, 1)  # hold the block until all replicas have reported
            os._exit(0)
        os.close(write_end)
        ready.append((pid, read_end))
    for _, read_end in ready:
        with os.fdopen(read_end) as file:
            replicas.append(json.load(file))
    os.close(hold_write)
    for pid, _ in ready:
        os.waitpid(pid, 0)
    print(json.dumps({"status": status_of(os.getpid()), "replicas": replicas}))


def replica(claimed: bool) -> dict[str, Any]:
    """Claim, start threads, touch memory from each, and report what the kernel says."""
    block = None
    if claimed:
        block = claim_block(PLAN_PATH, CLAIMS, timeout_s=30).block
    buffers: list[mmap.mmap] = []
    touched = threading.Barrier(3)
    done = threading.Event()

    def work() -> None:
        buffer = mmap.mmap(-1, MEBIBYTES * 1024 * 1024 // 2)
        for offset in range(0, len(buffer), mmap.PAGESIZE):
            buffer[offset] = 1
        buffers.append(buffer)
        touched.wait(60)
        done.wait(60)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    touched.wait(60)
    report = {
        "block": block.index if block else None,
        "visible_cores": os.environ.get("NEURON_RT_VISIBLE_CORES"),
        "status": status_of(os.getpid()),
        "threads": [
            {**status_of(os.getpid(), int(task.name)), "ran_on_cpu": last_cpu(task)}
            for task in sorted(Path("/proc/self/task").iterdir())
        ],
        "policies": sorted({line.split()[1] for line in numa_maps()}),
        "anonymous_pages": anonymous_pages(),
    }
    done.set()
    for thread in threads:
        thread.join()
    return report


def status_of(pid: int, task: int | None = None) -> dict[str, Any]:
    folder = Path(f"/proc/{pid}") if task is None else Path(f"/proc/{pid}/task/{task}")
    fields = dict(
        line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
    )
    return {"cpus": parse_idlist(fields["Cpus_allowed_list"]), "mems": fields["Mems_allowed_list"]}


def last_cpu(task: Path) -> int:
    return int((task / "stat").read_text().rsplit(")", 1)[1].split()[36])


def numa_maps() -> list[str]:
    return Path("/proc/self/numa_maps").read_text().splitlines()


def anonymous_pages() -> dict[str, int]:
    """Pages of the large anonymous mappings (those that ``work`` touched), by NUMA node."""
    pages: dict[str, int] = {}
    for line in numa_maps():
        words = line.split()
        counts = {
            word[1:].split("=")[0]: int(word.split("=")[1])
            for word in words
            if word[:1] == "N" and "=" in word
        }
        if "file=" not in line and sum(counts.values()) >= 512:
            for node, count in counts.items():
                pages[node] = pages.get(node, 0) + count
    return pages


def distances() -> dict[str, list[int]]:
    return {
        folder.name.removeprefix("node"): [int(word) for word in (folder / "distance").read_text().split()]
        for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    }


if __name__ == "__main__":
    main()
