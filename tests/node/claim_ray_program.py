"""A host of several real raylets in a network of its own, and Serve replicas that claim and are killed.

Runs as ``unshare --net --pid --fork --mount-proc python -m tests.node.claim_ray_program FOLDER CLAIMS SEED``:
when this process ends, the kernel ends everything that it started. Prints one JSON document.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from app.node.claim import claim_block
from app.node.raylet import raylet_command, raylet_environment
from app.node.topology import Block, Raylet, TopologyPlan, write_plan

NODE_IP = "10.77.0.1"
RAYLETS = 3
BLOCKS_PER_RAYLET = 2
MEBIBYTE = 1024 * 1024


def the_plan() -> TopologyPlan:
    """Three raylets of two blocks of two cores, alternating as on inf2.48xlarge; all on node 0."""
    count = RAYLETS * BLOCKS_PER_RAYLET
    blocks = tuple(
        Block(index=i, cores=(2 * i, 2 * i + 1), devices=(i,), numa_nodes=(0,)) for i in range(count)
    )
    raylets = []
    for index in range(RAYLETS):
        own = blocks[index::RAYLETS]
        raylets.append(
            Raylet(
                index=index,
                numa_nodes=(0,),
                cores=tuple(core for block in own for core in block.cores),
                cpus=1,
                memory_bytes=2048 * MEBIBYTE,
                object_store_bytes=80 * MEBIBYTE,
                blocks=tuple(block.index for block in own),
            )
        )
    return TopologyPlan(tp_degree=2, blocks=blocks, raylets=tuple(raylets), idle_cores=())


def start_raylets(folder: Path, plan: TopologyPlan) -> list[subprocess.Popen[bytes]]:
    """The planned commands, with folders of this test; a worker starts when the head's GCS listens."""
    token = folder / "ray-token"
    token.write_text("t" * 40)
    processes = []
    for raylet in plan.raylets:
        environment = {**os.environ, **raylet_environment(raylet, "cell", drain_s=0)}
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)
        command = raylet_command(
            raylet,
            "cell",
            NODE_IP,
            head_address=f"{NODE_IP}:6379",
            ray=str(Path(sys.executable).parent / "ray"),
            temp_dir=str(folder / f"r{raylet.index}"),
        )
        with (folder / f"raylet-{raylet.index}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        while 6379 not in {port for _, port in listening()}:
            time.sleep(0.2)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return processes


def listening() -> set[tuple[str, int]]:
    """(address in hexadecimal, port) of every TCP listener of this network."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, port = words[1].split(":")
                found.add((address, int(port, 16)))
    return found


def owner_of(port: int) -> str:
    """The name of the process that listens on a port (Ray names its processes)."""
    shown = subprocess.run(["ss", "-ltnpH", f"sport = :{port}"], capture_output=True, text=True, check=True)
    return shown.stdout.partition('users:(("')[2].partition('"')[0]


class Replica:
    """What the engine replica does first: claim, then start an engine process, which may outlive it."""

    def __init__(self, folder: str, seed: int) -> None:
        claim = claim_block(Path(folder) / "topology.json", Path(folder) / "claims", timeout_s=60)
        self.claim = claim
        pid = os.getpid()
        if random.Random(seed + pid).random() < 0.3:
            engine = multiprocessing.get_context("spawn").Process(
                target=time.sleep, args=(random.Random(pid).uniform(1, 4),)
            )
            engine.start()
            self.engine = engine
        line = {
            "pid": pid,
            "raylet": os.environ["NEURONFLEET_RAYLET"],
            "cores": claim.cores,
            "visible": os.environ["NEURON_RT_VISIBLE_CORES"],
            "policy": Path("/proc/self/numa_maps").read_text().split()[1],
            "claimed": time.monotonic(),
        }
        with (Path(folder) / "log").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def __call__(self) -> str:
        return "ok"


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(folder: Path, claims: int, seed: int) -> dict[str, Any]:
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", "host0", "type", "bridge"],
        ["ip", "addr", "add", f"{NODE_IP}/24", "dev", "host0"],
        ["ip", "link", "set", "host0", "up"],
    ):
        subprocess.run(command, check=True)
    plan = the_plan()
    write_plan(plan, folder / "topology.json")
    raylets = start_raylets(folder, plan)

    import ray  # the token's variables come first
    from ray import serve

    ray.init(address=f"{NODE_IP}:6379", log_to_driver=False, logging_level="ERROR")
    deadline = time.monotonic() + 120
    while len([node for node in ray.nodes() if node["Alive"]]) < RAYLETS:
        assert time.monotonic() < deadline, "not all raylets came up"
        time.sleep(0.2)
    nodes = [
        {key: node[key] for key in ("Resources", "Labels", "NodeManagerPort", "MetricsExportPort")}
        for node in ray.nodes()
    ]
    serve.start(proxy_location="Disabled")
    options = {"num_cpus": 0, "resources": {"neuron_cores": 2}}
    deployment = serve.deployment(
        num_replicas=len(plan.blocks), ray_actor_options=options, health_check_period_s=1
    )(Replica)
    serve.run(deployment.bind(str(folder), seed), name="churn", route_prefix=None)

    chance = random.Random(seed)
    killed: dict[int, float] = {}
    deadline = time.monotonic() + 420
    while len(log := read_log(folder)) < claims:
        assert time.monotonic() < deadline, f"only {len(log)} claims were made"
        alive = [entry["pid"] for entry in log if entry["pid"] not in killed]
        if len(alive) >= 2:
            for pid in chance.sample(alive, chance.randint(1, min(4, len(alive)))):
                killed[pid] = time.monotonic()
                os.kill(pid, signal.SIGKILL)
        time.sleep(chance.uniform(0.05, 0.5))
    ports = sorted((address, port, owner_of(port)) for address, port in listening())
    serve.shutdown()
    ray.shutdown()
    stopped = []
    for process in reversed(raylets):
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        stopped.append([other.poll() is None for other in raylets])
    free = []
    for raylet in plan.raylets:
        for _ in raylet.blocks:
            one = claim_block(
                folder / "topology.json", folder / "claims", raylet.index, timeout_s=20, bind=False
            )
            free.append(one.block.index)
    return {"log": log, "killed": killed, "nodes": nodes, "ports": ports, "stopped": stopped, "free": free}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True)
