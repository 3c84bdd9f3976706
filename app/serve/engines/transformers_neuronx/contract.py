"""The forward contract: what ``LlamaForSampling`` of transformers-neuronx means by its arguments.

Read in the library's source (aws-neuron/transformers-neuronx, snapshot 2024-12: ``base.py`` with
``_prepare_for_continuous_batching`` and ``_prepare_for_par_ctx_rhs_padding``, ``decoder.py``,
``layers/attention.py``). With ``NeuronConfig(continuous_batching=ContinuousBatchingConfig(...))`` the KV
cache is one static array of ``batch_size_for_shared_caches`` slots by ``n_positions``, ``cache_ids`` are 2-D
(sequences by tokens; the positions written), and ``start_ids`` are 1-D slot numbers. The first cache id and
the number of tokens choose among three graphs:

==============  ================  ===============  =====================================================
graph           tokens a call     cache_ids[0][0]  what it does
==============  ================  ===============  =====================================================
context         (1, n), n > 1     0                pads to the smallest context bucket >= n, writes *every*
                                                   position of that bucket, attends inside the prompt only
speculative     (1, k), k > 1     > 0              writes k consecutive positions behind what is cached and
                                                   attends to both; compiled per exact k
decode          (b, 1)            any              writes one position of *every slot*
==============  ================  ===============  =====================================================

Three things follow that a caller must know, and that the scheduler here is built on:

- A decode call scatters its rows into a full batch of zeros. A slot that is not in ``start_ids`` takes part
  with token 0 at position 0, and what was cached there is overwritten. So every slot whose cache is still
  needed is in every decode call, a half prefilled one too (at its next position, which the next chunk writes
  again).
- A prompt of one token is a decode call: no graph takes it alone.
- A padded speculative call writes its padding to one fixed position of the cache. So chunks are never padded:
  the last chunk of a prompt is moved back to end with the prompt, and writes some positions a second time.

Logits come back in float32: context (1, vocabulary) for the prompt's last token; speculative
(k, vocabulary, 1); decode (b, vocabulary) in the order of ``start_ids``. One dtype (int64) for all three
arguments, since the library scatters one into zeros of another's.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.compile.transformers_neuronx import geometry_problems


class ContractError(ValueError):
    """A call or a geometry that the compiled graphs cannot serve; raised before the device is touched."""


class ContinuousBatchingModel(Protocol):
    """A model with a static KV cache. Tensors are torch's, int64 on the CPU; see the module for shapes."""

    def forward(self, input_ids: Any, cache_ids: Any = None, start_ids: Any = None) -> Any:
        """Context encoding of one prompt, or one decode step. Returns float32 logits.

        Raises:
            AssertionError, ValueError: the arguments fit no compiled graph; nothing was written.
            RuntimeError: the device failed; the cache cannot be trusted.
        """
        ...

    def speculative_forward(
        self,
        input_ids: Any,
        cache_ids: Any = None,
        start_ids: Any = None,
        speculation_length: int | None = None,
    ) -> Any:
        """``speculation_length`` tokens of one slot behind what it has cached. Raises as :meth:`forward`."""
        ...


@dataclass(frozen=True)
class Geometry:
    """What was compiled. Lengths in tokens, ascending.

    Args:
        slots: sequences that the KV cache holds (``batch_size_for_shared_caches``).
        token_buckets: cache lengths of the decode graphs (``n_positions``); the last is the context limit.
        context_buckets: prompt lengths of the context graphs (``context_length_estimate``).
        chunk_sizes: token counts of the speculative graphs (``enable_speculative_decoder``); empty: a prompt
        is
            prefilled in one piece.
        vocabulary: rows of the logits, as the model's config has it.
    """

    slots: int
    token_buckets: tuple[int, ...]
    context_buckets: tuple[int, ...]
    vocabulary: int
    chunk_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = geometry_problems(self.slots, self.token_buckets, self.context_buckets, self.chunk_sizes)
        if self.vocabulary < 1:
            problems.append(f"vocabulary {self.vocabulary} must be at least 1")
        if problems:
            raise ContractError("; ".join(problems))

    @property
    def context_limit(self) -> int:
        """Prompt and answer together, in tokens."""
        return self.token_buckets[-1]

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that can be prefilled and leaves room for one token."""
        whole = self.context_limit if self.chunk_sizes else self.context_buckets[-1]
        return min(whole, self.context_limit - 1)


def bucket_for(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds ``size`` tokens.

    Raises:
        ContractError: none does.
    """
    index = bisect.bisect_left(buckets, size)
    if index == len(buckets):
        raise ContractError(f"{size} tokens are over the largest compiled bucket, {buckets[-1]}")
    return buckets[index]
