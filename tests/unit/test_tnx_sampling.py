"""Sampling from logits against plain, slow definitions; and log probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serve.engines.transformers_neuronx.request import GenerationRequest, Sampling
from app.serve.engines.transformers_neuronx.sampling import LogitsError, generator_for, sample, token_logprob

rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)


def allowed(row: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Tokens that may be drawn and their probabilities, straight from the definition."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = {
        token: math.exp((float(row[token]) - float(row.max())) / sampling.temperature) for token in ranked
    }
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for token in ranked:
        kept[token] = weights[token] / total
        if sum(kept.values()) >= sampling.top_p:
            break
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


@settings(deadline=None)
@given(
    row=rows,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**40),
)
def test_only_tokens_that_the_filters_leave_are_drawn(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    sampling = Sampling(1, temperature, top_k, top_p, seed)
    drawn = {sample(row, sampling, np.random.default_rng(seed + n)) for n in range(20)}
    choices = allowed(row, sampling)
    least = min(row[token] for token in choices)
    # Equal logits at the edge of a filter are interchangeable, and so are those within rounding.
    assert all(token in choices or row[token] >= least - 1e-4 for token in drawn)


def test_draws_follow_the_probabilities() -> None:
    row = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 3.0], dtype=np.float32)
    sampling = Sampling(1, temperature=0.8, top_k=4, top_p=0.95)
    generator = np.random.default_rng(1)
    count = 40_000
    drawn = np.bincount([sample(row, sampling, generator) for _ in range(count)], minlength=6) / count
    for token in range(6):
        assert drawn[token] == pytest.approx(allowed(row, sampling).get(token, 0), abs=0.01)


def test_a_large_vocabulary_is_sorted_whole_only_when_it_must_be() -> None:
    """Flat probabilities need more than the candidates that are sorted at first."""
    row = np.linspace(0, 0.01, 5000, dtype=np.float32)
    generator = np.random.default_rng(2)
    drawn = [sample(row, Sampling(1, 1.0, top_p=0.9), generator) for _ in range(3000)]
    assert min(drawn) >= 450 and min(drawn) < 700 and max(drawn) > 4900


def test_greedy_takes_the_first_of_the_largest() -> None:
    row = np.array([1, 3, 3, 2], dtype=np.float32)
    assert sample(row, Sampling(1, temperature=0), np.random.default_rng(0)) == 1
    assert sample(row, Sampling(1, temperature=1e-300), np.random.default_rng(0)) in (1, 2)


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_error_and_no_token(bad: list[float], temperature: float) -> None:
    with pytest.raises(LogitsError, match="finite"):
        sample(np.array(bad, dtype=np.float32), Sampling(1, temperature), np.random.default_rng(0))


def test_a_seed_gives_the_same_stream_and_no_seed_does_not() -> None:
    def stream(seed: int | None) -> list[float]:
        return list(generator_for(GenerationRequest("r", (1,), Sampling(1, seed=seed))).random(4))

    assert stream(11) == stream(11)
    assert stream(-1) == stream(2**64 - 1)
    assert stream(None) != stream(None)


@given(row=rows, top=st.integers(0, 20), data=st.data())
def test_logprobs_are_the_logarithms_of_the_softmax(row: np.ndarray, top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    result = token_logprob(row, token, top)
    exact = row.astype(float) - np.logaddexp.reduce(row.astype(float))
    assert result.logprob == pytest.approx(exact[token], abs=1e-9)
    assert len(result.top) == min(top, len(row))
    assert [value for _, value in result.top] == pytest.approx(sorted(exact, reverse=True)[:top], abs=1e-9)


def test_wrong_parameters_are_all_named() -> None:
    problems = Sampling(0, -1, 257, 0, stop=("",), logprobs=21).problems()
    assert [problem.split()[0] for problem in problems] == [
        "max_tokens", "temperature", "top_k", "top_p", "stop", "logprobs",
    ]  # fmt: skip
