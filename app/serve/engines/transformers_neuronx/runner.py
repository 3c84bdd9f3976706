"""Turns scheduled work into calls of the forward contract, and their logits into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from app.serve.engines.transformers_neuronx.contract import (
    ContinuousBatchingModel,
    ContractError,
    Geometry,
    bucket_for,
)
from app.serve.policy.costs import StepCosts

Rows = npt.NDArray[np.float32]
"""Logits, one row a sequence: (sequences, vocabulary)."""
DecodeEntry = tuple[int, int, int]
"""Slot, token, and the position that the token is written to."""


class StepRunner(Protocol):
    """What the engine core needs of a model: three kinds of step over numbered slots."""

    geometry: Geometry

    def context(self, slot: int, tokens: Sequence[int]) -> Rows:
        """Prefill a slot from position 0 with two or more tokens; one row, for the last of them."""
        ...

    def chunk(self, slot: int, tokens: Sequence[int], start: int) -> Rows:
        """Write a compiled chunk's tokens from position ``start`` on; one row, for the last of them."""
        ...

    def decode(self, entries: Sequence[DecodeEntry]) -> Rows:
        """One token each for the slots given, in their order. A slot left out loses its position 0."""
        ...


class ContractRunner:
    """A :class:`StepRunner` over a model that speaks the forward contract (needs torch)."""

    def __init__(self, model: ContinuousBatchingModel, geometry: Geometry) -> None:
        import torch

        self.geometry = geometry
        self._model = model
        self._torch = torch

    def context(self, slot: int, tokens: Sequence[int]) -> Rows:
        """See :class:`StepRunner`."""
        if len(tokens) < 2:
            raise ContractError("a context call takes two or more tokens: one token alone is a decode call")
        bucket_for(self.geometry.context_buckets, len(tokens))
        logits = self._call(self._model.forward, [list(tokens)], [list(range(len(tokens)))], [slot])
        return self._rows(logits)

    def chunk(self, slot: int, tokens: Sequence[int], start: int) -> Rows:
        """See :class:`StepRunner`."""
        count = len(tokens)
        if count not in self.geometry.chunk_sizes or start < 1:
            raise ContractError(
                f"a chunk of {count} tokens at position {start}: expected one of "
                f"{self.geometry.chunk_sizes} tokens (never padded) at position 1 or later"
            )
        bucket_for(self.geometry.token_buckets, start + count)
        logits = self._call(
            self._model.speculative_forward,
            [list(tokens)],
            [list(range(start, start + count))],
            [slot],
            speculation_length=count,
        )
        return self._rows(logits[-1].transpose(0, 1))

    def decode(self, entries: Sequence[DecodeEntry]) -> Rows:
        """See :class:`StepRunner`."""
        slots, tokens, positions = zip(*entries, strict=True)
        bucket_for(self.geometry.token_buckets, max(positions) + 1)
        logits = self._call(
            self._model.forward, [[token] for token in tokens], [[item] for item in positions], list(slots)
        )
        return self._rows(logits)

    def _call(self, forward: Any, input_ids: Any, cache_ids: Any, start_ids: Any, **options: Any) -> Any:
        torch = self._torch
        with torch.inference_mode():
            return forward(
                torch.tensor(input_ids, dtype=torch.int64),
                cache_ids=torch.tensor(cache_ids, dtype=torch.int64),
                start_ids=torch.tensor(start_ids, dtype=torch.int64),
                **options,
            )

    def _rows(self, logits: Any) -> Rows:
        rows: Rows = logits.to(self._torch.float32).cpu().numpy()
        return rows


def warm_up(runner: StepRunner, clock: Callable[[], float], repeats: int = 2) -> StepCosts:
    """Run every compiled graph over an empty cache and measure it; the last run of each counts.

    Also proof that each graph loads and runs before the first request comes.
    """
    geometry = runner.geometry
    costs = StepCosts({}, {})

    def measure(graph: Any, bucket: int, run: Callable[[], Any]) -> None:
        for _ in range(repeats):
            started = clock()
            run()
            costs.measured(graph, bucket, (clock() - started) * 1000)

    for bucket in geometry.context_buckets:
        measure("context", bucket, lambda: runner.context(0, [0] * bucket))  # noqa: B023  (run at once)
    for size in geometry.chunk_sizes:
        start = geometry.context_limit - size
        measure("chunk", size, lambda: runner.chunk(0, [0] * size, start))  # noqa: B023
    for bucket in geometry.token_buckets:
        entries = [(slot, 0, bucket - 1) for slot in range(geometry.slots)]
        measure("decode", bucket, lambda: runner.decode(entries))  # noqa: B023
    return costs
