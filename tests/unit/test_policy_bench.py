"""The stall policy on a real trace at the plan's pace, and in the emulated engine's loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.serve.engines.emulated import EmulatedRequest
from app.serve.engines.emulated_static import StaticScheduler, planned_geometry
from app.serve.policy.costs import StepCosts
from app.serve.policy.stall import StallPolicy
from bench import policy

GEOMETRY = planned_geometry(slots=2, max_model_len=256, buckets=(32, 128))
COSTS = StepCosts(context={32: 20.0, 128: 60.0, 256: 200.0}, decode={32: 10.0, 128: 12.0, 256: 15.0})


def request(name: str, prompt: int = 20, tokens: int = 3) -> EmulatedRequest:
    return EmulatedRequest(name, prompt, tokens, min_tokens=0, ignore_eos=False, stop_token_ids=frozenset())


def scheduler(slo_ms: float | None = 50.0) -> StaticScheduler:
    return StaticScheduler(GEOMETRY, COSTS, StallPolicy(tpot_slo_ms=slo_ms), [7, 8, 9], 2, 1000)


def test_longest_gaps_are_halved_at_equal_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    assert policy.main(["--loads", "0.7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    ratios = report["loads"][0]["policy"]["ratios"]
    assert ratios["p99_longest_gap"] <= 0.5
    assert ratios["throughput"] >= 0.97
    # No more than one whole prefill and one decode step, which is the least that these graphs allow.
    costs = report["costs_ms"]
    bound = max(costs["context"].values()) + max(costs["decode"].values())
    assert report["loads"][0]["policy"]["longest_gap_ms"]["max"] <= bound + 0.2


def test_a_trace_without_output_lengths_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens\n5\n6\n")
    assert policy.main(["--trace", str(path)]) == 1
    assert "output length" in capsys.readouterr().err


def test_a_prefill_holds_up_every_stream_and_gives_one_token() -> None:
    engine = scheduler()
    engine.add(request("a"))
    assert engine.step_s() == pytest.approx(0.020)
    assert [(item.request.request_id, item.first) for item in engine.step(0.0)] == [("a", True)]
    engine.add(request("b"))
    assert len(engine.waiting) == 1
    assert engine.step_s() == pytest.approx(0.020), "it fits the gap"
    assert [item.request.request_id for item in engine.step(0.0)] == ["b"]
    assert engine.step_s() == pytest.approx(0.010)
    assert {item.request.request_id for item in engine.step(0.0)} == {"a", "b"}


def test_a_long_prompt_waits_for_credit_where_first_come_does_not() -> None:
    orders = {}
    for slo in (None, 50.0):
        engine = scheduler(slo)
        engine.add(request("stream", tokens=30))
        engine.step(0.0)
        engine.add(request("long", prompt=200))
        seconds = []
        got: list[str] = []
        while "long" not in got:
            seconds.append(engine.step_s())
            got = [item.request.request_id for item in engine.step(0.0)]
        orders[slo] = seconds
    assert orders[None] == [pytest.approx(0.2)]
    assert len(orders[50.0]) > 3
    assert orders[50.0][-1] == pytest.approx(0.2)


def test_a_request_that_leaves_in_the_middle_of_a_step_gets_nothing_and_frees_its_slot() -> None:
    engine = scheduler()
    engine.add(request("a"))
    engine.step_s()
    engine.abort(["a", "unknown"])
    assert engine.step(0.0) == []
    assert engine.idle
    for name in "bc":
        engine.add(request(name, tokens=1))
    given_to = [item.request.request_id for _ in range(2) for item in engine.step(0.0)]
    assert given_to == ["b", "c"]
    assert engine.idle


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 8), st.booleans()), min_size=1, max_size=12))
def test_everyone_gets_their_tokens(asked: list[tuple[int, int, bool]]) -> None:
    engine = scheduler()
    counts = {str(number): 0 for number in range(len(asked))}
    for number, (prompt, tokens, _) in enumerate(asked):
        engine.add(request(str(number), prompt, tokens))
    engine.step_s()
    gone = [str(number) for number, item in enumerate(asked) if item[2]]
    engine.abort(gone)
    for _ in range(1000):
        if engine.idle:
            break
        assert engine.step_s() > 0
        for item in engine.step(0.0):
            counts[item.request.request_id] += 1
    assert engine.idle
    assert counts == {str(n): 0 if left else tokens for n, (_, tokens, left) in enumerate(asked)}
