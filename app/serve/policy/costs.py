"""What each compiled graph costs to run, in milliseconds.

The graphs are static, so one number a graph is enough: predicted before the engine runs, measured at warm-up,
and followed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Graph = Literal["context", "chunk", "decode"]
_FOLLOW = 0.1
"""Weight of a new measurement: slow, so that one late step does not change the schedule."""


class StepCosts:
    """Milliseconds by graph and bucket (tokens: context bucket, chunk size, or decode cache length)."""

    def __init__(
        self,
        context: Mapping[int, float],
        decode: Mapping[int, float],
        chunk: Mapping[int, float] | None = None,
    ) -> None:
        self._ms: dict[Graph, dict[int, float]] = {
            "context": dict(context),
            "chunk": dict(chunk or {}),
            "decode": dict(decode),
        }

    def ms(self, graph: Graph, bucket: int) -> float:
        """The expected time of one run."""
        return self._ms[graph][bucket]

    def measured(self, graph: Graph, bucket: int, milliseconds: float) -> None:
        """Set a graph's time to what was measured (warm-up)."""
        self._ms[graph][bucket] = milliseconds

    def observe(self, graph: Graph, bucket: int, milliseconds: float) -> None:
        """Follow a graph's time as it runs."""
        before = self._ms[graph].get(bucket, milliseconds)
        self._ms[graph][bucket] = before + _FOLLOW * (milliseconds - before)

    def as_dict(self) -> dict[str, dict[int, float]]:
        """All times, for logs and benchmarks."""
        return {graph: dict(sorted(values.items())) for graph, values in self._ms.items()}
