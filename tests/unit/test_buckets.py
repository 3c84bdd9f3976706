"""Bucket edges: the true optimum, by brute force on small cases, and fast on large ones."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.buckets import (
    batch_buckets,
    concurrency,
    default_edges,
    graph_choices,
    optimal_buckets,
    padding,
    partition,
    recommended_count,
)
from app.plan.trace import read_trace

SAMPLE = Path(__file__).parent / "plan_data" / "azure_llm_2023_conv_sample.csv"

histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 20), min_size=1, max_size=9)


def brute_force(counts: dict[int, int], count: int, max_len: int, multiple: int) -> int:
    """Padded tokens of the best edges, trying every set of every multiple."""
    edges = range(multiple, max_len, multiple)
    return min(
        padding(counts, [*chosen, max_len]).padded_tokens
        for size in range(min(count - 1, len(edges)) + 1)
        for chosen in itertools.combinations(edges, size)
    )


@given(histograms, st.integers(1, 4), st.integers(20, 60), st.sampled_from((4, 7, 16)))
def test_optimum_is_that_of_brute_force(
    counts: dict[int, int], count: int, max_len: int, multiple: int
) -> None:
    found = optimal_buckets(counts, count, max_len, multiple)
    assert found[-1].padded_tokens == brute_force(counts, count, max_len, multiple)
    for number, item in enumerate(found, start=1):
        assert len(item.edges) == number
        assert item.edges[-1] == max_len
        assert list(item.edges) == sorted(set(item.edges))
        assert all(edge % multiple == 0 for edge in item.edges[:-1])
        assert item.padded_tokens == brute_force(counts, number, max_len, multiple)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9)), min_size=1, max_size=7), st.integers(1, 7))
def test_partition_is_that_of_brute_force(cells: list[tuple[int, int]], count: int) -> None:
    values = sorted({value for value, _ in cells})
    weights = [sum(weight for value, weight in cells if value == at) for at in values]

    def cost(ends: tuple[int, ...]) -> int:
        starts = (0, *(end + 1 for end in ends[:-1]))
        return sum(values[end] * sum(weights[a : end + 1]) for a, end in zip(starts, ends, strict=True))

    last = len(values) - 1
    for number, ends in enumerate(partition(values, weights, count), start=1):
        assert len(ends) == number
        best = min(
            cost((*chosen, last))
            for size in range(min(number, len(values)))
            for chosen in itertools.combinations(range(last), size)
        )
        assert cost(ends) == best


@given(histograms, st.integers(20, 60))
def test_padding_counts_each_request_that_fits(counts: dict[int, int], max_len: int) -> None:
    edges = default_edges(max_len)
    found = padding(counts, edges)
    real = sum(length * n for length, n in counts.items() if length <= max_len)
    padded = sum(
        next(edge for edge in edges if edge >= length) * n
        for length, n in counts.items()
        if length <= max_len
    )
    assert (found.real_tokens, found.padded_tokens) == (real, padded)
    assert 0 <= found.padding_fraction < 1


@pytest.mark.parametrize(
    ("max_len", "edges"),
    [
        (100, (100,)),
        (512, (128, 512)),
        (3000, (128, 512, 1024, 2048, 3000)),
        (4096, (128, 512, 1024, 2048, 4096)),
        (8192, (128, 512, 1024, 2048, 4096, 8192)),
    ],
)
def test_default_edges(max_len: int, edges: tuple[int, ...]) -> None:
    assert default_edges(max_len) == edges


def test_conversations_pad_at_most_half_as_much() -> None:
    counts = read_trace(SAMPLE).counts
    best = optimal_buckets(counts, 5, 4096)[-1]
    assert len(best.edges) == 5
    assert best.padding_fraction <= padding(counts, default_edges(4096)).padding_fraction / 2


def test_nothing_that_fits_pads_nothing() -> None:
    (only,) = optimal_buckets({5000: 3}, 4, 4096)
    assert only.edges == (4096,)
    assert only.padding_fraction == 0.0


@pytest.mark.parametrize("wrong", [{"count": 0}, {"max_len": 0}, {"multiple": 0}])
def test_sizes_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1"):
        optimal_buckets({1: 1}, **{"count": 2, "max_len": 64, "multiple": 64, **wrong})


def test_many_distinct_lengths_are_fast() -> None:
    rng = random.Random(7)
    counts = {length: rng.randint(1, 50) for length in range(1, 32769)}
    started = time.process_time()
    found = optimal_buckets(counts, 12, 32768, multiple=1)
    assert time.process_time() - started < 10
    assert len(found) == 12


def test_each_further_graph_saves_less_and_repays_later() -> None:
    trace = read_trace(SAMPLE)
    found = optimal_buckets(trace.counts, 8, 4096)
    choices = graph_choices(
        found, duration_h=trace.duration_h, prefill_ms_per_1k_tokens=50, compile_minutes=5
    )
    savings = [item.saved_tokens for item in choices[1:]]
    assert savings == sorted(savings, reverse=True)
    assert all(saved > 0 for saved in savings)
    paybacks = [item.payback_h for item in choices[1:]]
    assert paybacks == sorted(paybacks)


def test_recommended_count_follows_what_compilation_costs() -> None:
    counts = read_trace(SAMPLE).counts
    found = optimal_buckets(counts, 8, 4096)

    def recommended(minutes: float) -> int:
        return recommended_count(
            graph_choices(found, duration_h=1, prefill_ms_per_1k_tokens=50, compile_minutes=minutes),
            payback_h=24,
        )

    assert recommended(1e-6) == len(found)
    assert recommended(1e9) == 1
    assert recommended(0.001) >= recommended(1) >= recommended(100)


def test_without_times_a_graph_is_worth_a_hundredth() -> None:
    found = optimal_buckets({64: 100, 4096: 100, 4000: 1}, 4, 4096)
    choices = graph_choices(found, duration_h=None, prefill_ms_per_1k_tokens=50, compile_minutes=5)
    assert [item.payback_h for item in choices] == [None] * len(choices)
    assert recommended_count(choices) == 2


def test_concurrency_is_time_spent() -> None:
    spent = concurrency([0, 1, 10], [2, 2, 1])  # one, two, one; a gap; one
    assert spent == {1: 3000, 2: 1000}
    assert concurrency([0, 0, 0], [1, 1, 1], replicas=2) == {2: 1000}


def test_batch_buckets_leave_the_fewest_slots_empty() -> None:
    spent = {1: 500, 2: 300, 7: 900, 8: 50, 40: 10}
    found = batch_buckets(spent, 3, 16)
    assert found.edges[-1] == 16
    capped = {1: 500, 2: 300, 7: 900, 8: 50, 16: 10}
    assert found.padded_tokens == brute_force(capped, 3, 16, 1)
