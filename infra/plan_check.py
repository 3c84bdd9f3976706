"""The plan behind an environment: refused here, before any bill, when it cannot work.

The same planner as ``neuronfleet plan``. A refusal is a mistake of the settings, reported with the others.
The figures of a plan that works go into the stack's outputs, its warnings among those of the synthesis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aws_cdk as cdk

from app.plan.catalogue import GIB, UnknownNameError, get_instance
from app.plan.models import ModelError, load_model
from app.plan.performance import Estimate
from app.plan.planner import Plan, Planner, PlanRequest
from app.plan.prices import DEFAULT_REGION, load_prices
from app.plan.profiles import Finding, get_profile
from infra.settings_model import Settings

AUTO = "auto"


def plan_refusals(plan: Plan) -> list[str]:
    """Why synth must stop, a line each, and the nearest plans that would do."""
    lines = [f"the plan cannot work: {reason}" for reason in plan.refusals]
    if lines and plan.proposals:
        nearest = "; or ".join(
            f"{', '.join(item.changes)}"
            + (
                f" (${item.usd_per_million_output_tokens:.2f} per million output tokens)"
                if item.usd_per_million_output_tokens is not None
                else ""
            )
            for item in plan.proposals
        )
        lines[-1] += f"; nearest that fits: {nearest}"
    return lines


def make_plan(fleet: Mapping[str, Any], engine: Mapping[str, Any], wanted: Mapping[str, Any]) -> Plan | None:
    """The plan of an environment's ``fleet``, ``engine`` and ``plan`` tables; a degree of ``auto`` is chosen.

    None for a model that the plan does not know, under a profile without Neuron: nothing there is hardware.

    Raises:
        UnknownNameError: such a model under a Neuron profile; the message lists those known.
    """
    profile = get_profile(engine["profile"])
    try:
        model = load_model(engine["model"])
    except (UnknownNameError, ModelError) as error:
        if not profile.capabilities.neuron:
            return None
        if isinstance(error, ModelError):  # a folder here happens to bear the model's name
            raise UnknownNameError(f"unknown model {engine['model']!r}: {error}") from error
        raise
    request = PlanRequest(
        model=model,
        profile=profile,
        instance=get_instance(fleet["instance_type"]),
        tp_degree=None if engine["tp_degree"] == AUTO else engine["tp_degree"],
        batch_size=engine["batch_size"],
        max_model_len=engine["max_model_len"],
        weights_dtype=engine["dtype"],
        slo_ttft_ms=wanted["slo_ttft_ms"] or None,
        slo_tpot_ms=wanted["slo_tpot_ms"] or None,
    )
    # Lengths default to what most requests have; a short model length shortens them rather than failing.
    inputs = wanted["input_tokens"] or max(min(request.input_tokens, request.model_len * 3 // 4), 1)
    outputs = wanted["output_tokens"] or max(min(request.output_tokens, request.model_len - inputs), 1)
    plan = Planner(load_prices()).plan(replace(request, input_tokens=inputs, output_tokens=outputs))
    return replace(plan, findings=(*plan.findings, *_root_volume_findings(plan, fleet)))


def _root_volume_findings(plan: Plan, fleet: Mapping[str, Any]) -> list[Finding]:
    """What a root volume smaller than the plan's estimate means: refused where it cannot even hold the
    checkpoint."""
    given, needed = fleet.get("root_volume_gib"), plan.fit.root_volume_bytes / GIB
    if not plan.request.profile.capabilities.neuron or not isinstance(given, int) or given >= needed:
        return []
    message = (
        f"fleet.root_volume_gib {given} is less than the {math.ceil(needed)} GiB that image, checkpoint and "
        f"artifact of {plan.request.model.name} take by estimate: set it to at least that"
    )
    return [Finding(message=message, refuses=given * GIB < plan.fit.checkpoint_bytes)]


def settings_plan(settings: Settings) -> Plan | None:
    """The plan of settings that were checked."""
    return make_plan(settings.fleet.model_dump(), settings.engine.model_dump(), settings.plan.model_dump())


def record_plan(stack: cdk.Stack, plan: Plan | None) -> None:
    """Put the plan's figures into ``stack``'s outputs, and its warnings before whoever synthesizes."""
    if plan is None or plan.performance is None:
        return
    performance, cost = plan.performance, plan.cost
    figures = {
        "PlanTtftMs": ("time to first token of one request, ms", performance.ttft_alone_ms),
        "PlanTpotMs": ("time per output token at a full batch, ms", performance.tpot_ms),
        "PlanTokensPerSecond": ("output tokens a second of one host", performance.output_tokens_per_second),
    }
    for name, (what, value) in figures.items():
        cdk.CfnOutput(
            stack, name, value=_rounded(value.value), description=f"Predicted {what} ({_range(value)})"
        )
    if cost.usd_per_million_output_tokens is not None:
        cdk.CfnOutput(
            stack,
            "PlanUsdPerMillionOutputTokens",
            value=f"{cost.usd_per_million_output_tokens:.2f}",
            description=f"Predicted, at {DEFAULT_REGION} on-demand prices and full use",
        )
    for number, finding in enumerate(plan.findings):
        if not finding.refuses:
            cdk.Annotations.of(stack).add_warning_v2(f"neuronfleet:plan:{number}", finding.message)


def plan_markdown(plan: Plan | None) -> str:
    """The plan's figures for a dashboard's text widget."""
    if plan is None or plan.performance is None:
        return "No plan: the engine profile does not run on Neuron hardware."
    performance, request = plan.performance, plan.request
    rows = (
        ("TTFT, one request, ms", performance.ttft_alone_ms),
        ("TPOT, full batch, ms", performance.tpot_ms),
        ("output tokens/s, one host", performance.output_tokens_per_second),
    )
    lines = [
        f"**Planned** for {request.input_tokens} input and {request.output_tokens} output tokens, "
        f"degree {plan.fit.shape.tp_degree}, batch {request.batch_size}",
        "| | predicted | 80 % range |",
        "|---|---|---|",
        *(f"| {name} | {_rounded(value.value)} | {_range(value)} |" for name, value in rows),
    ]
    return "\n".join(lines)


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _range(value: Estimate) -> str:
    return f"{_rounded(value.low)} to {_rounded(value.high)}"
