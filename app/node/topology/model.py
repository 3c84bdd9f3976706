"""The shapes that topology planning passes on: what the host is, and what it was divided into."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

TOPOLOGY_PATH = Path("/run/neuronfleet/topology.json")
PLAN_VERSION = 1

ProblemKind = Literal[
    "neuron-ls-failed",
    "neuron-ls-output",
    "no-device",
    "device-missing",
    "duplicate-core",
    "stale-process",
    "node-missing",
    "numactl-missing",
    "degree",
    "plan-file",
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(_Frozen):
    """Something that keeps a host from being planned, in words that a person can act on."""

    kind: ProblemKind
    message: str


class TopologyError(Exception):
    """The host cannot be planned as asked. ``problems`` holds every reason, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.message for problem in problems))


class DeviceProcess(_Frozen):
    """A process that neuron-ls sees on a device."""

    pid: int
    command: str


class Device(_Frozen):
    """One Neuron device (chip).

    ``cores`` are NeuronCore ids of the host, ascending. ``numa_node`` is None where nothing says it.
    ``cpus`` are the logical CPUs near it (empty when unknown). ``connected_to`` are the device indices that
    NeuronLink joins it to. ``memory_bytes`` is HBM.
    """

    index: int
    cores: tuple[int, ...]
    numa_node: int | None = None
    bdf: str | None = None
    cpus: tuple[int, ...] = ()
    connected_to: tuple[int, ...] = ()
    memory_bytes: int | None = None
    processes: tuple[DeviceProcess, ...] = ()


class NumaNode(_Frozen):
    """One NUMA node: the CPUs that this process may use on it, its memory in bytes, its socket if known."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int
    socket: int | None = None


class HostTopology(_Frozen):
    """What a host is.

    ``cpus`` are the logical CPUs that this process may use; ``memory_bytes`` is what its cgroup leaves of the
    host's memory (0: unknown); ``shm_bytes`` the free space of /dev/shm (None: unknown). ``source`` says
    where the devices were read. ``problems`` stop a strict plan; ``warnings`` do not.
    """

    devices: tuple[Device, ...]
    nodes: tuple[NumaNode, ...]
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    shm_bytes: int | None = None
    instance_type: str | None = None
    source: Literal["neuron-ls", "sysfs", "none"] = "neuron-ls"
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


class Block(_Frozen):
    """The cores that one replica owns: contiguous, ascending, whole devices.

    ``cores`` are NeuronCore ids of the host, ``devices`` Neuron device indices, ``numa_nodes`` the nodes
    those devices hang on, ascending (empty when the host does not say).
    """

    index: int
    cores: tuple[int, ...]
    devices: tuple[int, ...]
    numa_nodes: tuple[int, ...]


class Raylet(_Frozen):
    """One raylet: the NUMA nodes it is bound to and its share of the host.

    ``cpus`` counts logical CPUs, memory is in bytes; ``blocks`` are indices into the plan's blocks.
    ``numa_nodes`` is empty for an unbound raylet (the host did not say where its devices hang).
    """

    index: int
    numa_nodes: tuple[int, ...]
    cores: tuple[int, ...]
    cpus: int
    memory_bytes: int
    object_store_bytes: int
    blocks: tuple[int, ...]


class TopologyPlan(_Frozen):
    """What a host is divided into. Written to ``TOPOLOGY_PATH`` at boot, read by units, replicas, status."""

    version: int = PLAN_VERSION
    tp_degree: int
    blocks: tuple[Block, ...]
    raylets: tuple[Raylet, ...]
    idle_cores: tuple[int, ...]
    warnings: tuple[str, ...] = ()


def write_plan(plan: TopologyPlan, path: Path = TOPOLOGY_PATH) -> None:
    """Write the plan so that a reader sees the old file or the new one, never a part (mode 0644)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(plan.model_dump_json(indent=2) + "\n")
    part.chmod(0o644)
    part.replace(path)


def load_plan(path: Path = TOPOLOGY_PATH) -> TopologyPlan:
    """Read the plan that boot wrote.

    Raises:
        TopologyError: no file, no JSON, or not a plan of this version; the message names the unit to look at.
    """
    remedy = "neuronfleet-configure writes it at each boot: journalctl -u neuronfleet-configure says why not."
    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("version") != PLAN_VERSION:
            raise ValueError(f"version {data.get('version')!r}, this code reads version {PLAN_VERSION}")
        return TopologyPlan.model_validate(data)
    except FileNotFoundError:
        reason = f"there is no topology plan at {path}"
    except (OSError, ValueError, ValidationError) as error:
        reason = f"the topology plan at {path} cannot be read: {error}"
    raise TopologyError([Problem(kind="plan-file", message=f"{reason}. {remedy}")])
