"""A plan as the JSON document that ``neuronfleet plan --json`` prints (keys: docs/guides/plan.md)."""

from __future__ import annotations

from typing import Any

from app.plan.catalogue import QUOTA_ON_DEMAND, QUOTA_SPOT
from app.plan.performance import Estimate
from app.plan.planner import Plan, Proposal


def plan_document(plan: Plan) -> dict[str, Any]:
    """The document: the keys of the fixed interface first, then what explains them.

    Bytes, ms, tokens a second, USD. Predictions are null where the plan does not fit, costs also where no
    price is known.
    """
    request, fitted, performance, cost = plan.request, plan.fit, plan.performance, plan.cost
    return {
        "fits": plan.fits,
        "reasons": list(plan.reasons),
        "tp_degree": fitted.shape.tp_degree,
        "replicas_per_instance": fitted.replicas_per_instance,
        "weights_bytes_per_core": fitted.weights_bytes_per_core,
        "kv_cache_bytes_per_core": fitted.kv_cache_bytes_per_core,
        "ttft_ms": None if performance is None else performance.ttft_ms.value,
        "tpot_ms": None if performance is None else performance.tpot_ms.value,
        "output_tokens_per_second": (
            None if performance is None else performance.output_tokens_per_second.value
        ),
        "usd_per_million_output_tokens": cost.usd_per_million_output_tokens,
        "warnings": list(plan.warnings),
        "model": request.model.name,
        "instance": fitted.instance.name,
        "profile": request.profile.name,
        "batch_size": fitted.shape.batch_size,
        "max_model_len": fitted.shape.max_model_len,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "weights_dtype": fitted.shape.weights_dtype,
        "memory": {
            "activation_bytes_per_core": fitted.activation_bytes_per_core,
            "reserve_bytes_per_core": fitted.reserve_bytes_per_core,
            "bytes_per_core": fitted.bytes_per_core,
            "hbm_bytes_per_core": fitted.instance.hbm_bytes_per_core,
            "query_heads": fitted.sharding.heads,
            "kv_heads": fitted.sharding.kv_heads,
            "host_bytes": fitted.host_bytes,
            "root_volume_bytes": fitted.root_volume_bytes,
            "network_load_s": fitted.network_load_s,
            "volume_load_s": fitted.volume_load_s,
        },
        "quota": {
            "on_demand": QUOTA_ON_DEMAND,
            "spot": QUOTA_SPOT,
            "vcpus_per_instance": fitted.instance.vcpus,
        },
        "idle_cores": fitted.idle_cores,
        "ranges": (
            {}
            if performance is None
            else {
                "ttft_ms": _range(performance.ttft_ms),
                "tpot_ms": _range(performance.tpot_ms),
                "output_tokens_per_second": _range(performance.output_tokens_per_second),
            }
        ),
        "ttft_alone_ms": None if performance is None else performance.ttft_alone_ms.value,
        "decode_tokens_per_second": (
            None if performance is None else performance.decode_tokens_per_second.value
        ),
        "extrapolated": [] if performance is None else list(performance.extrapolations),
        "cost": {
            "region": request.region,
            "purchase": request.purchase,
            "utilisation": request.utilisation,
            "usd_per_hour": cost.usd_per_hour,
            "usd_per_million_input_tokens_split": cost.split_input,
            "usd_per_million_output_tokens_split": cost.split_output,
            "usd_per_million_output_tokens_by_purchase": dict(cost.by_purchase),
        },
        "proposals": [_proposal(item) for item in plan.proposals],
    }


def _range(value: Estimate) -> list[float]:
    return [value.low, value.high]


def _proposal(proposal: Proposal) -> dict[str, Any]:
    return {
        "changes": list(proposal.changes),
        "instance": proposal.instance,
        "tp_degree": proposal.shape.tp_degree,
        "batch_size": proposal.shape.batch_size,
        "max_model_len": proposal.shape.max_model_len,
        "weights_dtype": proposal.shape.weights_dtype,
        "tpot_ms": proposal.tpot_ms,
        "usd_per_million_output_tokens": proposal.usd_per_million_output_tokens,
    }
