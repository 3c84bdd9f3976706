"""Where a replica runs: the block of cores that it claims on its host, the CPUs that go with it, and the
artifact that it holds there."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.node.topology.model import TOPOLOGY_PATH
from app.serve.settings import ARTIFACTS, node_config_path

TOPOLOGY_VARIABLE = "NEURONFLEET_TOPOLOGY"


@dataclass
class Binding:
    """A replica's claim; ``block`` is None where the host has no plan (``make serve``).

    Keep it as long as the engine lives: the claim's lock is freed when the last process that inherited it
    ends.
    """

    block: Any = None
    cpus: tuple[int, ...] = ()
    _held: ExitStack = field(default_factory=ExitStack)

    def describe(self) -> dict[str, Any]:
        """The binding, for logs and status."""
        cores = [] if self.block is None else list(self.block.cores)
        nodes = [] if self.block is None else list(self.block.numa_nodes)
        index = None if self.block is None else self.block.index
        return {"block": index, "cores": cores, "numa_nodes": nodes, "cpus": len(self.cpus)}

    def release(self) -> None:
        """Give the block up."""
        self._held.close()


def bind_replica(plan: Path | None = None) -> Binding:
    """Claim a free block of this host's plan and bind this process to it, before anything heavy is imported.

    Raises:
        app.node.claim.ClaimError: the plan has no free block that this raylet owns.
    """
    plan = plan or Path(os.environ.get(TOPOLOGY_VARIABLE, str(TOPOLOGY_PATH)))
    binding = Binding()
    if plan.exists():
        from app.node.claim import claim_block

        claim = binding._held.enter_context(claim_block(plan))
        binding.block = claim.block
    binding.cpus = tuple(sorted(os.sched_getaffinity(0)))
    return binding


def hold_artifact(model_dir: Path, artifacts: Path = ARTIFACTS) -> Any:
    """Check the host's artifact once more against the node config, and keep it from being evicted as long as
    this process lives. None where the model is not the host's artifact (``make serve``).

    Raises:
        app.node.match.MatchError: every reason why the artifact must not be loaded.
    """
    from app.node.config import load_node_config
    from app.node.match import hold_for_engine, host_facts

    config_path = node_config_path(os.environ)
    if not config_path.exists():
        return None
    config = load_node_config(config_path)
    folder = artifacts / config.artifact.digest
    if not model_dir.is_relative_to(folder):
        return None
    return hold_for_engine(folder, config, os.environ.get("NEURONFLEET_INSTANCE_TYPE"), host_facts())
