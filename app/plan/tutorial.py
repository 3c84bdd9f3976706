"""The tutorial's comparison table, recomputed: its claims beside today's prices and the plan's prediction.

The claims are of Llama-3-8B with prompts of 512 and answers of 256 tokens on average. Its GPU latencies and
throughputs are taken as it states them (nothing here can check them); its arithmetic and its Inf2 column can
be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.plan.catalogue import get_instance
from app.plan.models import load_model
from app.plan.planner import BATCH_SIZES, Planner, PlanRequest
from app.plan.prices import DEFAULT_REGION, usd_per_million
from app.plan.profiles import get_profile

MODEL, INPUT_TOKENS, OUTPUT_TOKENS = "meta-llama/Meta-Llama-3-8B-Instruct", 512, 256


@dataclass(frozen=True)
class Claim:
    """A column of the tutorial's table: ms, tokens/s, USD an hour, USD for a million tokens."""

    instance: str
    ttft_ms: float
    itl_ms: float
    tokens_per_s: float
    usd_per_hour: float
    usd_per_million: float


CLAIMS = (
    Claim("g5.12xlarge", 38.4, 22.1, 412, 5.67, 3.82),
    Claim("p4d.24xlarge", 12.1, 8.4, 1850, 32.77, 4.92),
    Claim("inf2.48xlarge", 14.8, 7.9, 2240, 12.98, 1.60),
)


@dataclass(frozen=True)
class Recomputed:
    """A claim with what today's price makes of its own throughput."""

    claim: Claim
    usd_per_hour: float
    usd_per_million_then: float
    usd_per_million_now: float


@dataclass(frozen=True)
class Predicted:
    """The plan's prediction for the tutorial's Inf2 workload at one degree and batch."""

    tp_degree: int
    batch_size: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    usd_per_million: float


@dataclass(frozen=True)
class Comparison:
    """The table recomputed, predictions for its Inf2 column, and what does not hold."""

    rows: tuple[Recomputed, ...]
    predictions: tuple[Predicted, ...]
    findings: tuple[str, ...]


def compare(planner: Planner) -> Comparison:
    """Recompute the tutorial's table with the planner's prices and constants."""
    rows = tuple(_recompute(planner, claim) for claim in CLAIMS)
    predictions = tuple(_predictions(planner))
    return Comparison(rows, predictions, tuple(_findings(rows, predictions)))


def _recompute(planner: Planner, claim: Claim) -> Recomputed:
    hourly = planner.prices.usd_per_hour(claim.instance, DEFAULT_REGION)
    return Recomputed(
        claim,
        hourly,
        usd_per_million(claim.usd_per_hour, claim.tokens_per_s),
        usd_per_million(hourly, claim.tokens_per_s),
    )


def _predictions(planner: Planner) -> list[Predicted]:
    request = PlanRequest(
        model=load_model(MODEL),
        profile=get_profile("vllm-neuron-2.28"),
        instance=get_instance("inf2.48xlarge"),
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        max_model_len=1024,
    )
    found = []
    for degree in (8, 24):
        for batch in BATCH_SIZES:
            plan = planner.evaluate(replace(request, tp_degree=degree, batch_size=batch), ranges=False)
            usd = plan.cost.usd_per_million_output_tokens
            if plan.performance is not None and usd is not None:
                found.append(
                    Predicted(
                        degree,
                        batch,
                        plan.performance.ttft_alone_ms.value,
                        plan.performance.tpot_ms.value,
                        plan.performance.output_tokens_per_second.value,
                        usd,
                    )
                )
    return found


def _findings(rows: tuple[Recomputed, ...], predictions: tuple[Predicted, ...]) -> list[str]:
    found = []
    for row in rows:
        claim = row.claim
        if abs(row.usd_per_hour / claim.usd_per_hour - 1) > 0.01:
            found.append(
                f"{claim.instance}: an hour is ${row.usd_per_hour:.2f}, not ${claim.usd_per_hour:.2f}; "
                f"its million tokens cost ${row.usd_per_million_now:.2f}, not ${claim.usd_per_million:.2f}"
            )
        elif abs(row.usd_per_million_then / claim.usd_per_million - 1) > 0.01:
            found.append(
                f"{claim.instance}: ${claim.usd_per_hour:.2f} an hour at {claim.tokens_per_s:g} tokens/s is "
                f"${row.usd_per_million_then:.2f} for a million, not ${claim.usd_per_million:.2f}"
            )
    by_name = {row.claim.instance: row for row in rows}
    inf2, p4d = by_name["inf2.48xlarge"], by_name["p4d.24xlarge"]
    saving = 1 - inf2.usd_per_million_now / p4d.usd_per_million_now
    claimed = 1 - inf2.claim.usd_per_million / p4d.claim.usd_per_million
    found.append(
        f"taking every throughput as claimed, inf2.48xlarge is {saving:.0%} cheaper a token than p4d "
        f"at today's prices, not {claimed:.0%}"
    )
    claim = inf2.claim
    as_fast = [item for item in predictions if item.tpot_ms <= claim.itl_ms]
    best = max((item.tokens_per_s for item in as_fast), default=0.0)
    found.append(
        f"inf2.48xlarge: {claim.tokens_per_s:g} tokens/s and {claim.itl_ms:g} ms a token at once are not "
        f"predicted: at {claim.itl_ms:g} ms or less the plan sees at most {best:.0f} tokens/s"
    )
    first = min(predictions, key=lambda item: item.ttft_ms)
    found.append(
        f"inf2.48xlarge: a first token in {claim.ttft_ms:g} ms is not predicted for {INPUT_TOKENS} tokens: "
        f"the plan sees {first.ttft_ms:.0f} ms at best (published for 128 tokens: 25 to 29 ms)"
    )
    return found
