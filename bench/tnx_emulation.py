"""An emulated model for the transformers-neuronx scheduler: the contract's effects on the cache, numbers for
weights, and virtual time.

What a slot's next token is depends on every position cached before it, so a scheduler that mixes up slots,
writes a position wrongly or lets a decode step overwrite a half prefilled slot gives other tokens than the
same request alone. Nothing is computed for real, and time is what the cost table says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from app.serve.engines.transformers_neuronx.contract import ContractError, Geometry, bucket_for
from app.serve.engines.transformers_neuronx.runner import DecodeEntry, Rows
from app.serve.policy.costs import Graph, StepCosts

_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)


class VirtualClock:
    """Seconds that pass only when they are made to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_ms(self, milliseconds: float) -> None:
        """Let time pass."""
        self.now += milliseconds / 1000


class EmulatedModel:
    """A runner (see :class:`app.serve.engines.transformers_neuronx.runner.StepRunner`) over numbers.

    ``timing`` is what each graph really takes, which the engine may know only as a prediction.
    """

    def __init__(self, geometry: Geometry, timing: StepCosts, clock: VirtualClock, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.geometry = geometry
        self._timing = timing
        self._clock = clock
        self._contribution = generator.integers(
            0, 2**63, size=(geometry.vocabulary, geometry.context_limit), dtype=np.uint64
        )
        self._logits = generator.standard_normal((1 << 12, geometry.vocabulary)).astype(np.float32) * 3
        self._cells = np.zeros((geometry.slots, geometry.context_limit), dtype=np.uint64)

    def context(self, slot: int, tokens: Sequence[int]) -> Rows:
        """Writes every position of the bucket, padding too."""
        if len(tokens) < 2:
            raise ContractError("one token is a decode call")
        bucket = bucket_for(self.geometry.context_buckets, len(tokens))
        padded = [*tokens, *([0] * (bucket - len(tokens)))]
        self._cells[slot, :bucket] = self._contribution[padded, np.arange(bucket)]
        self._pass("context", bucket)
        return self._row(slot, len(tokens))[None]

    def chunk(self, slot: int, tokens: Sequence[int], start: int) -> Rows:
        """Writes exactly a compiled chunk behind what is cached."""
        size = len(tokens)
        if size not in self.geometry.chunk_sizes or start < 1 or start + size > self.geometry.context_limit:
            raise ContractError(f"no graph for {size} tokens at {start}")
        self._cells[slot, start : start + size] = self._contribution[
            list(tokens), np.arange(start, start + size)
        ]
        self._pass("chunk", size)
        return self._row(slot, start + size)[None]

    def decode(self, entries: Sequence[DecodeEntry]) -> Rows:
        """Writes one position of every slot: position 0 of those left out."""
        given = {slot for slot, _, _ in entries}
        if len(given) != len(entries):
            raise ContractError("a slot is twice in one decode call")
        for slot in set(range(self.geometry.slots)) - given:
            self._cells[slot, 0] = self._contribution[0, 0]
        for slot, token, position in entries:
            self._cells[slot, position] = self._contribution[token, position]
        self._pass("decode", bucket_for(self.geometry.token_buckets, max(item[2] for item in entries) + 1))
        return np.stack([self._row(slot, position + 1) for slot, _, position in entries])

    def logits_alone(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """What the model says after these tokens, whatever the cache holds: for comparison."""
        return self._from_sum(self._contribution[list(tokens), np.arange(len(tokens))].sum(dtype=np.uint64))

    def _row(self, slot: int, length: int) -> npt.NDArray[np.float32]:
        return self._from_sum(self._cells[slot, :length].sum(dtype=np.uint64))

    def _from_sum(self, total: np.uint64) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            mixed = total * _SCRAMBLE
        row: npt.NDArray[np.float32] = self._logits[int(mixed) >> 52]
        return row

    def _pass(self, graph: Graph, bucket: int) -> None:
        self._clock.advance_ms(self._timing.ms(graph, bucket))


class LetterTokenizer:
    """Token n is a letter: enough text for stop strings, none of a real tokenizer's cost."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        return "".join(chr(97 + token % 26) for token in token_ids)
