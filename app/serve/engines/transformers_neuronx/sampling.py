"""From a row of logits to a token, on the host.

Each request draws from a generator of its own, so its tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from app.serve.engines.transformers_neuronx.request import GenerationRequest, Sampling, TokenLogprob

Row = npt.NDArray[np.float32]
_SORT_FIRST = 1024
"""Candidates that ``top_p`` sorts at first: a whole vocabulary takes ten times as long and is seldom
needed."""


class LogitsError(ValueError):
    """The model gave no usable logits for one request (NaN, or no finite value)."""


def generator_for(request: GenerationRequest) -> np.random.Generator:
    """The request's own random stream: from its seed, else from the system's entropy."""
    seed = request.sampling.seed
    return np.random.default_rng(None if seed is None else seed % 2**64)


def sample(row: Row, sampling: Sampling, generator: np.random.Generator) -> int:
    """Draw one token: temperature, then ``top_k``, then ``top_p``.

    Raises:
        LogitsError: the row holds NaN, or nothing finite.
    """
    best = int(np.argmax(row))
    if not np.isfinite(row[best]):
        raise LogitsError(f"the model's logits hold {row[best]}; expected finite numbers")
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    candidates, logits = _top_k(row, sampling.top_k)
    # Against the largest logit first: a tiny temperature must not overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - float(row[best])) / sampling.temperature)
    probabilities = weights / weights.sum()
    if sampling.top_p < 1:
        candidates, probabilities = _top_p(candidates, probabilities, sampling.top_p)
    drawn = np.searchsorted(np.cumsum(probabilities), generator.random() * probabilities.sum(), side="right")
    return int(candidates[min(int(drawn), len(candidates) - 1)])


def token_logprob(row: Row, token: int, top: int) -> TokenLogprob:
    """The token's log probability and the ``top`` most likely tokens', from unchanged logits."""
    wide = row.astype(np.float64)
    wide -= wide.max()
    normalized = wide - np.log(np.exp(wide).sum())
    best: list[tuple[int, float]] = []
    if top:
        indexes = np.argpartition(-normalized, min(top, len(row)) - 1)[:top]
        ordered = indexes[np.argsort(-normalized[indexes], kind="stable")]
        best = [(int(index), float(normalized[index])) for index in ordered]
    return TokenLogprob(token, float(normalized[token]), tuple(best))


def _top_k(row: Row, top_k: int) -> tuple[npt.NDArray[np.int64], Row]:
    if not 0 < top_k < len(row):
        return np.arange(len(row)), row
    indexes = np.sort(np.argpartition(-row, top_k - 1)[:top_k])
    return indexes, row[indexes]


def _top_p(
    candidates: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64], top_p: float
) -> tuple[Any, Any]:
    """The smallest set of most likely tokens that holds ``top_p`` of the probability."""
    order = _most_likely(probabilities, _SORT_FIRST)
    reached = np.cumsum(probabilities[order])
    if reached[-1] < top_p and len(order) < len(probabilities):
        order = _most_likely(probabilities, len(probabilities))
        reached = np.cumsum(probabilities[order])
    keep = order[: int(np.searchsorted(reached, top_p, side="left")) + 1]
    return candidates[keep], probabilities[keep]


def _most_likely(probabilities: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indexes of the ``count`` largest, largest first; equal ones by index."""
    if count >= len(probabilities):
        return np.argsort(-probabilities, kind="stable")
    least = np.partition(probabilities, len(probabilities) - count)[len(probabilities) - count]
    # All that equal the least are taken, so that which of them comes first never depends on the partition.
    indexes = np.flatnonzero(probabilities >= least)
    return indexes[np.argsort(-probabilities[indexes], kind="stable")]
