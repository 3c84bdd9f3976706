"""Plans: choices, refusals, proposals, costs; and that no sweep or plan takes long."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.plan.catalogue import INF2
from app.plan.frontier import Point, mark_frontier, sweep
from app.plan.models import known_models, load_model
from app.plan.planner import Plan, Planner, PlanRequest
from app.plan.prices import load_prices
from app.plan.profiles import get_profile
from app.plan.tutorial import compare

PLANNER = Planner(load_prices())


def request(model: str = "Llama-3-8B", instance: str | None = None, **more) -> PlanRequest:
    profile = get_profile(more.pop("profile", "vllm-neuron-2.28"))
    return PlanRequest(
        model=load_model(model), profile=profile, instance=INF2[instance] if instance else None, **more
    )


def plan(*args, **more) -> Plan:
    return PLANNER.plan(request(*args, **more))


def test_the_cheapest_plan_is_chosen_among_all() -> None:
    chosen = plan(slo_tpot_ms=20)
    assert chosen.fits
    assert chosen.performance is not None
    assert chosen.performance.tpot_ms.value <= 20
    costs = []
    for instance in INF2.values():
        for degree in (1, 2, 4, 8, 24):
            other = PLANNER.evaluate(request(instance=instance.name, tp_degree=degree))
            if not other.refusals and other.performance and other.performance.tpot_ms.value <= 20:
                costs.append(other.cost.usd_per_million_output_tokens)
    assert chosen.cost.usd_per_million_output_tokens == min(costs)


def test_what_was_asked_for_is_kept() -> None:
    chosen = plan(instance="inf2.48xlarge", tp_degree=8)
    assert (chosen.fit.instance.name, chosen.fit.shape.tp_degree) == ("inf2.48xlarge", 8)
    assert chosen.fit.replicas_per_instance == 3
    assert chosen.proposals == ()


@pytest.mark.parametrize(("tp_degree", "instance"), [(12, "inf2.24xlarge"), (16, "inf2.48xlarge"), (3, None)])
def test_undocumented_degrees_get_proposals(tp_degree: int, instance: str | None) -> None:
    refused = plan(instance=instance, tp_degree=tp_degree)
    assert not refused.fits
    assert "not documented" in refused.reasons[0]
    assert refused.performance is None
    assert len(refused.proposals) == 3
    assert any(f"tp_degree {tp_degree} -> " in change for change in refused.proposals[0].changes)


def test_every_proposal_fits_and_the_nearest_comes_first() -> None:
    refused = plan("Llama-3-70B", "inf2.24xlarge", batch_size=16)
    assert not refused.fits
    assert refused.proposals
    counts = [len(item.changes) for item in refused.proposals]
    assert counts == sorted(counts)
    for item in refused.proposals:
        again = PLANNER.evaluate(
            request(
                "Llama-3-70B",
                item.instance,
                tp_degree=item.shape.tp_degree,
                batch_size=item.shape.batch_size,
                max_model_len=item.shape.max_model_len,
                weights_dtype=item.shape.weights_dtype,
            )
        )
        assert again.fits
        assert again.refusals == ()
        assert again.cost.usd_per_million_output_tokens == pytest.approx(item.usd_per_million_output_tokens)


def test_a_model_that_fits_nowhere_says_so() -> None:
    refused = plan("Llama-3.1-405B")
    assert not refused.fits
    assert refused.fit.instance.name == "inf2.48xlarge"
    assert refused.proposals == ()


def test_lengths_over_the_model_length_are_a_reason() -> None:
    refused = plan(
        instance="inf2.8xlarge", tp_degree=2, max_model_len=1024, input_tokens=1000, output_tokens=100
    )
    assert "1100, more than the model length of 1024" in refused.reasons[-1]
    assert refused.proposals[0].changes == ("max_model_len 1024 -> 1100",)


def test_a_proposal_gives_up_no_more_than_it_must() -> None:
    refused = plan(instance="inf2.48xlarge", tp_degree=8, max_model_len=100_000)
    assert refused.proposals[0].changes == ("max_model_len 100000 -> 8192",)
    refused = plan(instance="inf2.48xlarge", tp_degree=8, batch_size=1000)
    assert refused.proposals[0].changes == ("batch_size 1000 -> 125",)


def test_a_prompt_that_no_context_bucket_holds_is_a_reason() -> None:
    asked = {"instance": "inf2.48xlarge", "tp_degree": 8, "input_tokens": 1024}
    assert plan(**asked, context_buckets=(128, 1024)).fits
    assert plan(**asked, context_buckets=(128, 512)).reasons == (
        "no context bucket holds 1024 input tokens: the last is 512",
    )
    assert plan(**asked, context_buckets=(1024, 8192)).reasons == (
        "context bucket 8192 is more than the model length of 4096",
    )


def test_what_the_config_leaves_open_is_a_warning() -> None:
    asked = request(instance="inf2.48xlarge", tp_degree=8)
    noted = replace(asked, model=asked.model.model_copy(update={"notes": ("this and that",)}))
    found = PLANNER.plan(noted)
    assert found.refusals == ()
    assert "Llama-3-8B: this and that" in found.warnings


def test_profile_findings_warn_and_refuse_without_denying_the_fit() -> None:
    refused = plan("Qwen/Qwen3-8B", "inf2.48xlarge", tp_degree=8)
    assert refused.fits
    assert "#1303" in refused.warnings[0]
    assert any("#1303" in reason for reason in refused.refusals)
    assert plan("Qwen/Qwen3-8B", "inf2.48xlarge", tp_degree=8, profile="emulated").refusals == ()


def test_host_memory_warns_and_does_not_refuse() -> None:
    small = plan(instance="inf2.xlarge", tp_degree=2)
    assert small.fits
    assert small.refusals == ()
    assert "would be killed" in " ".join(small.warnings)
    assert plan().fit.instance.name != "inf2.xlarge"  # and is never chosen


def test_objectives_missed_even_at_best_refuse() -> None:
    hopeless = plan(instance="inf2.8xlarge", tp_degree=2, slo_tpot_ms=5, slo_ttft_ms=1)
    assert len(hopeless.refusals) == 2
    nearest = plan(slo_tpot_ms=0.1).fit  # where none meets it, the nearest that the host can load
    assert (nearest.instance.name, nearest.shape.tp_degree) == ("inf2.48xlarge", 24)
    assert "TTFT objective of 1 ms is missed" in hopeless.refusals[0]
    value = plan(instance="inf2.8xlarge", tp_degree=2).performance.tpot_ms
    near = plan(instance="inf2.8xlarge", tp_degree=2, slo_tpot_ms=(value.low + value.value) / 2)
    assert near.refusals == ()
    assert any("TPOT objective" in warning for warning in near.warnings)


def test_prediction_of_a_measured_configuration_is_not_called_extrapolated() -> None:
    measured = plan(
        instance="inf2.48xlarge",
        tp_degree=24,
        profile="transformers-neuronx-2.25",
        weights_dtype="int8",
        input_tokens=128,
        output_tokens=3968,
    )
    assert measured.performance.extrapolations == ()
    assert measured.performance.tpot_ms.value == pytest.approx(10.4, rel=0.08)
    assert measured.performance.output_tokens_per_second.value == pytest.approx(859, rel=0.10)


def test_cost_is_price_over_throughput() -> None:
    found = plan(instance="inf2.8xlarge", tp_degree=2, region="eu-west-1", utilisation=0.5)
    rate = found.performance.output_tokens_per_second.value
    assert found.cost.usd_per_hour == 2.45982
    assert found.cost.usd_per_million_output_tokens == pytest.approx(2.45982 / (rate * 0.5 * 3600) * 1e6)
    split = found.cost.split_input * 1024 / 256 + found.cost.split_output
    assert split == pytest.approx(found.cost.usd_per_million_output_tokens)


def test_no_price_is_said_and_costs_nothing_else() -> None:
    found = plan(instance="inf2.8xlarge", tp_degree=2, purchase="spot")
    assert found.fits
    assert found.cost.usd_per_million_output_tokens is None
    assert "no spot price" in found.warnings[-1]
    assert plan(purchase="spot").fits


@given(
    st.sampled_from(known_models()),
    st.sampled_from([None, *INF2]),
    st.one_of(st.none(), st.integers(1, 24)),
    st.integers(1, 64),
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from(("vllm-neuron-2.28", "transformers-neuronx-2.25", "cpu", "emulated")),
    st.sampled_from(("bf16", "int8")),
)
def test_any_request_gets_a_plan(model, instance, degree, batch, inputs, outputs, profile, dtype) -> None:
    found = PLANNER.plan(
        request(
            model,
            instance,
            tp_degree=degree,
            batch_size=batch,
            input_tokens=inputs,
            output_tokens=outputs,
            profile=profile,
            weights_dtype=dtype,
        )
    )
    assert found.fits == (not found.reasons) == (found.performance is not None)
    if found.performance is not None:
        for value in (found.performance.ttft_ms, found.performance.tpot_ms):
            assert 0 < value.low < value.value < value.high
    assert found.fits or all(item.shape.max_model_len >= inputs + outputs for item in found.proposals)


def test_a_plan_and_a_sweep_are_quick() -> None:
    started = time.process_time()
    for model in ("Llama-3-8B", "Llama-3-70B", "Llama-3.1-405B", "SmolLM2-135M"):
        plan(model)
    assert time.process_time() - started < 2
    started = time.process_time()
    for model in ("Llama-3-8B", "Llama-3-70B"):
        sweep(PLANNER, request(model))
    assert time.process_time() - started < 2


points = st.builds(
    Point,
    instance=st.just("inf2.48xlarge"),
    tp_degree=st.just(8),
    batch_size=st.just(1),
    tpot_ms=st.floats(1, 100),
    ttft_ms=st.just(1.0),
    tokens_per_s=st.just(1.0),
    usd_per_million=st.floats(1, 100),
)


@given(st.lists(points, max_size=12))
def test_the_frontier_is_what_nothing_beats(found: list[Point]) -> None:
    marked = mark_frontier(found)
    assert sorted(replace(p, on_frontier=False).usd_per_million for p in marked) == sorted(
        p.usd_per_million for p in found
    )
    for point in marked:
        beaten = any(
            (other.tpot_ms <= point.tpot_ms and other.usd_per_million < point.usd_per_million)
            or (other.tpot_ms < point.tpot_ms and other.usd_per_million <= point.usd_per_million)
            for other in marked
        )
        if point.on_frontier:
            assert not beaten
        elif not beaten:  # an equal point stands for it
            assert any(
                p.on_frontier and (p.tpot_ms, p.usd_per_million) == (point.tpot_ms, point.usd_per_million)
                for p in marked
            )


def test_the_tutorials_claims_are_checked() -> None:
    comparison = compare(PLANNER)
    p4d = next(row for row in comparison.rows if row.claim.instance == "p4d.24xlarge")
    assert p4d.usd_per_hour == 21.957642
    assert p4d.usd_per_million_now == pytest.approx(3.297, abs=0.001)
    assert p4d.usd_per_million_then == pytest.approx(4.92, abs=0.005)
    text = "\n".join(comparison.findings)
    assert "$21.96, not $32.77" in text
    assert "51% cheaper" in text
    assert "14.8 ms is not predicted" in text


def test_every_way_of_buying_is_priced(tmp_path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        '{"version": 1, "dated": "2027-01-01", "source": "ours", '
        '"regions": {"us-east-1": {"inf2.8xlarge": {"spot": 0.7}}}}'
    )
    asked = request(instance="inf2.8xlarge", tp_degree=2)
    shipped = PLANNER.plan(asked).cost.by_purchase
    own = Planner(load_prices(path)).plan(asked).cost.by_purchase
    assert shipped["spot"] is None
    assert own["spot"] / own["on_demand"] == pytest.approx(0.7 / 1.96786)
    assert own["reserved_1y"] == shipped["reserved_1y"] < shipped["on_demand"]
