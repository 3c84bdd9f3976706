"""One plan: what is asked for, whether it fits, how it performs, what it costs, and what would do instead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from app.plan.catalogue import INF2, InstanceType
from app.plan.fit import Fit, Shape, fit
from app.plan.models import ModelConfig
from app.plan.performance import (
    Constants,
    Estimate,
    ReplicaModel,
    Workload,
    estimate,
    extrapolations,
    shipped_constants,
)
from app.plan.prices import DEFAULT_REGION, PriceBook, Purchase, usd_per_million
from app.plan.profiles import EngineProfile, Finding
from app.plan.sharding import WeightsDtype

DEFAULT_MAX_MODEL_LEN = 4096
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
# How much wider a range gets for each respect in which a plan leaves the measured rows, and at most.
_WIDEN_EACH = 0.5
_WIDEN_MOST = 2.0


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for. ``instance`` and ``tp_degree`` None: choose. Lengths in tokens, times in ms.

    ``max_model_len`` None: 4096, or what the lengths need, within the model's positions.
    """

    model: ModelConfig
    profile: EngineProfile
    instance: InstanceType | None = None
    tp_degree: int | None = None
    batch_size: int = 8
    max_model_len: int | None = None
    input_tokens: int = 1024
    output_tokens: int = 256
    weights_dtype: WeightsDtype = "bf16"
    prefix_caching: bool = False
    context_buckets: tuple[int, ...] = ()
    region: str = DEFAULT_REGION
    purchase: Purchase = "on_demand"
    utilisation: float = 1.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    @property
    def model_len(self) -> int:
        """The model length that is compiled for."""
        if self.max_model_len is not None:
            return self.max_model_len
        need = self.input_tokens + self.output_tokens
        return max(need, min(DEFAULT_MAX_MODEL_LEN, self.model.max_positions or DEFAULT_MAX_MODEL_LEN))

    @property
    def work(self) -> Workload:
        """The requests that performance is predicted for."""
        return Workload(self.input_tokens, self.output_tokens, self.batch_size)


@dataclass(frozen=True)
class Performance:
    """Predictions at a full batch. ``ttft_ms`` is of a batch that arrives together, ``ttft_alone_ms`` of one
    request on an idle replica; ``tpot_ms`` is the median; tokens a second are of the whole instance, with
    prefill's share (``output``) and without (``decode``: how published tables count)."""

    ttft_ms: Estimate
    ttft_alone_ms: Estimate
    tpot_ms: Estimate
    output_tokens_per_second: Estimate
    decode_tokens_per_second: Estimate
    extrapolations: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """USD. ``usd_per_million_output_tokens`` lays the whole bill on the output, ``by_purchase`` does so for
    each way of buying; ``split`` lays it on input and output by the time that prefill and decode take. None
    where the price book has no price."""

    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    split_input: float | None
    split_output: float | None
    by_purchase: dict[Purchase, float | None]


@dataclass(frozen=True)
class Proposal:
    """A plan near the one asked for that fits: what it changes, and what it costs."""

    changes: tuple[str, ...]
    instance: str
    shape: Shape
    tpot_ms: float
    usd_per_million_output_tokens: float | None


@dataclass(frozen=True)
class Plan:
    """The answer to a request. ``performance`` is None where it does not fit."""

    request: PlanRequest
    fit: Fit
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    performance: Performance | None
    cost: Cost
    proposals: tuple[Proposal, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether geometry, degree, lengths and memory allow it."""
        return not self.reasons

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the engine profile and the prediction have to say about it."""
        return tuple(item.message for item in self.findings)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why synth must refuse it: it does not fit, or the profile does not support it."""
        return (*self.reasons, *(item.message for item in self.findings if item.refuses))


class Planner:
    """Makes plans with one price book and one set of constants."""

    def __init__(self, prices: PriceBook, constants: Constants | None = None) -> None:
        self.prices = prices
        self.constants = constants or shipped_constants()

    def plan(self, request: PlanRequest) -> Plan:
        """The plan of ``request``: its best choice where it leaves one, with proposals where it fails."""
        candidates = [self.evaluate(item) for item in _choices(request)]
        ready = [item for item in candidates if not item.refusals]
        if ready:
            return min(ready, key=_rank)
        fitting = [item for item in candidates if item.fits]
        if fitting:
            return replace(min(fitting, key=_rank), proposals=self._proposals(request))
        # Nothing fits: show the choice with most memory for the least shortfall, and what would do.
        nearest = min(candidates, key=lambda item: (len(item.reasons), item.fit.bytes_per_core))
        return replace(nearest, proposals=self._proposals(nearest.request))

    def evaluate(self, request: PlanRequest, *, ranges: bool = True) -> Plan:
        """The plan of a request that leaves no choice (instance and degree given).

        ``ranges`` False leaves the predictions' ranges out, which makes sweeps fast.
        """
        assert request.instance is not None
        assert request.tp_degree is not None
        shape = Shape(request.tp_degree, request.batch_size, request.model_len, request.weights_dtype)
        fitted = fit(request.model, request.instance, shape)
        reasons = (*fitted.reasons, *_length_reasons(request))
        findings = [
            *request.profile.findings(
                model=request.model.name,
                family=request.model.family,
                tp_degree=request.tp_degree,
                batch_size=request.batch_size,
                weights_dtype=request.weights_dtype,
                prefix_caching=request.prefix_caching,
            ),
            *(Finding(message=message, refuses=False) for message in fitted.warnings),
            *(
                Finding(message=f"{request.model.name}: {note}", refuses=False)
                for note in request.model.notes
            ),
        ]
        performance = None
        if not reasons:
            performance = self._performance(request, fitted, ranges=ranges)
            findings += _slo_findings(request, performance)
            if performance.extrapolations:
                findings.append(
                    Finding(
                        message="performance is extrapolated: " + "; ".join(performance.extrapolations),
                        refuses=False,
                    )
                )
        cost = self._cost(request, fitted, performance)
        if cost.usd_per_hour is None:
            findings.append(
                Finding(
                    message=f"no {request.purchase} price for {request.instance.name} in {request.region}: "
                    f"no cost",
                    refuses=False,
                )
            )
        return Plan(request, fitted, reasons, tuple(findings), performance, cost)

    def replica(self, request: PlanRequest, fitted: Fit) -> ReplicaModel:
        """The timing of one replica of a plan."""
        return ReplicaModel(
            fitted.sharding,
            fitted.instance,
            fitted.shape.max_model_len,
            self.constants,
            context_buckets=request.context_buckets,
        )

    def _performance(self, request: PlanRequest, fitted: Fit, *, ranges: bool) -> Performance:
        replica, work = self.replica(request, fitted), request.work
        count = fitted.replicas_per_instance
        outside = extrapolations(replica, work, engine=request.profile.engine)
        widen = min(1.0 + _WIDEN_EACH * len(outside), _WIDEN_MOST)

        def predict(quantity: str, of: Any, factor: float) -> Estimate:
            if not ranges:
                value = of(replica) * factor
                return Estimate(value, value, value)
            return estimate(replica, quantity, of, widen=widen).scaled(factor)

        return Performance(
            ttft_ms=predict("ttft", lambda r: r.prefill_s(work.input_tokens, work.batch_size), 1e3),
            ttft_alone_ms=predict("ttft", lambda r: r.prefill_s(work.input_tokens), 1e3),
            tpot_ms=predict("tpot", lambda r: r.median_step_s(work), 1e3),
            output_tokens_per_second=predict("throughput", lambda r: r.served_tokens_per_s(work), count),
            decode_tokens_per_second=predict("throughput", lambda r: r.decode_tokens_per_s(work), count),
            extrapolations=outside,
        )

    def _cost(self, request: PlanRequest, fitted: Fit, performance: Performance | None) -> Cost:
        hourly = self.prices.find(fitted.instance.name, request.region, request.purchase)
        if hourly is None or performance is None:
            return Cost(hourly, None, None, None, {})
        served = performance.output_tokens_per_second.value
        hourlies = {
            way: self.prices.find(fitted.instance.name, request.region, way) for way in get_args(Purchase)
        }
        whole = usd_per_million(hourly, served, request.utilisation)
        share = served / performance.decode_tokens_per_second.value  # of the time, spent in decode
        return Cost(
            usd_per_hour=hourly,
            usd_per_million_output_tokens=whole,
            split_input=whole * (1 - share) * request.output_tokens / request.input_tokens,
            split_output=whole * share,
            by_purchase={
                way: None if price is None else usd_per_million(price, served, request.utilisation)
                for way, price in hourlies.items()
            },
        )

    def _proposals(self, request: PlanRequest, most: int = 3) -> tuple[Proposal, ...]:
        """The nearest plans that fit and are supported: fewest changes first, then by cost. Of each size and
        degree it is the one that gives up least of the batch and the length."""
        found: dict[tuple[str, int], tuple[int, float, float, Proposal]] = {}
        for changed in _neighbours(request):
            plan = self.evaluate(changed, ranges=False)
            if (
                plan.refusals
                or plan.performance is None
                or plan.fit.host_bytes > plan.fit.instance.memory_bytes
            ):
                continue
            changes = _changes(request, plan)
            usd = plan.cost.usd_per_million_output_tokens
            proposal = Proposal(
                changes, plan.fit.instance.name, plan.fit.shape, plan.performance.tpot_ms.value, usd
            )
            key = (plan.fit.instance.name, plan.fit.shape.tp_degree)
            rank = (
                len(changes),
                _shortfall(request, changed),
                float("inf") if usd is None else usd,
                proposal,
            )
            if key not in found or rank[:3] < found[key][:3]:
                found[key] = rank
        ranked = sorted(found.values(), key=lambda item: (item[0], item[2]))
        return tuple(item[3] for item in ranked[:most])


def degrees(request: PlanRequest, instance: InstanceType) -> tuple[int, ...]:
    """The degrees that the profile documents and the instance's cores hold."""
    return tuple(degree for degree in request.profile.tp_degrees if degree <= instance.cores)


def _choices(request: PlanRequest) -> Iterator[PlanRequest]:
    for instance in INF2.values() if request.instance is None else (request.instance,):
        for degree in degrees(request, instance) if request.tp_degree is None else (request.tp_degree,):
            yield replace(request, instance=instance, tp_degree=degree)


def _neighbours(request: PlanRequest) -> Iterator[PlanRequest]:
    """Requests that differ in size, degree, batch, length or dtype, none of them greedier than asked."""
    need = request.input_tokens + request.output_tokens
    lengths = sorted({request.model_len, *(n for n in _halves(request.model_len) if n >= need)}, reverse=True)
    positions = request.model.max_positions
    if positions is not None and positions >= need:
        lengths = sorted({min(n, positions) for n in lengths}, reverse=True)
    if need > request.model_len and (positions is None or need <= positions):
        lengths = [need]
    dtypes = dict.fromkeys((request.weights_dtype, *request.profile.capabilities.weights_dtypes))
    for instance in INF2.values():
        for degree in degrees(request, instance):
            for dtype in dtypes:
                for length in lengths:
                    for batch in (request.batch_size, *_halves(request.batch_size)):
                        yield replace(
                            request,
                            instance=instance,
                            tp_degree=degree,
                            weights_dtype="int8" if dtype == "int8" else "bf16",
                            max_model_len=length,
                            batch_size=batch,
                        )


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _shortfall(request: PlanRequest, changed: PlanRequest) -> float:
    """How far a request's batch and length lie from those asked for, in halvings."""
    return abs(math.log2(request.batch_size) - math.log2(changed.batch_size)) + abs(
        math.log2(request.model_len) - math.log2(changed.model_len)
    )


def _changes(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    shape, asked = plan.fit.shape, request
    pairs = (
        ("instance", asked.instance.name if asked.instance else None, plan.fit.instance.name),
        ("tp_degree", asked.tp_degree, shape.tp_degree),
        ("batch_size", asked.batch_size, shape.batch_size),
        ("max_model_len", asked.model_len, shape.max_model_len),
        ("weights_dtype", asked.weights_dtype, shape.weights_dtype),
    )
    return tuple(f"{name} {was} -> {now}" for name, was, now in pairs if was is not None and was != now)


def _length_reasons(request: PlanRequest) -> tuple[str, ...]:
    need = request.input_tokens + request.output_tokens
    found = []
    if need > request.model_len:
        found.append(
            f"{request.input_tokens} input and {request.output_tokens} output tokens are {need}, more than "
            f"the model length of {request.model_len}"
        )
    if request.context_buckets:
        longest = request.context_buckets[-1]
        if longest < request.input_tokens:
            found.append(
                f"no context bucket holds {request.input_tokens} input tokens: the last is {longest}"
            )
        if longest > request.model_len:
            found.append(f"context bucket {longest} is more than the model length of {request.model_len}")
    return tuple(found)


def _slo_findings(request: PlanRequest, performance: Performance) -> list[Finding]:
    """An objective is refused when even the fast end of the range misses it, and warned of when the middle
    does."""
    found = []
    for name, limit, predicted in (
        ("TTFT", request.slo_ttft_ms, performance.ttft_alone_ms),
        ("TPOT", request.slo_tpot_ms, performance.tpot_ms),
    ):
        if limit is not None and predicted.value > limit:
            found.append(
                Finding(
                    message=f"{name} objective of {limit:g} ms is missed: predicted {predicted.value:.1f} ms "
                    f"({predicted.low:.1f} to {predicted.high:.1f})",
                    refuses=predicted.low > limit,
                )
            )
    return found


def _overshoot(plan: Plan) -> float:
    """The worst of the predictions over its objective; 1 where every objective is met."""
    request, performance = plan.request, plan.performance
    assert performance is not None
    pairs = (
        (performance.ttft_alone_ms.value, request.slo_ttft_ms),
        (performance.tpot_ms.value, request.slo_tpot_ms),
    )
    return max([1.0, *(value / limit for value, limit in pairs if limit is not None)])


def _rank(plan: Plan) -> tuple[bool, float, float, float]:
    """Those that the host can load first, then the nearest to the objectives, then the cheapest a token;
    where there is no price, most tokens a second of a core."""
    assert plan.performance is not None
    usd = plan.cost.usd_per_million_output_tokens
    per_core = plan.performance.output_tokens_per_second.value / plan.fit.instance.cores
    killed = plan.fit.host_bytes > plan.fit.instance.memory_bytes
    return (killed, _overshoot(plan), usd if usd is not None else 0.0, -per_core)
