"""From a row of logits to a token, on the host.

Each request draws from a generator of its own, so its tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from app.serve.engines.transformers_neuronx.request import GenerationRequest, Sampling, TokenLogprob

Row = npt.NDArray[np.float32]
_LEAST_TEMPERATURE = 1e-6
_BLOCK = 1024
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
    candidates = _top_k(row, sampling.top_k)
    logits = row if candidates is None else row[candidates]
    # Against the largest logit first, so that a tiny temperature does not overflow. In one array: to give
    # memory back to the system and take it again would cost more than the arithmetic.
    weights = logits - row[best]
    with np.errstate(over="ignore"):
        weights /= np.float32(max(sampling.temperature, _LEAST_TEMPERATURE))
    np.exp(weights, out=weights)
    if sampling.top_p < 1:
        keep = _top_p(weights, sampling.top_p)
        candidates, weights = keep if candidates is None else candidates[keep], weights[keep]
    drawn = _draw(weights, generator.random())
    return drawn if candidates is None else int(candidates[drawn])


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


def _top_k(row: Row, top_k: int) -> npt.NDArray[np.int64] | None:
    """Indexes of the ``top_k`` largest; None: all (a list of all would cost more than all the rest)."""
    if not 0 < top_k < len(row):
        return None
    return np.sort(np.argpartition(-row, top_k - 1)[:top_k])


def _draw(weights: Row, fraction: float) -> int:
    """The index where the running sum of the weights passes ``fraction`` of the whole.

    In two steps: a running sum over a whole vocabulary would take most of the time.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    point = fraction * sums[-1]
    block = min(int(np.searchsorted(sums, point, side="right")), len(starts) - 1)
    before = sums[block - 1] if block else 0.0
    inside = np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    return int(starts[block]) + min(
        int(np.searchsorted(inside, point - before, side="right")), len(inside) - 1
    )


def _top_p(weights: Row, top_p: float) -> npt.NDArray[np.int64]:
    """Indexes of the smallest set of most likely tokens that holds ``top_p`` of the weight."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    order = _most_likely(weights, _SORT_FIRST)
    reached = np.cumsum(weights[order], dtype=np.float64)
    if reached[-1] < wanted and len(order) < len(weights):
        order = _most_likely(weights, len(weights))
        reached = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(np.searchsorted(reached, wanted, side="left")) + 1]


def _most_likely(probabilities: Row, count: int) -> npt.NDArray[np.int64]:
    """Indexes of the ``count`` largest, largest first; equal ones by index."""
    if count >= len(probabilities):
        return np.argsort(-probabilities, kind="stable")
    least = np.partition(probabilities, len(probabilities) - count)[len(probabilities) - count]
    # All that equal the least are taken, so that which of them comes first never depends on the partition.
    indexes = np.flatnonzero(probabilities >= least)
    return indexes[np.argsort(-probabilities[indexes], kind="stable")]
