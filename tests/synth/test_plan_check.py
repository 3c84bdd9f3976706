"""Synth refuses what the plan says cannot work, and shows the figures of what can."""

from __future__ import annotations

import json
from pathlib import Path

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Annotations, Match, Template

from infra.bundle import Bundle
from infra.plan_check import plan_markdown, record_plan, settings_plan
from infra.settings import SettingsError, environment_names, load_settings
from infra.stacks import add_stacks


def mistakes(environment: str, **context: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environment, context)
    return "\n".join(caught.value.mistakes)


@pytest.mark.parametrize("environment", environment_names())
@pytest.mark.parametrize("rehearsal", ["false", "true"])
def test_every_environment_has_a_plan_that_works(environment: str, rehearsal: str) -> None:
    plan = settings_plan(load_settings(environment, {"rehearsal": rehearsal}))
    assert plan is not None
    assert plan.fits
    assert plan.refusals == ()


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"tp_degree": "12"}, "degree 12 is not documented"),
        ({"instance_type": "inf2.8xlarge"}, "needs 8 NeuronCores, inf2.8xlarge has 2"),
        ({"model": "meta-llama/Meta-Llama-3-70B"}, "a core needs"),
        ({"model": "Qwen/Qwen3-8B"}, "aws-neuron-sdk#1303"),
        ({"model": "mistralai/Mistral-7B-v0.3"}, "not on its list of supported models"),
        ({"model": "openai/gpt-oss-20b"}, "unknown model 'openai/gpt-oss-20b'"),
        ({"max_model_len": "100000"}, "more than the 8192 positions"),
        ({"slo_tpot_ms": "3"}, "TPOT objective of 3 ms is missed"),
        ({"model": "infra"}, "unknown model 'infra': folder infra holds no config.json"),
        (
            {"model": "Llama-3-70B", "tp_degree": "24", "root_volume_gib": "130"},
            "root_volume_gib 130 is less",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(context: dict[str, str], said: str) -> None:
    assert said in mistakes("prod", **context)


def test_a_root_volume_under_the_estimate_is_a_warning() -> None:
    asked = {"model": "Llama-3-70B", "tp_degree": "24", "root_volume_gib": "200"}
    plan = settings_plan(load_settings("prod", asked))
    assert plan is not None
    assert plan.refusals == ()
    assert "root_volume_gib 200 is less than the 365 GiB" in plan.warnings[-1]
    enough = settings_plan(load_settings("prod", {**asked, "root_volume_gib": "365"}))
    assert enough is not None
    assert not any("root_volume_gib" in warning for warning in enough.warnings)


def test_a_refusal_proposes_the_nearest_that_fits() -> None:
    text = mistakes("blueprint", tp_degree="12")
    assert "nearest that fits: tp_degree 12 -> " in text
    assert "per million output tokens" in text


def test_a_refusal_comes_with_the_other_mistakes() -> None:
    text = mistakes("prod", tp_degree="12", keep_alive_s="10")
    assert "not documented" in text
    assert "keep_alive_s" in text


def test_auto_chooses_a_degree_that_works() -> None:
    settings = load_settings("prod", {"tp_degree": "auto"})
    assert settings.engine.tp_degree in (1, 2, 4, 8, 24)
    plan = settings_plan(settings)
    assert plan is not None
    assert plan.refusals == ()
    assert load_settings("prod", {"tp_degree": "auto", "slo_tpot_ms": "16"}).engine.tp_degree in (8, 24)


def test_an_unknown_model_is_no_matter_without_neuron() -> None:
    settings = load_settings("dev", {"rehearsal": "true", "model": "someone/their-own-model"})
    assert settings_plan(settings) is None
    stack = cdk.Stack()
    record_plan(stack, None)
    assert "Outputs" not in Template.from_stack(stack).to_json()
    assert plan_markdown(None).startswith("No plan")


def test_figures_become_outputs_and_warnings_annotations() -> None:
    plan = settings_plan(load_settings("prod"))
    app = cdk.App()
    stack = cdk.Stack(app, "s")
    record_plan(stack, plan)
    outputs = Template.from_stack(stack).to_json()["Outputs"]
    assert plan is not None
    assert plan.performance is not None
    assert float(outputs["PlanTpotMs"]["Value"]) == pytest.approx(plan.performance.tpot_ms.value, rel=0.01)
    names = {"PlanTtftMs", "PlanTpotMs", "PlanTokensPerSecond", "PlanUsdPerMillionOutputTokens"}
    assert set(outputs) == names
    assert all("Predicted" in output["Description"] for output in outputs.values())
    found = Annotations.from_stack(stack).find_warning("*", Match.any_value())
    noted = [str(item.entry.data) for item in found]
    assert any("extrapolated" in text for text in noted)
    assert f"| {outputs['PlanTpotMs']['Value']} |" in plan_markdown(plan)


def test_the_dashboard_shows_the_plan_beside_what_is_measured(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    bundle.write_bytes(b"a bundle")
    settings = load_settings("dev")
    _, fleet = add_stacks(cdk.App(), settings, Bundle(path=bundle, sha256="0" * 64))
    (board,) = Template.from_stack(fleet).find_resources("AWS::CloudWatch::Dashboard").values()
    body = json.dumps(board["Properties"]["DashboardBody"])
    for words in ("TargetResponseTime", "HealthyHostCount", "GroupInServiceInstances"):
        assert words in body
    for line in plan_markdown(settings_plan(settings)).splitlines():
        assert line in body
