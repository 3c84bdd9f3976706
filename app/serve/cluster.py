"""How many replicas a Ray cluster can hold, and how many are wanted as raylets come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CORE_RESOURCE = "neuron_cores"
SHRINK_AFTER_S = 60.0
"""A raylet that is away for less than this (a restart) costs no replica its place."""


@dataclass(frozen=True)
class Offer:
    """What the cluster's living raylets offer: whole blocks, and cores that make up no block."""

    blocks: int
    cores: int
    raylets: int

    def describe(self, tp_degree: int) -> str:
        """The numbers, for a person."""
        spare = self.cores - self.blocks * tp_degree
        return (
            f"{self.raylets} raylets offer {self.cores} {CORE_RESOURCE} = {self.blocks} blocks of {tp_degree}"
            f" ({spare} cores in no block)"
        )


def offered(nodes: Iterable[Mapping[str, Any]], tp_degree: int) -> Offer:
    """What raylets offer, from ``ray.nodes()``. A block never spans raylets, so each is divided by itself."""
    cores = [
        int(node.get("Resources", {}).get(CORE_RESOURCE, 0))
        for node in nodes
        if node.get("Alive") and node.get("Resources", {}).get(CORE_RESOURCE, 0) > 0
    ]
    return Offer(sum(count // tp_degree for count in cores), sum(cores), len(cores))


class ReplicaTarget:
    """The number of replicas to ask Serve for: grows at once, shrinks when a loss has lasted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._short_since: float | None = None
        self.value = 0

    def update(self, blocks: int) -> int:
        """The target now that the cluster offers ``blocks``; never 0 once it was more."""
        if blocks >= self.value:
            self._short_since = None
            self.value = blocks
            return self.value
        now = self._clock()
        if self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= SHRINK_AFTER_S:
            self._short_since = None
            self.value = max(1, blocks)
        return self.value
