"""The sweep over sizes, degrees and batches, and the plans in it that no other beats on both latency and
cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.plan.catalogue import INF2
from app.plan.planner import BATCH_SIZES, Plan, Planner, PlanRequest, degrees


@dataclass(frozen=True)
class Point:
    """One plan of the sweep: time per output token (ms) against USD for a million output tokens."""

    instance: str
    tp_degree: int
    batch_size: int
    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float
    usd_per_million: float
    on_frontier: bool = False


def sweep(planner: Planner, request: PlanRequest) -> tuple[Point, ...]:
    """Every size, documented degree and batch that fits, is supported and has a price, cheapest first."""
    found = []
    for instance in INF2.values():
        for degree in degrees(request, instance):
            for batch in BATCH_SIZES:
                asked = replace(request, instance=instance, tp_degree=degree, batch_size=batch)
                point = _point(planner.evaluate(asked, ranges=False))
                if point is not None:
                    found.append(point)
    return mark_frontier(found)


def mark_frontier(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points, cheapest first, with those marked that none beats on both axes."""
    marked, fastest = [], float("inf")
    for point in sorted(points, key=lambda item: (item.usd_per_million, item.tpot_ms)):
        marked.append(replace(point, on_frontier=point.tpot_ms < fastest))
        fastest = min(fastest, point.tpot_ms)
    return tuple(marked)


def _point(plan: Plan) -> Point | None:
    usd = plan.cost.usd_per_million_output_tokens
    if plan.refusals or plan.performance is None or usd is None:
        return None
    if plan.fit.host_bytes > plan.fit.instance.memory_bytes:
        return None
    return Point(
        instance=plan.fit.instance.name,
        tp_degree=plan.fit.shape.tp_degree,
        batch_size=plan.fit.shape.batch_size,
        tpot_ms=plan.performance.tpot_ms.value,
        ttft_ms=plan.performance.ttft_alone_ms.value,
        tokens_per_s=plan.performance.output_tokens_per_second.value,
        usd_per_million=usd,
    )
