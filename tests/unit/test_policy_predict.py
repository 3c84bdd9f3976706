"""Predicted cost: device time from step times, answer lengths from the answers before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.catalogue import get_instance
from app.plan.models import load_model
from app.plan.performance import ReplicaModel, shipped_constants
from app.plan.sharding import shard
from app.serve.policy.drain import DrainRate
from app.serve.policy.predict import FixedTimes, LengthHistory, PlanTimes, Predictor


def plan_times(batch: int = 8) -> PlanTimes:
    replica = ReplicaModel(
        shard(load_model("meta-llama/Llama-3.1-8B"), 8),
        get_instance("inf2.48xlarge"),
        8192,
        shipped_constants(),
    )
    return PlanTimes(replica.prefill_s, replica.decode_step_s, batch)


def test_a_prompt_costs_its_bucket() -> None:
    predictor = Predictor(plan_times(), LengthHistory())
    costs = [predictor.cost("k", "/v1/completions", tokens, 100) for tokens in (130, 256, 257)]
    assert costs[0].prefill_s == costs[1].prefill_s < costs[2].prefill_s
    assert costs[0].work_s == pytest.approx(costs[0].prefill_s + 100 * costs[0].token_s)


def test_a_full_batch_of_predictions_adds_up_to_the_plans_throughput() -> None:
    times = plan_times(batch=8)
    cost = Predictor(times, LengthHistory()).cost("k", "r", 500, 100)
    # Eight requests side by side: eight prefills, then 100 steps for all.
    assert 8 * cost.work_s == pytest.approx(8 * times.prefill(500) + 100 * times.step(550, 8))


def test_lengths_are_learned_by_key_and_route() -> None:
    history = LengthHistory(prior_tokens=256)
    for _ in range(64):
        history.add("short", "chat", 20)
        history.add("long", "chat", 800)
    assert history.expected("short", "chat", 4096) < 50
    assert history.expected("long", "chat", 4096) == pytest.approx(800, rel=0.1)
    assert 100 < history.expected("new", "chat", 4096) < 750, "a new key leans on its route"
    assert history.expected("short", "other route", 4096) == 256
    assert history.expected("long", "chat", 50) == pytest.approx(50, rel=0.1)


def test_one_runaway_answer_does_not_move_the_expectation() -> None:
    history = LengthHistory(prior_tokens=50)
    for _ in range(40):
        history.add("k", "chat", 50)
    before = history.expected("k", "chat", 100_000)
    history.add("k", "chat", 90_000)
    assert history.expected("k", "chat", 100_000) == pytest.approx(before, rel=0.01)


def test_memory_of_keys_is_bounded() -> None:
    history = LengthHistory(prior_tokens=7, kept=10)
    for number in range(1000):
        history.add(f"key {number}", "chat", 100)
    assert len(history._seen) <= 10
    assert history.expected("key 999", "chat", 1000) > 50


@given(st.lists(st.integers(1, 5000), max_size=80), st.integers(1, 4096))
def test_an_expectation_is_never_over_what_was_asked(lengths: list[int], most: int) -> None:
    history = LengthHistory()
    for length in lengths:
        history.add("k", "r", length)
    assert 1 <= history.expected("k", "r", most) <= most


def test_the_drain_rate_follows_what_is_done_at_full_slots_only() -> None:
    drain = DrainRate(memory_s=5.0)
    assert drain.rate(0.0) == pytest.approx(1.0)
    drain.did(100.0)  # nobody waits: says nothing about how fast it can be
    assert drain.rate(1.0) == pytest.approx(1.0)
    drain.full(1.0, True)
    for step in range(1, 301):
        drain.full(1.0 + step * 0.1, True)
        drain.did(0.05)
    assert drain.rate(31.0) == pytest.approx(0.5, rel=0.05)
    drain.full(31.0, False)
    assert drain.rate(1000.0) == pytest.approx(0.5, rel=0.05)


def test_fixed_times_share_a_slot() -> None:
    cost = Predictor(FixedTimes(0.5, 0.02, 4), LengthHistory()).cost("k", "r", 10, 100)
    assert cost.first_token_s == 0.5
    assert 4 * cost.work_s == pytest.approx(0.5 + 100 * 0.02)
