"""Hosts as trees of files, and what neuron-ls prints on them, for the topology tests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.node.topology import HostTopology, NumaNode
from app.node.topology.host import read_neuron_ls_file
from app.node.topology.idlist import parse_idlist

EMULATED = Path(__file__).parents[2] / "rehearsal/neuron/neuron-ls"

INF2_48XLARGE_NODES = {
    0: "0-23,96-119",
    1: "24-47,120-143",
    2: "48-71,144-167",
    3: "72-95,168-191",
}
GIB = 1024**3


def emulated_output(tmp_path: Path, instance_type: str, **config: Any) -> str:
    """What the emulated neuron-ls prints with ``-j``; as published unless the config says otherwise."""
    path = tmp_path / "emulated.json"
    path.write_text(json.dumps({"instance_type": instance_type, "as_published": True, **config}))
    done = subprocess.run(
        [str(EMULATED), "-j"],
        env={**os.environ, "NEURON_EMULATED_CONFIG": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def file_host(tmp_path: Path, text: str) -> HostTopology:
    path = tmp_path / "neuron-ls.json"
    path.write_text(text)
    return read_neuron_ls_file(path)


def tool(tmp_path: Path, stdout: str = "", stderr: str = "", code: int = 0) -> Path:
    """An executable in the place of neuron-ls that prints what it is told."""
    (tmp_path / "stdout").write_text(stdout)
    (tmp_path / "stderr").write_text(stderr)
    script = tmp_path / "neuron-ls"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/stdout\ncat {tmp_path}/stderr >&2\nexit {code}\n")
    script.chmod(0o755)
    return script


def host_tree(
    root: Path,
    nodes: Mapping[int, str],
    *,
    node_gib: int = 192,
    allowed: str | None = None,
    pci: Mapping[str, int] | None = None,
    sockets: Mapping[int, int] | None = None,
    shm: bool = True,
    cgroup: str = "0::/system.slice/neuronfleet-configure.service\n",
) -> Path:
    """A root folder with /sys and /proc of a host: its NUMA nodes, and Inferentia2 devices on its PCI bus."""
    every = sorted(cpu for cpus in nodes.values() for cpu in parse_idlist(cpus))
    for node, cpus in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        _write(folder / "cpulist", cpus)
        _write(folder / "meminfo", f"Node {node} MemTotal:       {node_gib * 1024 * 1024} kB\n")
        if sockets is not None:
            for cpu in parse_idlist(cpus)[:1]:
                path = f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
                _write(root / path, str(sockets[node]))
    _write(root / "proc/meminfo", f"MemTotal:       {len(nodes) * node_gib * 1024 * 1024} kB\n")
    listed = allowed if allowed is not None else f"{every[0]}-{every[-1]}"
    _write(root / "proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{listed}\n")
    _write(root / "proc/self/cgroup", cgroup)
    for bdf, numa_node in (pci or {}).items():
        folder = root / "sys/bus/pci/devices" / bdf
        _write(folder / "vendor", "0x1d0f")
        _write(folder / "device", "0x7264")
        _write(folder / "numa_node", str(numa_node))
    if shm:
        (root / "dev/shm").mkdir(parents=True)
    return root


def nodes_of(ids: Sequence[int], cpus_each: int = 48) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(
            index=node,
            cpus=tuple(range(position * cpus_each, (position + 1) * cpus_each)),
            memory_bytes=192 * GIB,
            socket=position // 2,
        )
        for position, node in enumerate(ids)
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
