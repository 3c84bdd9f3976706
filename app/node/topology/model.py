"""The shapes that topology planning passes on: what the host is, and what it was divided into."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

TOPOLOGY_PATH = Path("/run/neuronfleet/topology.json")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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

    version: int = 1
    tp_degree: int
    blocks: tuple[Block, ...]
    raylets: tuple[Raylet, ...]
    idle_cores: tuple[int, ...]
    warnings: tuple[str, ...] = ()
